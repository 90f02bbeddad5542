"""Which part of a state stands in which file: every byte once, balanced, complete on every node, in files that torch can read."""

from __future__ import annotations

import io
import json
import random
from typing import Any

import pytest
import torch
from torch import nn

from elastirun.checkpoint.tensors import Box, common, overlapping, volume, within
from elastirun.train import TrainError
from elastirun.train.state import layout
from elastirun.train.state.layout import FILE, PAGE, Piece, Plan, decode, encode, image_files, pieces, plan, signature
from elastirun.train.state.torch_zip import ALIGNMENT, shell
from elastirun.train.state.tree import Flat, flatten
from elastirun.train.state.values import DTYPES


def whole(name: str, *shape: int, dtype: str = "float32", same_as: str = "") -> Piece:
    return Piece(name, dtype, shape, (0,) * len(shape), shape, same_as)


def rows(name: str, first: int, count: int, *shape: int) -> Piece:
    return Piece(name, "float32", shape, (first, *(0 for _ in shape[1:])), (count, *shape[1:]))


def random_world(rng: random.Random) -> tuple[list[list[Piece]], list[int]]:
    """Return the pieces of some ranks on some nodes: replicated tensors, shards of all ranks or of some, tensors of one rank."""
    nodes = sorted(rng.randrange(rng.randint(1, 4)) for _ in range(rng.randint(1, 9)))
    world = len(nodes)
    own: list[list[Piece]] = [[] for _ in range(world)]
    large = rng.choice([1, 50, 3000])
    for number in range(rng.randint(1, 30)):
        shape = tuple(rng.choice([0, 1, 1, 2, 3, 7, rng.randint(1, large), rng.randint(1, 200)]) for _ in range(rng.randint(0, 3)))
        members = rng.choice([range(world), range(world), [rng.randrange(world)], rng.sample(range(world), rng.randint(1, world))])
        if shape and shape[0] and rng.random() < 0.5:  # sharded by ceil(rows / members), as FSDP2 does, some with nothing
            each = -(-shape[0] // len(members))
            for at, rank in enumerate(members):
                first = min(at * each, shape[0])
                if count := min(each, shape[0] - first):
                    own[rank].append(rows(f"t{number}", first, count, *shape))
        else:
            for rank in members:
                own[rank].append(whole(f"t{number}", *shape))
    return own, nodes


def check(made: Plan, own: list[list[Piece]]) -> None:
    """Every element of every tensor stands in one chunk, in a file that its writer can fill, and no two chunks share bytes."""
    chunks = made.chunks()
    for name, (_, shape) in made.tensors.items():
        boxes = [Box(chunk.offsets, chunk.sizes) for _, chunk in chunks[name]]
        assert sum(volume(box.sizes) for box in boxes) == volume(shape) and not overlapping(boxes)
        assert all(within(box, shape) for box in boxes)
    assert {piece.name for pieces in own for piece in pieces} == {*made.tensors}
    assert len({file.name for file in made.files}) == len(made.files)
    for file in made.files:
        end = 0
        for chunk in file.chunks:
            assert end <= chunk.position and chunk.position % ALIGNMENT == chunk.at % ALIGNMENT == 0
            assert chunk.position < chunk.at and chunk.at + chunk.nbytes <= chunk.position + chunk.length <= file.size
            end = chunk.position + chunk.length
        assert end == file.size and (file.size <= FILE or len(file.chunks) == 1)
        assert file.writer in file.stagers
        for rank in file.stagers:
            boxes = {piece.name: Box(piece.offsets, piece.sizes) for piece in own[rank]}
            for chunk in file.chunks:  # which is within the rank's own box, at its row
                box = boxes[chunk.name]
                assert common(Box(chunk.offsets, chunk.sizes), box) == Box(chunk.offsets, chunk.sizes)
                assert not chunk.sizes or chunk.offsets[0] - box.offsets[0] == chunk.row


@pytest.mark.parametrize("seed", range(60))
def test_a_plan_holds_each_element_once_and_each_node_what_its_ranks_have(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    for name, most in (("FILE", 1 << 20), ("SMALL", 1 << 16), ("LEAST_CUT", 1 << 14)):
        monkeypatch.setattr(layout, name, rng.randint(most >> 3, most))
    own, nodes = random_world(rng)
    for complete in (True, False):
        made = plan(own, nodes, complete)
        monkeypatch.setattr(f"{__name__}.FILE", layout.FILE)
        check(made, own)
        for file in made.files:
            holders = {rank for rank, pieces in enumerate(own) if {c.name for c in file.chunks} <= {piece.name for piece in pieces}}
            if complete:  # each node that has all of it, once
                assert len({nodes[rank] for rank in file.stagers}) == len(file.stagers) and {nodes[r] for r in file.stagers} <= {
                    nodes[r] for r in holders
                }
                if all(chunk.sizes == made.tensors[chunk.name][1] for chunk in file.chunks):
                    assert {nodes[rank] for rank in file.stagers} == {nodes[rank] for rank in holders}
            else:
                assert len(file.stagers) == 1
        staged = [{file.name for file in made.staged_by(rank)} for rank in range(len(nodes))]
        for rank, names in enumerate(staged):
            assert {file.name for file in made.written_by(rank)} <= names
        assert plan([decode(encode(pieces)) for pieces in own], nodes, complete) == made


@pytest.mark.parametrize("shapes", [[(1000, 300)] * 40, [(50_000, 1000)], [(3,)] * 2000, [(1, 40_000_000), *[(64,)] * 300]], ids=range(4))
@pytest.mark.parametrize("nodes", [[0], [0, 0], [0, 0, 1, 1], [0, 0, 0, 1, 1], [0] * 8], ids=range(5))
def test_ranks_stage_and_write_alike(shapes: list[tuple[int, ...]], nodes: list[int]) -> None:
    own = [[whole(f"t{number}", *shape) for number, shape in enumerate(shapes)]] * len(nodes)
    made = plan(own, nodes)
    check(made, own)
    largest = max(file.size for file in made.files)
    for node in set(nodes):
        loads = [sum(file.size for file in made.staged_by(rank)) for rank, own_node in enumerate(nodes) if own_node == node]
        assert max(loads) - min(loads) <= largest
    written = [sum(file.size for file in made.written_by(rank)) for rank in range(len(nodes))]
    assert max(written) - min(written) <= largest and sum(written) == sum(file.size for file in made.files)
    total = sum(4 * volume(shape) for shape in shapes)
    if len(shapes) < 100 and total < 1 << 28:  # which can be cut anywhere
        for node in set(nodes):
            loads = [sum(file.size for file in made.staged_by(rank)) for rank, own_node in enumerate(nodes) if own_node == node]
            assert max(loads) < 1.1 * min(loads)
    assert len(made.files) <= 12 * len(nodes) + total // (FILE // 2)


def test_tied_tensors_are_stored_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    flat = flatten({"m": model})
    own = pieces(flat)
    assert [piece.same_as for piece in own] == ["", "m.0.weight"]
    made = plan([own, decode(encode(own))], [0, 0])
    assert sum(len(file.chunks) for file in made.files) == 1
    saved = json.loads(made.tensors_json())
    assert saved["m.0.weight"] == saved["m.1.weight"]
    before = signature(flat, own)
    assert signature(flatten({"m": model}), own) == before
    model[1].weight = nn.Parameter(model[0].weight.detach().clone())
    assert signature(flatten({"m": model}), own) != before
    alone = plan([own, pieces(flatten({"m": model}))], [0, 0])  # tied on one rank only
    assert sum(len(file.chunks) for file in alone.files) == 2


def test_what_ranks_do_not_hold_alike_is_named() -> None:
    for first, second, text in (
        (whole("a", 2, 2), whole("a", 3, 2), r"a is float32 \[2, 2\] and float32 \[3, 2\] on different ranks"),
        (whole("a", 2), whole("a", 2, dtype="int8"), r"a is float32 \[2\] and int8 \[2\] on different ranks"),
        (rows("a", 0, 1, 3), rows("a", 2, 1, 3), r"a has 3 elements, and the ranks' shards have 2"),
        (rows("a", 0, 2, 3), rows("a", 1, 2, 3), r"a has 3 elements, and the ranks' shards have 4"),
        (rows("a", 0, 2, 4), rows("a", 1, 2, 4), r"or overlap"),
    ):
        with pytest.raises(TrainError, match=text):
            plan([[first], [second]], [0, 0])


def test_ranks_with_another_torch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = encode([whole("a", 2)])
    assert decode(text) == (whole("a", 2),)
    decode.cache_clear()
    monkeypatch.setattr(torch, "__version__", "1.9.0+cpu")
    with pytest.raises(TrainError, match=r"this rank has torch 1\.9\.0, another one torch \d"):
        decode(text)


class Wrapper(torch.Tensor):
    """A tensor made of another one, as those of quantized weights."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (2,))

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(*_: Any) -> Any:
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError

    __torch_function__ = torch._C._disabled_torch_function_impl


@pytest.mark.parametrize("kind", ["sparse", "meta", "wrapper"])
def test_tensors_that_cannot_be_stored_are_named(kind: str) -> None:
    tensor = {"sparse": torch.eye(2).to_sparse, "meta": lambda: torch.empty(1, device="meta"), "wrapper": Wrapper}[kind]()
    with pytest.raises(TrainError, match=r"x: a checkpoint cannot hold this tensor: \w+ of float32 with layout"):
        pieces(Flat({"x": tensor}, {}))


def test_a_module_without_shapes_is_named() -> None:
    with pytest.raises(TrainError, match=r"m\.weight has no shape yet: call the module once"):
        pieces(flatten({"m": nn.LazyLinear(2)}))


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "bfloat16", "float8_e4m3fn", "float64", "complex64"])
def test_the_bytes_in_an_image_are_those_of_torch(dtype: str) -> None:
    """Also of tensors that are not contiguous, of none dimension, and of parts."""
    kind = DTYPES[dtype]
    bits = torch.randint(256, (64, 6 * kind.itemsize), dtype=torch.uint8)
    tensor = (bits % 2).bool() if kind is torch.bool else bits.view(kind)
    tensors = {"whole": tensor, "turned": tensor.t(), "part": tensor[1:, 2:5], "number": tensor[0, 0], "none": tensor[:0]}
    flat = Flat(tensors, {})
    made = plan([pieces(flat)], [0])
    image = image_files(made, 0)
    memory = bytearray(image.end)
    image.write_shells(memory)
    for to, source in zip(image.destinations(memory), image.sources(flat), strict=True):
        to.copy_(source)
    for file, chunk in [pair for chunks in made.chunks().values() for pair in chunks]:
        at = image.files[file.name][0] + chunk.position
        data = bytes(memory[at : at + chunk.length])
        loaded = torch.load(io.BytesIO(data), weights_only=True)
        expected = io.BytesIO()
        torch.save(tensors[chunk.name].contiguous().clone(), expected)
        assert len(data) == len(expected.getvalue()) and loaded.dtype == kind
        assert torch.equal(loaded.contiguous().view(-1).view(torch.uint8), tensors[chunk.name].contiguous().view(-1).view(torch.uint8))
    assert not made.chunks()["none"] and all(at % PAGE == 0 for at, _ in image.files.values())


def test_a_large_tensor_is_cut_and_its_parts_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "FILE", 1 << 20)
    flat = Flat({"a": torch.randn(1000, 700), "b": torch.randn(700, 1000).t()}, {})
    made = plan([pieces(flat), pieces(flat)], [0, 0])
    found = {name: torch.zeros(1000, 700) for name in flat.tensors}
    for rank in range(2):
        image = image_files(made, rank)
        memory = bytearray(image.end)
        for to, source in zip(image.destinations(memory), image.sources(flat), strict=True):
            to.copy_(source)
        for raw, to in zip(image.raws, image.destinations(memory), strict=True):
            found[raw.name][raw.row : raw.row + raw.sizes[0]] = to
    assert len(made.files) > 4 and all(torch.equal(found[name], flat.tensors[name]) for name in found)


def test_a_shell_does_not_depend_on_what_was_in_memory() -> None:
    shell.cache_clear()
    first: Any = shell("float32", (3, 5))
    shell.cache_clear()
    assert shell("float32", (3, 5)) == first and len(first.before) % ALIGNMENT == 0
    with pytest.raises(TrainError, match=r"torch cannot save tensors of uint4"):
        shell("uint4", (2,))


def test_boxes() -> None:
    rng = random.Random(0)
    for _ in range(300):
        dims = rng.randint(0, 3)
        boxes = [
            Box(tuple(rng.randrange(4) for _ in range(dims)), tuple(rng.randrange(3) for _ in range(dims)))
            for _ in range(rng.randint(0, 4))
        ]
        cells = [
            {tuple(i) for i in torch.cartesian_prod(*[torch.arange(a, a + n) for a, n in zip(*box, strict=True)]).view(-1, dims).tolist()}
            if dims and volume(box.sizes)
            else set(range(volume(box.sizes)))
            for box in boxes
        ]
        pair = any(a & b for at, a in enumerate(cells) for b in cells[:at])
        assert bool(overlapping(boxes)) == pair
        for at, a in enumerate(boxes):
            for b in boxes[:at]:
                both = common(a, b)
                assert (volume(both.sizes) if both and dims else bool(both)) == len(cells[at] & cells[boxes.index(b)]) or not dims
