"""What torch.distributed.checkpoint reads of ours, and we of its folders and of files of torch.save; pickles that would run code."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from elastirun.train import TrainError, load_checkpoint
from elastirun.train.checkpoints.dcp import METADATA, VALUES, DcpFiles, open_foreign
from elastirun.train.state import layout
from elastirun.train.state.loading import unused
from elastirun.train.state.tree import flatten
from tests.support.checkpoints import write
from tests.support.worlds import run
from tests.train.test_ckpt_reading import build, whole
from tests.train.test_ckpt_tree import data_parallel, same, trained


def theirs(state: dict[str, Any]) -> dict[str, Any]:
    """Return ``state`` in the form that users of DCP load into or save."""
    model, optimizer = state["model"], state["optimizer"]
    found = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    return {**found, **{key: value for key, value in state.items() if key not in ("model", "optimizer", "own")}}


def ordered(value: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(value.items()))


def write_all(folder: Path, state: dict[str, Any]) -> None:
    """Write what a checkpoint has, the files for DCP as well."""
    made = write(folder, state)
    metadata, values = DcpFiles(made).encode(flatten(state).tree).values()
    (folder / METADATA).write_bytes(metadata)
    (folder / VALUES).write_bytes(values)


# -- ours, read by torch ----------------------------------------------------------------------------------------------------


def write_world(rank: int, world: int, folder: str, kind: str) -> dict[str, Tensor]:
    layout.FILE, layout.SMALL, layout.LEAST_CUT = 4096, 2048, 64
    state = build(1, kind, 3)
    if rank:
        write(Path(folder), state)
    else:
        write_all(Path(folder), state)
    return whole(state)


def read_world(rank: int, world: int, folder: str, kind: str) -> tuple[dict[str, Tensor], float]:
    warnings.simplefilter("ignore")
    state = build(2, kind, 1)
    found = theirs(state)
    dcp.load(found, checkpoint_id=folder)
    set_model_state_dict(state["model"], found["model"])
    set_optimizer_state_dict(state["model"], state["optimizer"], found["optimizer"])
    assert found["epoch"] == 1
    return whole(state), state["optimizer"].param_groups[0]["lr"]


@pytest.mark.parametrize(("saved", "loaded"), [(("fsdp", 2), ("ddp", 1)), (("ddp", 2), ("fsdp", 2)), (("fsdp", 3), ("fsdp", 2))], ids=str)
def test_torch_reads_our_folders(saved: tuple[str, int], loaded: tuple[str, int], tmp_path: Path) -> None:
    before = run(saved[1], write_world, str(tmp_path), saved[0])[0]
    for after, lr in run(loaded[1], read_world, str(tmp_path), loaded[0]):
        assert lr == 0.2 and same(ordered(after), ordered(before))


def test_torch_converts_our_folders_to_one_file(tmp_path: Path) -> None:
    """Values of all kinds, tied weights, empty and odd tensors come with their paths."""
    model, optimizer = trained()
    state = {
        "model": model,
        "optimizer": optimizer,
        "x": {"deep": [1, {"t": torch.ones(2)}], "tuple": (1, 2), "none": None, "empty": torch.ones(0, 3)},
        "numbers": {1: torch.ones(1), 2: 5},
    }
    write_all(tmp_path, state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(tmp_path, tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt", weights_only=True)
    assert same(found["model"], dict(model.state_dict()))
    assert same(found["x"], state["x"]) and same(ordered(found["numbers"]), {"1": torch.ones(1), "2": 5})
    assert same(ordered(found["optimizer"]), ordered(get_optimizer_state_dict(model, optimizer)))


def test_values_may_change_without_a_new_description_until_they_do_not_fit(tmp_path: Path) -> None:
    model, optimizer = trained()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "epoch": 3, "flag": True, "notes": "short"}
    files = DcpFiles(write(tmp_path, state))
    first, _ = files.encode(flatten(state).tree).values()
    for change in ({"epoch": 70_000}, {"flag": 1}, {"notes": "long" * 99}, {"more": [1, 2]}):
        state |= change
        metadata, values = files.encode(flatten(state).tree).values()
        assert (metadata == first) == ("epoch" in change or "flag" in change)
        (tmp_path / METADATA).write_bytes(metadata)
        (tmp_path / VALUES).write_bytes(values)
        found = {**theirs(state), "epoch": 0, "flag": None, "notes": ""}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(found, checkpoint_id=tmp_path)
        assert all(same(found[key], value) for key, value in state.items() if key not in ("model", "optimizer"))
        assert same(ordered(found["optimizer"]), ordered(get_optimizer_state_dict(model, optimizer)))


# -- folders of torch, read by us -------------------------------------------------------------------------------------------


def dcp_save_world(rank: int, world: int, folder: str, kind: str) -> dict[str, Tensor]:
    warnings.simplefilter("ignore")
    state = build(1, kind, 3)
    dcp.save(theirs(state), checkpoint_id=folder)
    return whole(state)


def take_world(rank: int, world: int, folder: str, kind: str, steps: int) -> tuple[dict[str, Tensor], float]:
    state = build(2, kind, steps)
    del state["own"]
    load_checkpoint(folder, state)
    assert state["epoch"] == 1
    return whole(state), state["optimizer"].param_groups[0]["lr"]


@pytest.mark.parametrize(("saved", "loaded"), [(("fsdp", 2), ("ddp", 1)), (("ddp", 1), ("fsdp", 3)), (("fsdp", 3), ("fsdp", 2))], ids=str)
def test_we_read_folders_of_torch(saved: tuple[str, int], loaded: tuple[str, int], tmp_path: Path) -> None:
    before = run(saved[1], dcp_save_world, str(tmp_path), saved[0])[0]
    for after, lr in run(loaded[1], take_world, str(tmp_path), loaded[0], loaded[1] % 2):
        assert lr == 0.2 and same(ordered(after), ordered(before))


def saved_by_dcp(folder: Path, **state: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder)
    return folder


def test_folders_with_the_state_dicts_of_torch_and_odd_tensors(tmp_path: Path) -> None:
    model, optimizer = trained()
    odd = {"turned": torch.randn(3, 4).t(), "number": torch.tensor(2), "half": torch.ones(3, dtype=torch.bfloat16), "none": torch.ones(0)}
    saved_by_dcp(
        tmp_path, model=data_parallel(model).state_dict(), optimizer=optimizer.state_dict(), odd=odd, plain=[1, (2.5, None)], bad={1, 2}
    )
    other, its = trained(1, 0)
    state = {"model": other, "optimizer": its, "odd": {key: torch.zeros_like(value) for key, value in odd.items()}, "plain": 0}
    load_checkpoint(tmp_path, state)
    assert same(dict(other.state_dict()), dict(model.state_dict())) and same(its.state_dict(), optimizer.state_dict())
    assert same(state["odd"], odd) and same(state["plain"], [1, (2.5, None)])


@pytest.mark.parametrize("rate", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
def test_optimizers_that_dcp_has_flattened_come_back(rate: Any, tmp_path: Path) -> None:
    model, optimizer = trained()
    optimizer.param_groups[0]["lr"] = rate
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    saved_by_dcp(tmp_path, app={"model": get_model_state_dict(model), "optimizer": flat})
    other, its = trained(1, 0)
    state = {"app": {"model": other, "optimizer": its}}
    load_checkpoint(tmp_path, state)
    assert unused(state, open_foreign(tmp_path).tree) == []
    assert same(dict(other.state_dict()), dict(model.state_dict())) and same(its.state_dict(), optimizer.state_dict())


def test_values_that_only_code_could_read_are_left_out(tmp_path: Path) -> None:
    saved_by_dcp(tmp_path, good=1, bad=random.Random(0))
    found = open_foreign(tmp_path)
    assert found.skipped == ["bad"] and found.tree == {"good": 1}
    state = {"good": 0}
    load_checkpoint(tmp_path, state)
    assert state == {"good": 1} and unused({}, found.tree) == ["good"]
    with pytest.raises(TrainError, match=r"has nothing of the state: it has good, the state has bad"):
        load_checkpoint(tmp_path, {"bad": 0})


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> Any:
        return self.call, self.args


def evils(mark: Path) -> list[Any]:
    return [
        *(Evil(os.system, f"touch {mark}"), Evil(eval, f"open({str(mark)!r}, 'w')"), Evil(exec, f"open({str(mark)!r}, 'w')")),
        *(
            Evil(subprocess.Popen, ["touch", str(mark)]),
            Evil(pickle.loads, b"cos\nsystem\n."),
            Evil(open, str(mark), "w"),
            Evil(__import__, "this"),
        ),
    ]


@pytest.mark.parametrize("number", range(7))
def test_a_pickle_that_would_run_code_does_not(number: int, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    evil = evils(mark)[number]
    folder = saved_by_dcp(tmp_path / "dcp", x=torch.ones(2))
    good = (folder / METADATA).read_bytes()
    whole_one = pickle.loads(good)
    for protocol in range(6):
        for place in (lambda: evil, lambda: {**vars(whole_one), "planner_data": evil}):
            (folder / METADATA).write_bytes(pickle.dumps(place(), protocol=protocol))
            with pytest.raises(TrainError, match=r"which does not belong into it: the file is not to be trusted|does not describe|damaged"):
                open_foreign(folder)
    whole_one.planner_data = {"x": evil}
    (folder / METADATA).write_bytes(pickle.dumps(whole_one))
    with pytest.raises(TrainError, match=r"the file is not to be trusted"):
        open_foreign(folder)
    torch.save({"x": evil}, tmp_path / "one.pt")
    torch.save({"x": evil}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for file in ("one.pt", "old.pt"):
        with pytest.raises(TrainError, match=r"cannot be read by torch\.load\(weights_only=True\)"):
            open_foreign(tmp_path / file)
    assert not mark.exists()


@pytest.mark.parametrize(
    "code",
    [
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}X\x06\x00\x00\x00kindedX\x01\x00\x00\x00xtb.",  # BUILD of the class itself
        b"ctorch\nSize\n(N}X\x05\x00\x00\x00countNstb.",
        b"ccollections\nOrderedDict\n(N}X\x05\x00\x00\x00clearNstb.",
        *(
            b"ctorch\nload\n.",
            b"ctorch.distributed.checkpoint.metadata\npickle\n.",
            b"ctorch.distributed.checkpoint.metadata\nos.system\n.",
        ),
        *(b"cbuiltins\neval\n.", b"cpathlib\nos\n.", b"Pabc\n.", b"\x82\x01.", b"", b".", b"N.", b"(" * 100, b"\x80\x09."),
        *(b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.", b"]" + b"(" * 10 + b".", b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f."),
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}X\x0c\x00\x00\x00storage_dataNsb.",
    ],
    ids=range(19),
)
def test_a_description_made_by_hand_is_refused(code: bytes, tmp_path: Path) -> None:
    before = dict(vars(OrderedDict)), dict(vars(torch.Size))
    (tmp_path / METADATA).write_bytes(code)
    with pytest.raises(TrainError, match=rf"{METADATA}"):
        open_foreign(tmp_path)
    assert (dict(vars(OrderedDict)), dict(vars(torch.Size))) == before


def nested(depth: int = 64) -> Any:
    """A tuple of a few bytes whose text would fill every disk."""
    value: Any = ("x",)
    for _ in range(depth):
        value = (value, value)
    return value


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.planner_data.update(x=nested()),
        *(
            lambda m, name=name: [setattr(info, name, nested()) for info in m.storage_data.values()]
            for name in ("relative_path", "offset", "length")
        ),
        lambda m: setattr(m.state_dict_metadata["x"].chunks[0], "sizes", nested()),
        lambda m: setattr(m.state_dict_metadata["x"], "size", nested()),
        lambda m: m.state_dict_metadata.update(x=nested()),
    ],
    ids=range(7),
)
def test_a_small_description_of_endless_values_is_refused_at_once(change: Callable[[Any], None], tmp_path: Path) -> None:
    saved_by_dcp(tmp_path, x=torch.ones(2, 3))
    lie(tmp_path, change)
    with pytest.raises(TrainError):
        open_foreign(tmp_path)


@pytest.mark.parametrize("name", ["ctorch\nSize\n", "ccollections\nOrderedDict\n"], ids=["size", "dict"])
def test_a_call_in_a_description_copies_nothing_large(name: str, tmp_path: Path) -> None:
    pair, before = b"](NNe", vars(dcp.metadata).copy()
    (tmp_path / METADATA).write_bytes(name.encode() + b"](" + pair * 65 + b"e\x85R.")
    with pytest.raises(TrainError, match=r"\.metadata is damaged: TypeError"):
        open_foreign(tmp_path)
    assert vars(dcp.metadata) == before


def test_what_a_description_changes_in_a_permitted_name_is_changed_in_that_name_alone(tmp_path: Path) -> None:
    good = (saved_by_dcp(tmp_path / "good", x=torch.ones(2)) / METADATA).read_bytes()
    for name in ("torch\nSize", "collections\nOrderedDict", "torch.distributed.checkpoint.metadata\nMetadata"):
        for attribute in ("__defaults__", "__setstate__", "__init__", "state", "kind", "fromkeys", "__code__"):
            code = f"c{name}\n(N}}X".encode() + bytes([len(attribute), 0, 0, 0]) + attribute.encode() + b"Nstb."
            (tmp_path / METADATA).write_bytes(code)
            with pytest.raises(TrainError, match=METADATA):
                open_foreign(tmp_path)
            (tmp_path / METADATA).write_bytes(good)
    (tmp_path / "good" / METADATA).write_bytes(good)
    assert set(open_foreign(tmp_path / "good").tensors) == {"x"}


def test_a_damaged_folder_is_refused_or_read(tmp_path: Path) -> None:
    folder = saved_by_dcp(tmp_path, x=torch.arange(6.0).view(2, 3), y={"z": [torch.ones(1), 3]}, n=5)
    data = (folder / METADATA).read_bytes()
    rng, refused = random.Random(0), 0
    for _ in range(400):
        broken = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        (folder / METADATA).write_bytes(broken)
        target = torch.zeros(2, 3)
        try:
            found = open_foreign(folder)
            found.fill({"x": target})
        except TrainError:
            refused += 1
    assert 0 < refused < 400, "nothing but a TrainError, and not everything is refused"


def lie(path: Path, change: Callable[[Any], None]) -> None:
    whole_one = pickle.loads((path / METADATA).read_bytes())
    change(whole_one)
    (path / METADATA).write_bytes(pickle.dumps(whole_one))


@pytest.mark.parametrize(
    "change",
    [
        *(("relative_path", value) for value in ("../../etc/passwd", "/etc/passwd", "", None, "other")),
        *(("offset", value) for value in (-1, 10**9, None, "x")),
        *(("length", value) for value in (-5, 10**12, 3, None)),
    ],
    ids=str,
)
def test_a_description_that_lies_about_files_is_refused(change: tuple[str, Any], tmp_path: Path) -> None:
    saved_by_dcp(tmp_path, x=torch.ones(2, 3))
    lie(tmp_path, lambda whole_one: [setattr(info, *change) for info in whole_one.storage_data.values()])
    target = torch.zeros(2, 3)
    with pytest.raises(TrainError):
        open_foreign(tmp_path).fill({"x": target})
    assert not target.any()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m.state_dict_metadata["x"], "size", torch.Size([4, 3])),
        lambda m: setattr(m.state_dict_metadata["x"], "chunks", []),
        lambda m: m.state_dict_metadata["x"].chunks.extend(m.state_dict_metadata["x"].chunks),
        lambda m: setattr(m.state_dict_metadata["x"].properties, "dtype", torch.int64),
        lambda m: m.storage_data.clear(),
        lambda m: m.planner_data.update(x=("y", "x")),
        lambda m: m.planner_data.update(x=("x",) * 10_000),
        lambda m: m.state_dict_metadata.update({"x.y": m.state_dict_metadata["x"]}),
    ],
    ids=range(8),
)
def test_a_description_that_lies_about_tensors_is_refused(change: Callable[[Any], None], tmp_path: Path) -> None:
    saved_by_dcp(tmp_path, x=torch.ones(2, 3))
    lie(tmp_path, change)
    target = torch.zeros(2, 3)
    with pytest.raises(TrainError):
        open_foreign(tmp_path).fill({"x": target})
    assert not target.any()


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "list.pt").write_bytes(b"")
    torch.save([1], tmp_path / "other.pt")
    for name, text in (
        ("", r"the folder has no \.metadata"),
        ("nothing", r"nothing cannot be read: No such file"),
        ("list.pt", r"the file is none that torch\.save has written"),
        ("other.pt", r"the file holds list, and a dict was expected"),
    ):
        with pytest.raises(TrainError, match=text):
            open_foreign(tmp_path / name)


# -- files of torch.save ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new", [True, False])
def test_we_read_files_of_torch(new: bool, tmp_path: Path) -> None:
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    saved = {"net": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "epoch": 4}
    torch.save(saved, tmp_path / "run.pt", _use_new_zipfile_serialization=new)
    other, its = trained(1, 0)
    state = {"net": other, "optimizer": its, "scheduler": torch.optim.lr_scheduler.StepLR(its, 5), "epoch": 0}
    load_checkpoint(tmp_path / "run.pt", state)
    assert same(dict(other.state_dict()), dict(model.state_dict())) and same(its.state_dict(), optimizer.state_dict())
    assert same(state["scheduler"].state_dict(), scheduler.state_dict()) and state["epoch"] == 4


@pytest.mark.parametrize("wrap", [False, True])
def test_a_file_with_a_bare_state_dict_belongs_to_the_only_module(wrap: bool, tmp_path: Path) -> None:
    model, optimizer = trained()
    torch.save((data_parallel(model) if wrap else model).state_dict(), tmp_path / "model.pt")
    other, its = trained(1)
    load_checkpoint(tmp_path / "model.pt", {"model": other})
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    before = its.state_dict()
    load_checkpoint(tmp_path / "model.pt", {"model": other, "optimizer": its})
    assert same(its.state_dict(), before), "what the file does not have at all stays as it is"
    torch.save({"x": torch.eye(2).to_sparse()}, tmp_path / "sparse.pt")
    with warnings.catch_warnings(), pytest.raises(TrainError, match=r"x: tensors of this kind cannot be read"):
        warnings.simplefilter("ignore")  # torch 2.11 warns of sparse tensors
        open_foreign(tmp_path / "sparse.pt")
