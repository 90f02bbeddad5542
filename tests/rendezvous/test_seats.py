"""Properties of ``seats.assign`` over random jobs, whose nodes come and go, with other seeds in each run; small ones beside every order.

python -m tests.stress seats --jobs 10000
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from elastirun.mesh import LARGEST, Mesh, picture
from elastirun.rendezvous.peers.seats import Seats, assign
from elastirun.rendezvous.wire.records import Member, NodeRow

MESHES = ["dp=auto,tp=2", "dp=auto,tp=4", "dp=auto,pp=2,tp=1", "dp=auto,pp=2,tp=2", "dp=auto,pp=4,tp=2", "dp=auto,pp=3,tp=2"]
MESHES += ["dp=auto,pp=2,cp=2,tp=2", "pp=2,dp=auto,tp=2", "pp=4,dp=auto,tp=1", "pp=2,dp=auto,cp=2,tp=2", "dp=auto", "pp=2,dp=auto"]
JOBS = 150  # in a run of the tests: a second


def node(name: str, slots: int, hosts: bool = False) -> NodeRow:
    return NodeRow(name, name, "", 0, slots, hosts=hosts)


def places(mesh: Mesh, members: Sequence[Member]) -> list[tuple[str, tuple[int, ...]]]:
    """The node and the place in the mesh of each rank, as torch's ``init_device_mesh`` has them."""
    nodes = [m.id for m in members for _ in range(m.slots)]
    return list(zip(nodes, itertools.product(*map(range, mesh.shape(len(nodes)))), strict=True))


def parts(mesh: Mesh, members: Sequence[Member]) -> dict[str, list[int]]:
    """By node: which part of the model each of its cells holds."""
    found: dict[str, list[int]] = {}
    for rank, (name, place) in enumerate(places(mesh, members)):
        number = 0
        for index, size in zip(place, mesh.sizes, strict=True):
            number = number * size + index if size else number
        if rank % mesh.inner == 0:
            found.setdefault(name, []).append(number // mesh.inner)
    return found


def moved(mesh: Mesh, after: Sequence[Member], before: Sequence[Member]) -> int:
    """The number of cells whose node held another part of the model before, or none."""
    held = parts(mesh, before) if before else {}
    return sum(a != b for name, now in parts(mesh, after).items() for a, b in itertools.zip_longest(now, held.get(name, [])[: len(now)]))


def check_round(mesh: Mesh, nodes: Sequence[NodeRow], seats: Seats, limit: int) -> None:
    slots, ids, host = {n.id: n.slots for n in nodes}, [m.id for m in seats.members], next((n for n in nodes if n.hosts), None)
    assert len(set(ids)) == len(ids) <= limit and set(ids) <= set(slots)
    assert bool(seats.reason) != bool(ids)
    if not ids:
        return
    assert mesh.is_formed_by([m.slots for m in seats.members]) and all(0 < m.slots <= slots[m.id] for m in seats.members)
    groups: dict[tuple[int, ...], set[str]] = {}
    for name, at in places(mesh, seats.members):
        groups.setdefault(at[:-1] if mesh.inner > 1 else at, set()).add(name)
    assert all(len(on) == 1 for on in groups.values()), "a cell spans nodes"
    assert host is None or host.id in ids
    assert len(list(picture(mesh, [(m.name, m.slots) for m in seats.members]))) == seats.world // mesh.inner


def check_replicas(mesh: Mesh, nodes: Sequence[NodeRow], seats: Seats, limit: int) -> None:
    if len(nodes) <= limit and mesh.outer == 1 and "hosts the store" not in seats.reason:
        assert seats.world == sum(n.slots // mesh.inner for n in nodes) // mesh.depth * mesh.unit, "as many as there are cells for"


def check_whole_replicas_stay(mesh: Mesh, nodes: Sequence[NodeRow], before: Seats, after: Seats) -> int:
    """For nodes that are alike, all of which may take part. Return how many blocks have stayed."""
    slots, old, new = {n.id: n.slots for n in nodes}, {m.id: m for m in before.members}, {m.id: m for m in after.members}
    held, holds, stayed = parts(mesh, before.members) if old else {}, parts(mesh, after.members) if new else {}, 0
    if any(n.hosts and n.id not in old for n in nodes):  # it may take the place of another one
        return 0
    for number in {m.block for m in before.members}:
        ids = [m.id for m in before.members if m.block == number]
        if all(i in slots and slots[i] // mesh.inner == old[i].slots // mesh.inner for i in ids):
            if not all(i in new for i in ids):
                assert len(new) < len(slots) and any(n.hosts for n in nodes), "only to the store's host a whole block gives way"
                continue
            assert all(holds[i] == held[i] for i in ids) and len({new[i].block for i in ids}) == 1
            stayed += 1
    return stayed


def fewest_moved(mesh: Mesh, nodes: Sequence[NodeRow], before: Seats, world: int) -> int:
    """The smallest number of cells with another part that any order of these nodes, which are alike, has."""
    each = nodes[0].slots // mesh.inner * mesh.inner
    orders = itertools.permutations(nodes, world // each)
    allowed = (order for order in orders if not any(n.hosts for n in nodes) or any(n.hosts for n in order))
    return min(moved(mesh, [Member(n.id, n.name, "", 0, each) for n in order], before.members) for order in allowed)


def play(rng: random.Random, seen: Counter[str]) -> None:
    """Play one job: nodes come and go, and each world is checked."""
    mesh, made = Mesh.parse(rng.choice(MESHES)), itertools.count()
    alike, slots = mesh.outer > 1 or rng.random() < 0.6, rng.choice([1, 2, 3, 4, 8])

    def newcomer() -> NodeRow:
        return node(f"n{next(made)}", slots if alike else rng.choice([1, 2, 3, 4, 6, 8]))

    nodes = [newcomer() for _ in range(rng.randint(1, 9))]
    nodes[0] = replace(nodes[0], hosts=rng.random() < 0.5)
    before = Seats()
    for _ in range(rng.randint(2, 6)):
        limit = rng.choice([99, 99, rng.randint(1, 9)])
        after = assign(mesh, before.members, rng.sample(nodes, len(nodes)), limit)
        check_round(mesh, nodes, after, limit)
        check_replicas(mesh, nodes, after, limit)
        again = assign(mesh, after.members, nodes, limit)
        if after.members:
            assert [(m.id, m.slots) for m in again.members] == [(m.id, m.slots) for m in after.members], "nothing happened: nothing moves"
        if alike and len([n for n in nodes if n.slots >= mesh.inner]) <= limit:
            seen["whole blocks stayed"] += check_whole_replicas_stay(mesh, nodes, before, after)
        cells = slots // mesh.inner
        if (
            alike
            and limit == 99
            and after.members
            and before.members
            and len(nodes) <= 5
            and not (cells % mesh.depth and mesh.depth % cells)
        ):
            seen["worlds beside every order"] += 1
            assert moved(mesh, after.members, before.members) == fewest_moved(mesh, nodes, before, after.world)
        seen["worlds" if after.members else "no world"] += 1
        before = after
        gone = rng.sample(nodes, rng.randint(0, min(3, len(nodes))))
        nodes = [n for n in nodes if n not in gone or n.hosts] + [newcomer() for _ in range(rng.choice([0, 0, 0, 1, 2]))]
        if not nodes:
            return


def play_jobs(count: int, seed: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for number in range(count):
        try:
            play(random.Random(f"{seed} {number}"), seen)
        except AssertionError as error:
            raise AssertionError(f"python -m tests.stress seats --seed {seed}, job {number}: {error}") from error
    return seen


def test_random_jobs() -> None:
    seen = play_jobs(JOBS, time.time_ns())
    assert min(seen[what] for what in ("whole blocks stayed", "worlds", "no world", "worlds beside every order")) > 0


def names(seats: Seats) -> str:
    return " ".join(f"{m.id}:{m.slots}" for m in seats.members)


def test_a_spare_takes_the_place_of_the_node_that_was_lost() -> None:
    mesh = Mesh.parse("dp=auto,pp=2,tp=2")
    first = assign(mesh, (), [node(i, 2) for i in "abcde"], 9)
    assert names(first) == "a:2 b:2 c:2 d:2"
    assert names(assign(mesh, first.members, [node(i, 2) for i in "abde"], 9)) == "a:2 b:2 e:2 d:2"


def test_of_two_broken_replicas_one_is_mended_by_the_nodes_with_the_same_parts() -> None:
    mesh = Mesh.parse("dp=auto,pp=2,tp=2")
    first = assign(mesh, (), [node(i, 2) for i in "abcd"], 9)
    assert names(assign(mesh, first.members, [node(i, 2) for i in "ad"], 9)) == "a:2 d:2"
    assert names(assign(mesh, first.members, [node(i, 2) for i in "bc"], 9)) == "c:2 b:2", "in the order of the stages that they hold"


def test_the_host_of_the_store_has_a_seat() -> None:
    mesh = Mesh.parse("dp=auto,pp=2,tp=2")
    assert names(assign(mesh, (), [node("a", 2), node("b", 2), node("c", 2, hosts=True)], 9)) == "c:2 a:2"


def test_a_node_unlike_the_others_is_a_spare_where_a_dimension_is_outside_of_auto() -> None:
    mesh = Mesh.parse("pp=2,dp=auto,tp=1")
    first = assign(mesh, (), [node("a", 2), node("b", 2)], 9)
    assert names(assign(mesh, first.members, [node("a", 2), node("b", 2), *(node(i, 1) for i in "cde")], 9)) == "a:2 b:2"


def test_where_the_limit_takes_small_nodes_first_larger_ones_are_tried() -> None:
    mesh = Mesh.parse("dp=auto,pp=3,tp=2")
    assert names(assign(mesh, (), [node("a", 2, hosts=True), node("b", 2), node("c", 4)], 2)) == "c:4 a:2"


def test_what_a_stranger_has_written_as_the_last_round_breaks_nothing() -> None:
    mesh, rows = Mesh.parse("dp=auto,pp=2,tp=2"), [node(i, 2) for i in "abcd"]
    for slots, block, phase in ((1, 0, 0), (2, 7, -(2**53)), (4096, 2**53, 5)):
        strange = [Member(i, i, "", 0, slots, block=block, phase=phase) for i in "abc"]  # a sum that fits is no whole block
        assert mesh.is_formed_by([m.slots for m in assign(mesh, strange, rows, 9).members])
    mesh = Mesh.parse("dp=auto,pp=3,tp=1")  # here the sum fits, and no block does
    rows = [node("a", 2, hosts=True), node("b", 4), node("c", 4), node("d", 1), node("e", 1)]
    strange = [
        Member(i, i, "", 0, slots, block=block, phase=phase) for i, slots, block, phase in (("b", 4, 2, 0), ("c", 4, 2, 0), ("d", 1, 0, 1))
    ]
    assert mesh.is_formed_by([m.slots for m in assign(mesh, strange, rows, 4).members])


@pytest.mark.parametrize(
    ("text", "slots", "reason"),
    [
        ("dp=auto,tp=4", [2, 2], "one replica of dp=auto,tp=4 needs 4 workers on nodes of at least 4, and 0 are here"),
        ("dp=auto,pp=2,tp=4", [4, 3], "one replica of dp=auto,pp=2,tp=4 needs 8 workers on nodes of at least 4, and 4 are here"),
        ("pp=2,dp=auto,tp=2", [4, 2], "pp=2,dp=auto,tp=2 needs 2 or more nodes with as many workers as the store's host"),
        ("pp=2,dp=auto,tp=2", [4], "none holds a whole replica"),
        (
            "pp=2,dp=auto,cp=2,tp=2",
            [6, 6],
            "needs 2 or more nodes with as many workers as the store's host, which divide it",
        ),
    ],
)
def test_the_reason_why_there_is_no_round(text: str, slots: list[int], reason: str) -> None:
    seats = assign(Mesh.parse(text), (), [node(f"n{at}", count) for at, count in enumerate(slots)], 9)
    assert seats.members == () and reason in seats.reason


def test_a_host_of_the_store_that_has_no_place_is_said() -> None:
    rows = [node("a", 4), node("b", 4), node("small", 2, hosts=True)]
    assert (
        assign(Mesh.parse("dp=auto,tp=4"), (), rows, 9).reason
        == "small  hosts the store, and dp=auto,tp=4 has no place for it with --nproc-per-node=2"
    )


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("dp=2,tp=2", "exactly one dimension has the size auto"),
        ("dp=auto,tp=auto", "exactly one dimension has the size auto"),
        ("dp=auto,tp=02", "is no dimension"),
        ("dp=auto," + "t" * 33 + "=2", "is no dimension"),
        ("dp=auto,dp=2", "two dimensions have one name"),
        ("dp=auto,tp=0", "'tp=0' is no dimension of a mesh; write it as in dp=auto,pp=2,tp=4"),
        ("dp=auto,tp", "'tp' is no dimension"),
        ("dp=auto,", "'' is no dimension"),
        ("dp=auto,2=2", "'2=2' is no dimension"),
        ("dp=auto,tp=9999999999", "is no dimension"),
        ("dp=auto,a=60000,b=60000", f"whose product is at most {LARGEST}"),
        (",".join(["dp=auto", *(f"d{n}=1" for n in range(8))]), "give at most 8"),
    ],
)
def test_a_text_that_is_no_mesh(text: str, error: str) -> None:
    with pytest.raises(ValueError, match="^[^\n]*$") as raised:
        Mesh.parse(text)
    assert error in str(raised.value)


def test_a_mesh_as_people_and_workers_see_it() -> None:
    mesh = Mesh.parse(" dp=auto, pp=2,tp=4")
    assert (str(mesh), mesh.unit, mesh.described(16)) == ("dp=auto,pp=2,tp=4", 8, "dp=2,pp=2,tp=4")
    lines = list(picture(mesh, [("a", 8), ("b", 8)]))
    assert lines[0] == "dp 0, pp 0: ranks 0-3 on a" and lines[-1] == "dp 1, pp 1: ranks 12-15 on b"
    assert list(picture(Mesh.parse("dp=auto"), [("a", 2)])) == ["dp 0: rank 0 on a", "dp 1: rank 1 on a"]
    assert list(picture(Mesh.parse("dp=auto,tp=1"), [("a", 2)])) == ["dp 0: rank 0 on a", "dp 1: rank 1 on a"]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--jobs", type=int, default=10_000)
    arguments.add_argument("--seed", type=int, default=time.time_ns())
    options = arguments.parse_args()
    print(f"{options.jobs} jobs: {dict(play_jobs(options.jobs, options.seed))}")


if __name__ == "__main__":
    main()
