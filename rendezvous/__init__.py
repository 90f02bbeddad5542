"""The rendezvous, by which agents agree on rounds: a pure state machine over a small compare-and-set store."""

if __name__ != "elastirun.rendezvous":
    raise ImportError(f"this folder is the package elastirun.rendezvous, not {__name__!r}: take the repository's root off sys.path")
