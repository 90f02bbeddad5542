"""The per-node agent: starts the workers, watches them, and performs what the rendezvous decides."""

if __name__ != "elastirun.agent":
    raise ImportError(f"this folder is the package elastirun.agent; it was imported as {__name__!r} (is the repository's root on sys.path?)")
