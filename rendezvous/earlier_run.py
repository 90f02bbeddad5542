"""An earlier run of the same job, found in a store that outlives its jobs: its record, and when the next run can begin."""

from __future__ import annotations

from collections.abc import Mapping

from elastirun.rendezvous.formation import Forming, may_still_work
from elastirun.rendezvous.peers.liveness import Since
from elastirun.rendezvous.peers.view import View
from elastirun.rendezvous.rules import Rules, disagreement
from elastirun.rendezvous.wire.records import NodeRow, RoundRecord, Status


def may_be_earlier(rules: Rules, found: RoundRecord, rows: Mapping[str, NodeRow], all_rows: bool) -> bool:
    """Return whether the record that a newcomer ``found`` is of a run that has ended, or of one no node of which was seen yet.

    ``all_rows``: the ``rows`` are those of all nodes.
    """
    if found.closed is not None:
        return True
    if not rules.lasting or (found.round == 0 and not disagreement(rules, found)):
        return False
    return not all_rows or all(row.status is Status.LEFT for row in rows.values())


def wait_for_end(rules: Rules, view: View, all_rows: bool, same: Since) -> Forming | None:
    """Return the decision to wait until the run of ``view`` has ended; None: it has. Only a living node shows that a run goes on.

    ``same``: since when its record, seen when none of its nodes was there, is the same.
    """
    record, now = view.record, view.now
    if not all_rows or not view.others_have_left(rules.proof):
        return Forming(None, "an earlier run of this job is over; waiting for its nodes to leave")
    all_have_left = bool(record.members) and all(m.id in view.rows for m in record.members)
    if record.closed is not None or (record.broken is not None and record.broken.over) or all_have_left:
        return None
    left = max(may_still_work(rules, view), same.see((record.store_id, record.version), now) + rules.expire - now)
    reason = f"nothing is heard of an earlier run of this job; it can go on where the store is out of reach for another {left:.0f} s"
    return Forming(None, reason, check_again=now + left) if left > 0 else None
