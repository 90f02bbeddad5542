"""The all-reduces of ``elastirun check``: of this node's workers, and with a partner that is there, or is not."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from elastirun.agent.check.collectives import TorchProbe
from elastirun.agent.check.records import Arrival, Collective
from tests.agent.test_check_verdict import node
from tests.support.cluster import free_port

pytest.importorskip("torch")


def here(number: int, meet: int) -> Arrival:
    return replace(node(number), address="127.0.0.1", meet=meet)


@pytest.fixture
def probe() -> Iterator[TorchProbe]:
    with closing(TorchProbe(os.environ, 2, 0)) as made:
        yield made


def test_workers_of_a_node_reduce_and_so_do_two_nodes(probe: TorchProbe) -> None:
    own = probe.inside()
    assert own.error == "" and own.took > 0 and own.matmul > 0
    port, found = free_port(), dict[int, Collective]()
    nodes = [here(0, port), here(1, port)]
    with closing(TorchProbe(os.environ, 1, 0)) as other:
        alone = other.inside()
        assert alone.error == "" and alone.took == 0 and alone.matmul > 0
        for made in (probe, other):
            made._turn_limit = 60.0
        thread = threading.Thread(target=lambda: found.update({1: other.across(nodes[1], nodes[0])}))
        thread.start()
        found[0] = probe.across(nodes[0], nodes[1])
        thread.join()
    assert [(found[i].peer, found[i].error) for i in (0, 1)] == [("n1", ""), ("n0", "")]


def test_a_partner_that_does_not_come_is_given_up_and_the_next_all_reduce_goes_on(probe: TorchProbe) -> None:
    assert probe.inside().error == ""
    probe._turn_limit = 0.5
    for me, other in ((here(0, free_port()), here(1, 1)), (here(1, 1), here(0, free_port()))):  # who serves the store, and who connects
        lost = probe.across(me, other)
        assert lost.peer == other.id and lost.error
    probe._turn_limit = 60.0
    assert probe.inside().error == ""


def test_a_process_that_has_ended_is_an_error_and_nothing_more(probe: TorchProbe) -> None:
    probe.close()
    assert "has ended" in probe.inside().error
