"""Transports: how bytes travel between the ranks."""
