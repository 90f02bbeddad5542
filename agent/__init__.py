"""The per-node agent: starts the workers, watches them, and performs what the rendezvous decides."""

if __name__ != "elastirun.agent":
    raise ImportError(f"this folder is the package elastirun.agent, not {__name__!r}: take the repository's root off sys.path")
