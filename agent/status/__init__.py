"""The status of this node over HTTP, and of whole jobs for ``elastirun status``."""
