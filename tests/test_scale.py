"""What the rendezvous asks of its store must not grow with the number of nodes: counted, not timed."""

from __future__ import annotations

from benchmarks.rendezvous_counts import count


def test_a_running_node_asks_no_more_of_the_store_among_many_than_among_few() -> None:
    few, *more = (count(nodes).running.operations / nodes for nodes in (8, 16, 32))
    assert 8 <= few <= 16  # twice a second: its row, the round, its row again and those it watches
    assert all(abs(many - few) <= 0.2 * few for many in more)
