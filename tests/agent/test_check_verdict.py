"""The verdict of ``elastirun check``: which node or pair is named, and which nodes should not take part. Pure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastirun.agent.check import between, plan, table
from elastirun.agent.check.between import Way, blame
from elastirun.agent.check.facts import gpus_in, wrong_interfaces
from elastirun.agent.check.records import Arrival, Collective, Facts, Finding, Gpu, Link, Measured, Result, SharedFolder, Unseen, WrongName
from elastirun.agent.check.verdict import excluded, judge
from elastirun.rendezvous.wire.codec import Codec

SOUND = Facts("0.1.0", "3.12.1", "2.6.0", "12.4", "2.21.5", 8, 10.0, (), "", 1 << 34, 65536, -1, "", (), ())
GPU = Gpu("Some GPU", 80_000, 79_000, 0)


def node(number: int, facts: Facts = SOUND, rank: int | None = None) -> Arrival:
    name = f"n{number}"
    return Arrival(name, name, rank, name, f"10.0.0.{number}", (f"10.0.0.{number}",), (4000,), 0, 1, number == 0, facts)


def measured(arrivals: list[Arrival], **links: dict[str, Link]) -> dict[str, Measured]:
    """Return sound measurements between all nodes. ``links``: others, by start and end."""
    found = {}
    for one in arrivals:
        sound = {peer.id: Link(peer.id, 4000, "", 0.1, 1000.0, 0.0, 0.0, 400, 0) for peer in arrivals if peer.id != one.id}
        found[one.id] = Measured(one.id, tuple({**sound, **links.get(one.id, {})}.values()), (), ())
    return found


def judged(arrivals: list[Arrival], found: dict[str, Measured] | None = None, least: int = 0) -> Result:
    ids = [one.id for one in arrivals]
    known = measured(arrivals) if found is None else found
    return judge(arrivals, known, plan.peers(ids, "seed"), least, ())


def named(result: Result) -> list[tuple[str, tuple[str, ...]]]:
    return [(one.kind, one.nodes) for one in result.findings]


def test_a_sound_cluster_has_no_finding_and_all_take_part() -> None:
    for count in (1, 2, 3, 40):
        result = judged([node(i) for i in range(count)], least=count)
        assert result.findings == () and {one.verdict for one in result.nodes} == {"ok"}


@pytest.mark.parametrize(
    ("change", "kind", "verdict"),
    [
        ({"torch": ""}, "torch", "bad"),
        ({"torch": "2.7.0"}, "torch", "bad"),
        ({"elastirun": "0.2.0"}, "elastirun", "bad"),
        ({"python": "3.11.9"}, "python", "warning"),
        ({"cuda": "11.8"}, "cuda", "warning"),
        ({"gpu_error": "no answer within 8 s"}, "gpu", "bad"),
        ({"shm": 1 << 20}, "shm", "bad"),
        ({"descriptors": 255}, "descriptors", "bad"),
        ({"processes": 10}, "processes", "bad"),
        ({"log_error": "read-only file system"}, "log-dir", "bad"),
        ({"interfaces": ("GLOO_SOCKET_IFNAME=eth7",)}, "interface", "bad"),
        ({"loop": 26.0}, "slow", "warning"),
        ({"folders": (SharedFolder("/data", "permission denied"),)}, "folder", "bad"),
    ],
)
def test_one_node_differs(change: dict[str, object], kind: str, verdict: str) -> None:
    result = judged([node(0), node(1, replace(SOUND, **change)), node(2)])  # type: ignore[arg-type]
    assert named(result) == [(kind, ("n1",))] and [one.verdict for one in result.nodes] == ["ok", verdict, "ok"]


@pytest.mark.parametrize(
    "change", [{"python": "3.12.9"}, {"descriptors": -1}, {"loop": 24.0}, {"cpus": 2}, {"nccl": "2.20.0"}, {"processes": 64}]
)
def test_one_node_differs_in_what_does_not_matter(change: dict[str, object]) -> None:
    assert judged([node(0), node(1, replace(SOUND, **change)), node(2)]).findings == ()  # type: ignore[arg-type]


def test_gpus_that_are_missing_full_or_broken_and_their_nccl() -> None:
    two = replace(SOUND, gpus=(GPU, GPU))
    broken = replace(two, gpus=(GPU, replace(GPU, uncorrected=3)))
    full = replace(two, gpus=(GPU, replace(GPU, free=1000)))
    cases = {SOUND: "gpu", replace(two, gpus=(GPU,)): "gpu", broken: "gpu", full: "gpu-memory", replace(two, nccl="2.20.0"): "nccl"}
    for facts, kind in cases.items():
        assert named(judged([node(0, two), node(1, facts), node(2, two)])) == [(kind, ("n1",))]


def test_of_two_nodes_the_one_without_a_gpu_is_named() -> None:
    for arrivals in ([node(0), node(1, replace(SOUND, gpus=(GPU,)))], [node(0, replace(SOUND, gpus=(GPU,))), node(1)]):
        (finding,) = judged(arrivals).findings
        assert finding.nodes == tuple(one.name for one in arrivals if not one.facts.gpus)


def test_two_nodes_with_two_versions_are_a_pair_of_which_the_host_stays() -> None:
    result = judged([node(0), node(1, replace(SOUND, torch="2.7.0"))])
    assert named(result) == [("torch", ("n0", "n1"))] and [one.verdict for one in result.nodes] == ["warning", "bad"]


def closed(*ways: tuple[int, int]) -> dict[str, dict[str, Link]]:
    found: dict[str, dict[str, Link]] = {}
    for start, end in ways:
        found.setdefault(f"n{start}", {})[f"n{end}"] = Link(f"n{end}", 4000, "no answer within 3.5 s")
    return found


@pytest.mark.parametrize(
    ("count", "ways", "expected", "text"),
    [
        (5, [(1, 3), (3, 1)], [("n1", "n3")], "n1 and n3 do not reach each other: port 4000: no answer"),
        (5, [(1, 3)], [("n1", "n3")], "n1 does not reach n3 at 10.0.0.3, but n3 reaches n1"),
        (4, [(0, 2), (1, 2), (3, 2)], [("n2",)], "no other node reaches n2 at 10.0.0.2"),
        (4, [(2, 0), (2, 1), (2, 3)], [("n2",)], "n2 reaches none of n0, n1, n3"),
        (3, [(0, 1), (2, 1), (0, 2), (1, 2)], [("n1",), ("n2",)], "no other node reaches n1"),
        (4, [(0, 1), (2, 1), (3, 1), (2, 0), (2, 3)], [("n1",), ("n2",)], "no other node reaches n1"),
        (2, [(0, 1)], [("n0", "n1")], "n0 does not reach n1"),
        (3, [(1, 2), (2, 1)], [("n1", "n2")], "do not reach each other"),
    ],
)
def test_ways_that_are_closed(count: int, ways: list[tuple[int, int]], expected: list[tuple[str, ...]], text: str) -> None:
    arrivals = [node(i) for i in range(count)]
    result = judged(arrivals, measured(arrivals, **closed(*ways)))
    assert named(result) == [("unreached", nodes) for nodes in expected] and text in result.findings[0].text


def test_of_several_ports_those_that_are_closed_are_named() -> None:
    one, other = node(0), replace(node(1), ports=(4000, 4001, 4002))
    found = measured([one, other])
    links = (*found["n0"].links, Link("n1", 4001, "connection refused"), Link("n1", 4002, "connection refused"))
    (finding,) = judged([one, other], {**found, "n0": replace(found["n0"], links=links)}).findings
    assert "port 4001, 4002: connection refused" in finding.text


def test_of_a_node_in_many_pairs_that_node_sits_out_alone() -> None:
    pairs = [Finding("unreached", nodes, "", "") for nodes in (("n0", "n3"), ("n1", "n3"), ("n2", "n4"))]
    names = [f"n{i}" for i in range(5)]
    assert excluded(names, pairs) == {"n3", "n4"}
    assert excluded(names, [*pairs, Finding("gpu", ("n2",), "", "")]) == {"n2", "n3"}
    assert excluded(names, [replace(pairs[0], bad=False)]) == set()


def test_a_loss_of_packets_is_of_a_node_if_most_of_its_ways_have_it() -> None:
    arrivals = [node(i) for i in range(4)]

    def lossy(*ways: tuple[int, int], lost: int = 40) -> Result:
        links: dict[str, dict[str, Link]] = {}
        for a, b in ways:
            links.setdefault(f"n{a}", {})[f"n{b}"] = Link(f"n{b}", 4000, "", 0.1, 1.0, 0.0, 0.0, 400, lost)
        return judged(arrivals, measured(arrivals, **links))

    assert named(lossy((0, 2), (2, 0), (1, 2), (2, 3))) == [("loss", ("n2",))], "that the ways are slow has the same reason"
    assert named(lossy((0, 2))) == [("loss", ("n0", "n2"))]
    assert [kind for kind, _ in named(lossy((0, 2), lost=2))] == ["rate"], "so few are chance"
    few = [("n0", Link("n1", 1, "", sent=20, lost=2))]
    assert [*between.lossy({one.id: one for one in arrivals}, few, [Way("n0", "n1")])] == []


def test_clocks() -> None:
    def ahead(count: int, seconds: dict[int, float]) -> Result:
        arrivals = [node(i) for i in range(count)]
        links = {
            f"n{a}": {
                f"n{b}": Link(f"n{b}", 4000, "", 0.1, 1000.0, seconds.get(b, 0.0) - seconds.get(a, 0.0)) for b in range(count) if a != b
            }
            for a in range(count)
        }
        return judged(arrivals, measured(arrivals, **links))

    assert named(ahead(3, {0: 3600.0})) == [("clock", ("n0",))]
    assert ahead(3, {0: 4.0}).findings == ()
    (finding,) = ahead(2, {1: -60.0}).findings
    assert finding.nodes == ("n0", "n1") and "the clock of n1 is 60 s behind of n0" in finding.text
    assert [one.offset for one in ahead(3, {2: 7.5}).nodes] == [0.0, 0.0, 7.5]


def test_names_and_folders() -> None:
    arrivals = [node(i, replace(SOUND, folders=(SharedFolder("/data", ""),))) for i in range(3)]
    found = measured(arrivals)
    wrong = {**found, "n2": replace(found["n2"], names=(WrongName("n0", ("10.9.9.9",)),))}
    result = judged(arrivals, wrong)
    assert (
        named(result) == [("name", ("n2", "n0"))] and "on n2 the name n0 leads to 10.9.9.9, and n0 has 10.0.0.0" in result.findings[0].text
    )
    unseen = {id: replace(one, unseen=(Unseen("/data", ("n0", "n1") if id == "n2" else ("n2",)),)) for id, one in found.items()}
    assert named(judged(arrivals, unseen)) == [("folder", ("n2",))]


def test_all_reduces_that_fail_are_named_unless_their_way_is_closed() -> None:
    arrivals = [node(i) for i in range(4)]
    sound = measured(arrivals)
    turns = {one.id: [peer for peer in plan.turns([a.id for a in arrivals], one.id) if peer] for one in arrivals}

    def failing(*pairs: tuple[str, str], inside: str = "") -> dict[str, Measured]:
        def one(id: str, peer: str) -> Collective:
            return Collective(peer, "no answer within 8 s" if {(id, peer), (peer, id)} & {*pairs} else "", 1.0, 3.0)

        return {
            id: replace(
                found, collectives=(Collective("", "crashed" if id == inside else "", 1.0, 3.0), *(one(id, peer) for peer in turns[id]))
            )
            for id, found in sound.items()
        }

    assert judged(arrivals, failing()).findings == ()
    assert named(judged(arrivals, failing(("n1", "n2")))) == [("collective", ("n1", "n2"))]
    assert named(judged(arrivals, failing(("n1", "n2"), ("n2", "n3")))) == [("collective", ("n2",))]
    assert named(judged(arrivals, failing(("n1", "n2"), inside="n1"))) == [("collective", ("n1",))], "so it fails with others, too"
    shut = measured(arrivals, **closed((1, 2)))
    both = {id: replace(found, links=shut[id].links) for id, found in failing(("n1", "n2")).items()}
    assert [kind for kind, _ in named(judged(arrivals, both))] == ["unreached"]


def test_nodes_that_did_not_come_or_said_no_more() -> None:
    arrivals = [node(0, rank=0), node(1, rank=2)]
    result = judged(arrivals, least=4)
    assert named(result) == [("missing", ())] and "2 of 4 nodes have not come (node rank 1, 3); here are n0, n1" in result.findings[0].text
    found = measured(arrivals)
    del found["n1"]
    assert named(judged(arrivals, found)) == [("silent", ("n1",))]
    lost = measured(arrivals, **closed((0, 1)))
    failed = replace(lost["n0"], collectives=(Collective("", "", 1.0, 3.0), Collective("n1", "no answer within 8 s")))
    assert named(judged(arrivals, {"n0": failed})) == [("silent", ("n1",))], "its ports and its all-reduces are not the fault"


def test_measurements_of_nodes_that_nobody_knows_do_not_count() -> None:
    arrivals = [node(0), node(1)]
    found = measured(arrivals) | {"n7": Measured("n7", (), (), ())}
    assert judged(arrivals, found).findings == ()
    assert named(judged(arrivals, {**found, "n1": Measured("n1", (Link("n9", 1, ""),), (), ())})) == [("silent", ("n1",))]


def test_each_node_measures_few_ways_and_is_measured_as_often() -> None:
    ids = [f"n{i:02}" for i in range(64)]
    out = plan.peers(ids, "seed")
    assert {len(peers) for peers in out.values()} <= {1, 2} and all(id not in peers for id, peers in out.items())
    assert {sum(id in peers for peers in out.values()) for id in ids} <= {1, 2}
    assert out != plan.peers(ids, "another")
    assert plan.peers(ids[:16], "seed")[ids[0]] == tuple(ids[1:16])


@pytest.mark.parametrize("count", range(1, 9))
def test_in_each_turn_partners_have_each_other(count: int) -> None:
    ids = [f"n{i}" for i in range(count)]
    turns = [plan.turns(ids, id) for id in ids]
    pairs = set()
    for i, own in enumerate(turns):
        for turn, other in enumerate(own):
            assert other is None or turns[ids.index(other)][turn] == ids[i]
            pairs |= {frozenset((ids[i], other))} if other else set()
    assert pairs == {frozenset((ids[i], ids[(i + 1) % count])) for i in range(count) if count > 1}


def test_the_node_with_most_faults_comes_first_and_explains_those_of_others() -> None:
    tried = [Way(a, b) for a in "abc" for b in "abc" if a != b]
    faulty = [Way("a", "b"), Way("c", "b"), Way("a", "c")]
    assert [(one.side, one.node) for one in blame(faulty, tried, ("end", "start"), 1.0)] == [("end", "b"), ("pair", "")]


def test_the_answer_of_the_driver() -> None:
    answer = "NVIDIA A, 80 GB, 81559, 80000, [N/A]\nNVIDIA B, 81559, 100, 7\nFailed to initialize NVML\n"
    assert gpus_in(answer) == (Gpu("NVIDIA A, 80 GB", 81559, 80000, 0), Gpu("NVIDIA B", 81559, 100, 7))


def test_variables_that_name_interfaces() -> None:
    def wrong(value: str, several: bool = True) -> bool:
        return wrong_interfaces({"NCCL_SOCKET_IFNAME": value}, several) != ()

    assert wrong("eth77") and wrong("lo") and wrong("=l", several=False)
    assert not wrong("lo", several=False) and not wrong("^docker") and not wrong("") and not wrong("l", several=False)


def test_records_of_a_check_travel() -> None:
    codec = Codec(b"token")
    for record in (node(0, replace(SOUND, gpus=(GPU,))), measured([node(0), node(1)])["n0"], judged([node(0)])):
        assert codec.decode("key", codec.encode("key", record), type(record)) == record


def test_a_table_shows_each_node_and_each_finding_with_what_to_do() -> None:
    result = judged([node(0), node(1, replace(SOUND, shm=0)), node(2)])
    text = table.text_of(result, 1.25)
    lines = text.splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [["n0", "ok"], ["n1", "bad"], ["n2", "ok"]]
    assert lines[4].startswith("n1: /dev/shm has 0 MiB left; delete what is left in /dev/shm")
    assert lines[-1] == "3 nodes checked in 1.2 s: 1 finding; n1 should not take part"
    many = replace(result, findings=result.findings * 50)
    assert table.text_of(many, 1.0).count("/dev/shm has") == table.MOST_SHOWN and "and 10 more findings" in table.text_of(many, 1.0)


def test_offsets_reach_nodes_by_the_ways_of_others() -> None:
    arrivals = [node(i) for i in range(3)]
    links = [("n1", Link("n2", 1, "", offset=2.0)), ("n1", Link("n0", 1, "", offset=-1.0))]
    assert between.clock_offsets(arrivals, links) == {"n0": 0.0, "n1": 1.0, "n2": 3.0}


def test_two_nodes_with_one_name_are_told_apart() -> None:
    arrivals = [node(0), replace(node(1, replace(SOUND, shm=0)), name="n0")]
    result = judged(arrivals)
    assert [(one.name, one.verdict) for one in result.nodes] == [("n0 (10.0.0.0)", "ok"), ("n0 (10.0.0.1)", "bad")]


def test_records_with_any_numbers_are_judged() -> None:
    strange = replace(SOUND, loop=0.0, cpus=-5, gpus=(Gpu("", 0, 0, 0),))
    links = {id: {peer: Link(peer, 1, "", 0.0, 0.0, 1e15, -1.0, 0, 9)} for id, peer in (("n0", "n1"), ("n1", "n0"))}
    arrivals = [node(0, strange), node(1)]
    assert len(judged(arrivals, measured(arrivals, **links)).nodes) == 2
