"""Judge why rounds ended before their work was done, by reads of the round record. Pure.

A failure is judged when the next round forms, see docs/decisions/0001: only then is it known whether the round had lost a node before.
"""

from __future__ import annotations

from elastirun.rendezvous.wire.records import Cause, RoundRecord

UNKNOWN = "unknown"  # the cause of an end that no read has shown


def cause_of(record: RoundRecord) -> Cause | None:
    """Return why the round of ``record`` ended, as far as the record knows; None: it has not ended early."""
    broken = record.broken
    return None if broken is None else Cause.LOST if broken.cause is Cause.FAILURE and broken.lost else broken.cause


def lost_after_all(old: RoundRecord, new: RoundRecord) -> bool:
    """Return whether the round of ``old``, in which a worker failed, has lost a node, as ``new``, the record of the next one, shows.

    The failure was not counted there, and a member is gone. The record that names it was perhaps not read.
    """
    uncounted = (old.failures, old.signature, old.repeats) == (new.failures, new.signature, new.repeats)
    gone = {m.id for m in old.members} - {m.id for m in new.members}
    return cause_of(old) is Cause.FAILURE and new.round == old.round + 1 and uncounted and bool(gone)


def ended_rounds(old: RoundRecord | None, new: RoundRecord) -> list[str]:
    """Return the cause of each round whose end was decided between two reads of the round record; "unknown" where no read showed it.

    ``new`` may be of an earlier round: the node that has taken over the store may not have read the last one.
    """
    if old is None or not old.round or new.round < old.round:
        return []
    told, cause = _judged(old), _judged(new)
    if new.round == old.round:
        return [cause.value] if cause and not told else []
    failed = [] if told or old.broken is None else [Cause.LOST.value if lost_after_all(old, new) else Cause.FAILURE.value]
    unseen = new.round - old.round - (old.broken is not None)
    return failed + [UNKNOWN] * unseen + ([cause.value] if cause else [])


def _judged(record: RoundRecord) -> Cause | None:
    """Return why the round of ``record`` ended; None: it has not, or the failure may turn out to come from the loss of a node."""
    cause = cause_of(record)
    return cause if cause is not Cause.FAILURE or record.closed else None
