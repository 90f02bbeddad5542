"""Records, their bytes, and the exchanges with the store that carry them."""
