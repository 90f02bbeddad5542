"""Stores of bytes. All of them pass one conformance suite, ``tests/rendezvous/test_stores.py``."""
