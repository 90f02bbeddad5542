"""Names in a directory of checkpoints, and which claim on it counts. Pure.

A round claims the directory before it saves. The name of a claim says which round made it, and is never used twice.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastirun.checkpoint.record import Commit, Damage

MAX_NAME = 200  # characters of a folder's name that counts as ours

_STEP = re.compile(r"step-([0-9]{8,15})(?:[.][0-9A-Za-z_.-]+)?")
_STORE = re.compile(r"[A-Za-z0-9_.]{1,64}")
_CLAIM = re.compile(r"([A-Za-z0-9_.]{1,64})-([0-9]{1,15})-([0-9a-f]{8,32})")


@dataclass(frozen=True)
class Published:
    """One published checkpoint: its name, and its record or what is wrong with that."""

    name: str
    commit: Commit | None
    damage: Damage | None = None
    set_aside: bool = False  # damaged, and never counted again


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def is_step_name(name: str) -> bool:
    """Return whether a folder of this name is a checkpoint: ``step-00000100``, or with a suffix where that name was taken."""
    return len(name) <= MAX_NAME and _STEP.fullmatch(name) is not None


def claim_name(fence: str, nonce: str) -> str:
    """Return the name of a claim by the round with the token ``fence`` ("store id:round"; empty: without an agent)."""
    store, _, round = fence.rpartition(":")
    if not round.isascii() or not round.isdigit() or len(round) > 15:
        store, round = fence, "0"
    if not _STORE.fullmatch(store):
        store = hashlib.sha256(store.encode(errors="replace")).hexdigest()[:16] if store else "alone"
    return f"{store}-{int(round)}-{nonce}"


def round_of(fence: str) -> int:
    """Return the round of a fence token; 0 without an agent."""
    round = fence.rpartition(":")[2]
    return int(round) if round.isdigit() else 0


def is_claim(name: str) -> bool:
    return _CLAIM.fullmatch(name) is not None


def is_newer(other: str, mine: str) -> bool:
    """Return whether the claim ``other`` belongs to a later round of the same job than ``mine``.

    Rounds of different stores cannot be compared: there, whoever claims last has the directory.
    """
    theirs, ours = _CLAIM.fullmatch(other), _CLAIM.fullmatch(mine)
    return bool(theirs and ours and theirs[1] == ours[1] and int(theirs[2]) > int(ours[2]))


def newest_first(found: Iterable[Published]) -> list[Published]:
    """Sort checkpoints by the sequence of their commits, the newest first; those without a record come last."""
    return sorted(found, key=lambda one: (one.commit.sequence if one.commit else -1, one.name), reverse=True)


def next_sequence(found: Iterable[Published]) -> int:
    """Return the sequence of the next commit: one above all that are known."""
    return 1 + max((one.commit.sequence for one in found if one.commit), default=0)


def outdated(found: Sequence[Published], keep: int) -> list[Published]:
    """Return the checkpoints to delete so that the newest ``keep`` remain, at least one. What has no record is not counted or deleted."""
    whole = [one for one in newest_first(found) if one.commit]
    return whole[max(keep, 1) :]
