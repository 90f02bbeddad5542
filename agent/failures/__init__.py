"""Failures of workers: which one is the root cause, who is told, which exit code it has; nodes that fail again and again."""
