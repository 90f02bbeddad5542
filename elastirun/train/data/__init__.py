"""Each sample exactly once, at any number of ranks; and the mode whose result depends on the samples alone."""
