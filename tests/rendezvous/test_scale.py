"""What the rendezvous asks of its store must not grow with the number of nodes: counted, not timed."""

from __future__ import annotations

from benchmarks.rendezvous_counts import count


def test_a_running_node_asks_no_more_of_the_store_among_many_than_among_few() -> None:
    few, *more = (count(nodes).running.operations for nodes in (8, 16, 32))
    assert 8 <= few <= 16  # twice a second: its row, the round, its row again and those it watches
    assert all(abs(many - few) <= 0.2 * few for many in more)


def test_no_node_but_those_first_in_line_reads_all_rows() -> None:
    few, many = (count(nodes).forming.size for nodes in (8, 32))
    assert many <= 2 * few  # the round record grows with the nodes; with all rows read by everyone it is four times as much


def test_a_running_node_does_not_read_the_members_again_and_again() -> None:
    few, many = (count(nodes).running.size for nodes in (8, 32))
    assert many <= 1.2 * few
