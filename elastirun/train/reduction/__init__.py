"""The reduction of one backward: when gradients are ready, what is sent, and what all ranks conclude from it."""
