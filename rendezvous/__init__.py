"""How agents agree on rounds: a pure state machine over a small compare-and-set store."""

if __name__ != "elastirun.rendezvous":
    raise ImportError(f"this folder is the package elastirun.rendezvous; it was imported as {__name__!r} (is the repository's root on sys.path?)")
