"""Hangs and stragglers: watching the workers' progress, and finding the worker that is the cause."""
