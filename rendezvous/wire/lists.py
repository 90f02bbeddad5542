"""Lists of members as bytes; large ones compressed, or as the difference from another list, which most nodes know already. Pure.

A list grows with the job, and each of its nodes reads it. From one round to the next little of it changes.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from typing import Any

from elastirun.errors import BadRecord
from elastirun.rendezvous.wire.codec import MAX_BYTES, Codec, decompressed
from elastirun.rendezvous.wire.records import MemberList

KEPT_LISTS = 4  # in a store that takes over, the votes of a thousand nodes may name two or three rounds
LARGE = 16 << 10  # bytes, some 90 members; a smaller list is text, and nobody writes or reads what differs: a round trip costs more
WORTH = 0.25  # of a list: what differs is not written if it is longer, since the list is read compressed
BETWEEN_ENTRIES = re.compile(rb'(?<=[}"]),(?=[{"])')  # of the canonical JSON: members, and the ids in quorums


class MemberLists:
    """The lists that a node has used last. ``codec``: of any store. ``key``: by which all of them are signed.

    The name of a list is the SHA-256 of its bytes before they are compressed: versions of zlib may compress differently.
    """

    def __init__(self, codec: Codec, key: str) -> None:
        self._codec = codec
        self._key = key
        self._known: dict[str, tuple[MemberList, bytes]] = {}  # by digest, the newest at the end

    def copy(self) -> MemberLists:
        """Return the same lists, for another connection."""
        other = type(self)(self._codec, self._key)
        other._known = dict(self._known)
        return other

    def any_large(self, *digests: str) -> bool:
        """Return whether this node knows any list that is large; one of ``digests`` if there are some."""
        return any(len(self._known[digest][1]) > LARGE for digest in digests or self._known if digest in self._known)

    def get(self, digest: str) -> MemberList | None:
        """Return the list if this node knows it."""
        return self._known[digest][0] if digest in self._known else None

    def digest(self, members: MemberList) -> str:
        """Return the digest of ``members``, which this node knows from now on."""
        for digest, (known, _) in self._known.items():
            if known == members:
                self._known[digest] = self._known.pop(digest)
                return digest
        data = self._codec.encode(self._key, members)
        digest = hashlib.sha256(data).hexdigest()
        self._remember(digest, members, data)
        return digest

    def whole(self, digest: str) -> bytes:
        """Return the bytes to be stored for a list that this node knows: compressed if it is large."""
        data = self._known[digest][1]
        return zlib.compress(data) if len(data) > LARGE else data

    def take(self, digest: str, stored: bytes) -> MemberList:
        """Return the list that was stored whole. Errors: ``BadRecord``."""
        return self._decode(digest, stored if stored.startswith(b"{") else decompressed(stored))

    def changes(self, digest: str) -> bytes:
        """Return the list as what differs from others that this node knows, and other nodes may; empty: there is none to differ from."""
        data = self._known[digest][1]
        if len(data) <= LARGE:
            return b""
        others = {other: difference(base, data) for other, (_, base) in self._known.items() if other != digest}
        spelled = {other: edits for other, edits in others.items() if len(_spell(edits)) < WORTH * len(data)}
        return zlib.compress(_spell(spelled)) if spelled else b""

    def take_changes(self, digest: str, stored: bytes) -> MemberList | None:
        """Return the list by what differs from one that this node knows; None: it knows none of them. Errors: ``BadRecord``."""
        try:
            changes = dict(json.loads(decompressed(stored)))
        except (TypeError, ValueError, RecursionError):
            raise BadRecord(f"{self._key}: what differs from another list is unreadable") from None
        base = next((other for other in self._known if other in changes), None)
        return None if base is None else self._decode(digest, patched(self._known[base][1], changes[base]))

    def _decode(self, digest: str, data: bytes) -> MemberList:
        if hashlib.sha256(data).hexdigest() != digest:
            raise BadRecord(f"{self._key}: the members are missing there, or others")
        members = self._codec.decode(self._key, data, MemberList)
        self._remember(digest, members, data)
        return members

    def _remember(self, digest: str, members: MemberList, data: bytes) -> None:
        self._known[digest] = members, data
        for old in list(self._known)[:-KEPT_LISTS]:
            del self._known[old]


def difference(old: bytes, new: bytes) -> list[Any]:
    """Return ``new`` as a list of ``[first, count]`` entries of ``old``, and of texts. See ``patched``."""
    before, after = BETWEEN_ENTRIES.split(old), BETWEEN_ENTRIES.split(new)
    where = {entry: k for k, entry in reversed(list(enumerate(before)))}  # the first place of each
    edits: list[Any] = []
    follows = -1  # the entry of ``old`` that would go on with the run
    for entry in after:
        at = follows if 0 <= follows < len(before) and before[follows] == entry else where.get(entry, -1)
        if at < 0:
            edits.append(entry.decode("ascii"))
        elif at == follows:
            edits[-1][1] += 1
        else:
            edits.append([at, 1])
        follows = at + 1 if at >= 0 else -1
    return edits


def patched(old: bytes, edits: Any) -> bytes:
    """Return what ``edits`` make of ``old``, see ``difference``. Errors: ``BadRecord``."""
    before, after, size = BETWEEN_ENTRIES.split(old), list[bytes](), 0
    try:
        for edit in edits:
            if isinstance(edit, str):
                run = [edit.encode("ascii")]
            else:
                first, count = edit
                run = before[first : first + count] if 0 <= first and 0 < count else []
            size += sum(map(len, run)) + len(run)
            if not run or size > MAX_BYTES:
                raise ValueError(edit)
            after += run
    except (TypeError, ValueError):
        raise BadRecord("the difference from another list of members makes no sense") from None
    return b",".join(after)


def _spell(plain: Any) -> bytes:
    return json.dumps(plain, separators=(",", ":")).encode()
