"""Optimizers whose state is spread over the ranks: each keeps that of some rows, and steps these for all (ZeRO-1)."""
