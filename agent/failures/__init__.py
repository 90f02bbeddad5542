"""Failures of workers: the root cause, the report to the other nodes, the exit code; strikes of nodes that fail repeatedly."""
