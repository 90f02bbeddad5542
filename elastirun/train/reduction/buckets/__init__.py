"""Buckets: which gradients are reduced together, and the memory that they are in."""
