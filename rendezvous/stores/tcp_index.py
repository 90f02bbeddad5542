"""The index of keys in a TCPStore, whose own list of keys is slow: under each folder one key holds the names of the others. Pure."""

from __future__ import annotations

from elastirun.errors import StoreError

LONGEST_KEY = 4096  # ASCII characters; TCPStore closes the connection of a client that names a longer key
MOST_KEYS = 32_768  # under one prefix; nodes write far fewer, and reading more would take too long
LONGEST_INDEX = 64 << 20  # bytes; the same limit for an index
UNLISTED = "/members/"  # keys in such a folder are read by name, and each round has new ones: an index of them would grow for ever


def index_of(key: str) -> str:
    """Return the key of the index that lists ``key``."""
    return _folder(key) + "~index"


def is_listed(key: str) -> bool:
    """Return whether ``key`` belongs into an index."""
    return not _folder(key).endswith(UNLISTED)


def line(key: str) -> str:
    """Return the text that is appended to the index for ``key``."""
    return f"\n{key}\n"  # line breaks on both sides: the line before may be incomplete


def keys_in(index: bytes, prefix: str) -> set[str]:
    """Return the keys under ``prefix`` that ``index`` names. Errors: ``StoreError`` when these are too many."""
    lines = index.decode("ascii", "replace").splitlines() if len(index) <= LONGEST_INDEX else []
    own = index_of(prefix)
    keys = {key for key in lines if key.startswith(prefix) and key != own and len(key) < LONGEST_KEY and key.isascii()}
    if len(index) > LONGEST_INDEX or len(keys) > MOST_KEYS:
        raise StoreError(f"{len(index)} bytes of keys below {prefix}: somebody floods the store")
    return keys


def _folder(key: str) -> str:
    return key[: key.rfind("/") + 1]
