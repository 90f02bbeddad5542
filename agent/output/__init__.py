"""The output of workers: whole lines to the console, logs within limits, and a thread for whatever touches a disk."""
