"""elastirun: an elastic launcher for distributed training, a drop-in for ``torchrun``."""

__version__ = "0.1.0"
