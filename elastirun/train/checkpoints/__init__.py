"""Checkpoints of what a training run is: from modules, optimizers and plain values to files in shared memory, and back."""
