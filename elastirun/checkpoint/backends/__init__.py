"""Places that keep checkpoints: a folder, an object store. All of them pass one conformance suite, `tests/checkpoint/test_backends.py`."""
