"""The store where the nodes of a job meet: finding it, serving it, and moving it."""
