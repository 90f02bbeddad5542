"""Checkpoints as files: images in shared memory, the directory, and the process that writes one into the other. Free of torch."""
