"""The stores: bytes only. One conformance suite (``tests/rendezvous/test_stores.py``) holds for all of them."""
