"""The stores: bytes only. One conformance suite (``tests/test_stores.py``) holds for all of them."""
