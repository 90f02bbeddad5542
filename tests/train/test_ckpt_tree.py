"""A state as tensors by name and a tree of values, and back: modules, optimizers, schedulers, plain values, values per rank."""

from __future__ import annotations

import copy
import json
import math
import random
import sys
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from elastirun.train import DistributedDataParallel, TrainError
from elastirun.train.ddp.state_dicts import take_both_forms
from elastirun.train.state.loading import load, targets, unused
from elastirun.train.state.per_rank import PerRank
from elastirun.train.state.tree import Flat, flatten
from elastirun.train.state.values import decode_values, encode_values, leaves, to_node, to_value


class Norms(nn.Module):
    """Parameters, buffers, tied weights, and layers below wrappers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(x)))


class Wheel:
    """An object with a state of plain values and tensors."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def trained(seed: int = 0, steps: int = 2, build: Any = torch.optim.AdamW, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Norms()
    optimizer = build(model.parameters(), lr=0.1 + seed, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randint(5, (6,))).square().sum().backward()
        optimizer.step()
    return model, optimizer


def data_parallel(model: nn.Module) -> nn.Module:
    """Wrap ``model`` as where there is no GPU, to which torch would move it."""
    wrapped = nn.DataParallel.__new__(nn.DataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = model
    return wrapped


def restore(state: dict[str, Any], flat: Flat, rank: int = 0, strict: bool = True) -> dict[str, Any]:
    """Put ``flat`` into ``state``, by way of JSON."""
    tree = decode_values(encode_values(flat.tree))
    found = targets(state, tree, flat.tensors, rank, strict)
    with torch.no_grad():
        for name, tensor in found.items():
            tensor.copy_(flat.tensors[name])
    return load(state, tree, found, rank, strict)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or a != a and b != b)


# -- names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [torch.optim.AdamW, torch.optim.SGD])
def test_names_and_values_are_those_of_distributed_checkpoints(build: Any) -> None:
    model, optimizer = trained(build=build)
    flat = flatten({"model": model, "optimizer": optimizer})
    theirs = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    expected, paths = flatten_state_dict(theirs)
    ours = {path: to_value(node, ".".join(map(str, path)), flat.tensors.__getitem__) for path, node in leaves(flat.tree)}
    assert {".".join(map(str, path)): path for path in ours} == paths
    assert all(same(expected[name].detach() if isinstance(expected[name], Tensor) else expected[name], ours[paths[name]]) for name in paths)
    assert list(flat.tensors) == [name for name, value in expected.items() if isinstance(value, Tensor)]


@pytest.mark.parametrize("wrap", ["data parallel", "compiled", "recomputed", "deep"])
def test_names_of_wrappers_are_left_out(wrap: str) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model, _ = trained()
    expected = list(flatten({"model": model}).tensors)
    wrapped = {
        "data parallel": lambda: data_parallel(model),
        "compiled": lambda: torch.compile(model, backend="eager"),
        "recomputed": lambda: checkpoint_wrapper(model),
        "deep": lambda: data_parallel(torch.compile(model, backend="eager")),
    }[wrap]()
    assert list(flatten({"model": wrapped}).tensors) == expected
    model.block[0] = checkpoint_wrapper(model.block[0])
    assert list(flatten({"model": model}).tensors) == expected
    assert list(flatten({"model": wrapped}).tensors) == expected
    other = flatten({"model": trained(1)[0]})
    restore({"model": wrapped}, other)
    assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in flatten({"model": model}).tensors.items())


def test_layers_that_are_compiled_one_by_one_keep_their_names() -> None:
    model, _ = trained()
    expected = list(flatten({"model": model}).tensors)
    model.block = torch.compile(model.block, backend="eager")
    assert list(flatten({"model": model}).tensors) == expected


def test_the_first_fsdp_is_refused() -> None:
    with pytest.raises(TrainError, match=r"use torch\.distributed\.fsdp\.fully_shard instead"):
        flatten({"m": nn.Sequential(OrderedDict(_fsdp_wrapped_module=nn.Linear(1, 1)))})


@pytest.mark.parametrize("number", [1, 2])
def test_names_of_parameters_are_found_where_the_state_dict_has_copies(number: int) -> None:
    class Copying(nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {name: tensor.clone() for name, tensor in super().state_dict(*args, **kwargs).items()}

    modules = {str(at): Copying(1, 1) for at in range(number)}
    optimizer = torch.optim.SGD([param for module in modules.values() for param in module.parameters()], lr=1.0)
    expected = ["weight", "bias"] if number == 1 else ["m.0.weight", "m.0.bias", "m.1.weight", "m.1.bias"]
    assert flatten({"m": modules, "o": optimizer}).tree["o"]["param_groups"][0]["params"] == expected


def test_a_layer_that_is_called_module_keeps_its_name() -> None:
    model = nn.Sequential(OrderedDict(module=nn.Linear(1, 1), submodule=nn.Linear(1, 1)))
    assert list(flatten({"m": model}).tensors) == ["m.module.weight", "m.module.bias", "m.submodule.weight", "m.submodule.bias"]


def test_an_optimizer_of_two_modules_has_their_paths_in_its_names() -> None:
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=1.0)
    assert flatten({"nets": {"a": a, "b": b}, "o": optimizer}).tree["o"]["param_groups"][0]["params"] == [
        *("nets.a.weight", "nets.a.bias", "nets.b.weight", "nets.b.bias")
    ]


def test_two_tensors_with_one_name_are_refused() -> None:
    for state in ({"a": {"b.c": torch.ones(1)}, "a.b": {"c": torch.ones(1)}}, {"a": {"b.weight": torch.ones(1)}, "a.b": nn.Linear(1, 1)}):
        with pytest.raises(TrainError, match=r"another key"):
            flatten(state)


# -- values -----------------------------------------------------------------------------------------------------------------

VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**200, 0.1, -0.0, math.inf, -math.inf, math.nan, "", "ä\ud800\n", b"", b"\0\xff", 1 - 2j),
    *([], [1, [2]], (), (1, (2, [3])), {}, {"a": {"b": (1,)}}, {1: 2, None: 3, (1, "x"): 4, 0.5: 5}, {"$": 1}, {"$": "tensor"}),
    *({1, 2}, frozenset({"a"}), Counter({3: 1}), OrderedDict(b=1, a=2), torch.Size([1, 2]), torch.bfloat16, torch.device("cpu")),
    *(torch.arange(3), torch.tensor(1.5), [torch.ones(2)], {"x": (torch.ones(1), 2)}, {7: torch.zeros(2)}),
)


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    wheel, plain = Wheel(), {"v": 0}
    for state, other in (({"v": Wheel(value)}, {"v": wheel}), ({"v": value}, plain)):
        result = restore(other, flatten(state))
        assert same(result["v"].state if other["v"] is wheel else result["v"], value)
    assert same(wheel.state, value) and same(plain["v"], value)


@pytest.mark.parametrize("dtype", [">i4", ">f8"] if sys.byteorder == "little" else ["<i4", "<f8"])
def test_an_array_of_another_byte_order_is_named(dtype: str) -> None:
    with pytest.raises(TrainError, match=r"a\.b: a checkpoint cannot hold a NumPy array of another byte order; save array\.astype"):
        flatten({"a": {"b": np.arange(3, dtype=dtype)}})


def test_numpy_arrays_and_scalars_come_back() -> None:
    array = np.arange(6, dtype=np.uint32).reshape(2, 3)
    result = restore({"v": 0}, flatten({"v": {"a": array, "t": array.T, "s": np.float64(0.5), "i": np.int32(3)}}))["v"]
    assert (result["a"] == array).all() and result["a"].dtype == np.uint32 and (result["t"] == array.T).all()
    assert result["s"] == 0.5 and result["i"] == 3


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"x": [lambda: 0]}, r"x\.0: a checkpoint cannot hold builtins\.function; give it"),
        ({"x": {"y": object()}}, r"x\.y: a checkpoint cannot hold builtins\.object"),
        ({"x": np.array(["a"])}, r"x: a checkpoint cannot hold this NumPy value"),
        ({"x": {torch.ones(1): 1}}, r"x: a tensor is the key"),
        ({"x": PerRank([object()])}, r"cannot hold builtins\.object"),
        ({"x": PerRank("a" * (65 << 20))}, r"x: a value per rank has"),
        ({1: 2}, r"dict whose keys are texts"),
    ],
    ids=range(7),
)
def test_what_cannot_be_held_is_named(value: Any, text: str) -> None:
    with pytest.raises(TrainError, match=text):
        encode_values(flatten(value).tree)


def test_a_container_that_contains_itself_is_named() -> None:
    loop: list[Any] = []
    loop.append(loop)
    deep: dict[str, Any] = {}
    deep["x"] = deep
    for value in (loop, deep):
        with pytest.raises(TrainError, match=r"contain itself"):
            flatten({"v": value})


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "1", "{", '{"a": NaN}', '{"a": {"$": "what"}}', '{"a": {"$": ["x"]}}', '{"a": {"$": "tuple"}}', '{"a":' * 5000),
        *('{"a": {"$": "bytes", "value": "*"}}', '{"a": {"$": "dtype", "value": "load"}}', '{"a": {"$": "device", "value": "nowhere"}}'),
        *('{"a": {"$": "dict", "type": "object", "items": []}}', '{"a": {"$": "dict", "type": "dict", "items": [[[1], 2]]}}'),
        *('{"a": {"$": "set", "items": [[1]]}}', '{"a": {"$": "size", "items": ["x"]}}', '{"a": {"$": "tuple", "items": {"b": 1}}}'),
        *(
            '{"a": {"$": "module", "versions": [], "items": {}}}',
            '{"a": {"$": "float", "value": 1}}',
            '{"a": {"$": "complex", "value": "x"}}',
        ),
        *('{"a": {"$": "dict", "type": "dict", "items": [[{"$": "tensor"}, 2]]}}', "\x00", '{"a": {"$": "dict", "type": {}, "items": []}}'),
    ],
)
def test_bytes_that_are_no_tree_are_refused(text: str) -> None:
    with pytest.raises(TrainError):
        decode_values(text.encode())


def test_a_damaged_tree_is_refused_or_a_tree() -> None:
    model, optimizer = trained()
    flat = flatten({"m": model, "o": optimizer, "v": VALUES})
    data = encode_values(flat.tree)
    rng, refused = random.Random(1), 0
    for _ in range(300):
        broken = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            broken[rng.randrange(len(broken))] = rng.choice(b'{}[]",:$0x\xff')
        try:
            tree = decode_values(bytes(broken))
            to_value(tree, "", lambda name: name)
            list(leaves(tree))
        except TrainError:
            refused += 1
    assert 0 < refused < 300, "nothing but a TrainError, and not everything is refused"


# -- objects ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 3])
def test_a_run_comes_back_into_a_fresh_or_a_used_one(steps: int) -> None:
    def build(seed: int, steps: int) -> dict[str, Any]:
        model, optimizer = trained(seed, steps)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [seed + 1, 5])
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": seed, "best": {}, "nets": [nn.Linear(2, 2)]}

    state, other = build(1, 2), build(2, steps)
    state["best"] = {"loss": 0.5, "at": torch.tensor(3)}
    before = list(map(id, other["model"].parameters()))
    result = restore(other, flatten(state))
    assert same(other["model"].state_dict(), state["model"].state_dict()) and before == list(map(id, other["model"].parameters()))
    assert same(other["optimizer"].state_dict(), state["optimizer"].state_dict())
    assert same(other["scheduler"].state_dict(), state["scheduler"].state_dict())
    assert other["epoch"] == result["epoch"] == 1 and same(other["best"], state["best"])
    assert same(other["nets"][0].state_dict(), state["nets"][0].state_dict())
    x = torch.arange(5)
    for one in (state, other):  # which train on alike
        one["model"](x).sum().backward()
        one["optimizer"].step()
    other["optimizer"].zero_grad()
    assert same(state["optimizer"].state_dict()["param_groups"], other["optimizer"].state_dict()["param_groups"])


OPTIMIZERS: dict[str, Any] = {
    **{
        name: (getattr(torch.optim, name), {}) for name in ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "Rprop", "Adafactor")
    },
    "Adam": (torch.optim.Adam, {"amsgrad": True, "fused": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True, "lr": torch.tensor(0.01)}),
    "LBFGS": (torch.optim.LBFGS, {"max_iter": 2}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("used", [False, True])
def test_every_optimizer_of_torch_goes_on_as_before(name: str, used: bool) -> None:
    def build(seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        kind, options = OPTIMIZERS[name]
        return model, step(model, kind(model.parameters(), **copy.deepcopy(options)), steps)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.Optimizer:
        def loss() -> Tensor:
            optimizer.zero_grad()
            value = model(torch.ones(2, 3)).square().sum()
            value.backward()
            return value

        for _ in range(steps):
            optimizer.step(loss)
        return optimizer

    (model, optimizer), (other, its) = build(0, 3), build(1, 2 * used)
    restore({"m": other, "o": its}, flatten({"m": model, "o": optimizer}))
    assert same(its.state_dict(), optimizer.state_dict())
    step(model, optimizer, 2)
    step(other, its, 2)
    assert same(dict(other.state_dict()), dict(model.state_dict())) and same(its.state_dict(), optimizer.state_dict())


def test_parameters_are_filled_in_place_and_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    found = targets({"m": model, "o": optimizer}, flatten({"m": model, "o": optimizer}).tree, flatten({"m": model, "o": optimizer}).tensors)
    assert found["m.block.0.weight"] is model.block[0].weight
    assert found["o.state.block.0.weight.exp_avg"] is optimizer.state[model.block[0].weight]["exp_avg"]


def test_what_an_object_gives_of_its_own_is_not_changed_before_it_is_loaded() -> None:
    live = torch.zeros(2)
    wheel, state = Wheel({"x": live}), {"v": Wheel({"x": torch.ones(2)})}
    restore({"v": wheel}, flatten(state))
    assert not live.any() and torch.equal(wheel.state["x"], torch.ones(2))


def test_objects_within_dicts_within_dicts_come_back() -> None:
    (model, optimizer), (other, its) = trained(), trained(1, 0)
    state: dict[str, Any] = {"run": {"nets": {"a": other}, "o": (its, 3), "n": 0}}
    inner = state["run"]
    restore(state, flatten({"run": {"nets": {"a": model}, "o": (optimizer, 4), "n": 5}}))
    assert state["run"] is inner and inner["n"] == 5 and inner["o"] == (its, 4)
    assert same(dict(other.state_dict()), dict(model.state_dict())) and same(its.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("entry", [{0: torch.ones(2)}, {"$": torch.ones(2)}, {"a": {1: [torch.ones(1), 2]}}, {}], ids=range(4))
def test_optimizers_may_have_a_state_of_any_form(entry: dict[Any, Any]) -> None:
    def build(entry: dict[Any, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer.state[model.weight] = copy.deepcopy(entry)
        return model, optimizer

    (model, optimizer), (other, its) = build(entry), build({})
    restore({"m": other, "o": its}, flatten({"m": model, "o": optimizer}))
    assert same(its.state_dict(), optimizer.state_dict()) and same(its.state[other.weight], entry)


def test_parameters_that_the_checkpoint_does_not_have_keep_their_state() -> None:
    def build(names: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in names})
        optimizer = torch.optim.Adam([{"params": model[name].weight, "lr": at + len(names)} for at, name in enumerate(names)])
        sum(layer.weight.square().sum() for layer in model.values()).backward()  # type: ignore[union-attr]
        optimizer.step()
        return model, optimizer

    (model, optimizer), (other, its) = build("a"), build("ab")
    kept = copy.deepcopy(its.state[other["b"].weight])
    restore({"m": other, "o": its}, flatten({"m": model, "o": optimizer}), strict=False)
    assert same(its.state[other["b"].weight], kept) and [group["lr"] for group in its.param_groups] == [1, 3]
    assert same(its.state[other["a"].weight], optimizer.state[model["a"].weight]) and torch.equal(other["a"].weight, model["a"].weight)


def test_optimizers_go_by_the_names_of_their_parameters() -> None:
    """The other optimizer has its parameters in another order and in other groups."""
    model, optimizer = trained()
    other = Norms()
    params = list(reversed(list(other.parameters())))
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    theirs = torch.optim.AdamW(groups, lr=9.0)
    restore({"m": other, "o": theirs}, flatten({"m": model, "o": optimizer}))
    assert [group["lr"] for group in theirs.param_groups] == [0.1, 0.1]
    for name, param in other.named_parameters():
        assert same(theirs.state[param], optimizer.state[model.get_parameter(name)])


def test_an_optimizer_of_plain_tensors_goes_by_numbers() -> None:
    def build(value: float) -> dict[str, Any]:
        w = torch.full((2,), value, requires_grad=True)
        optimizer = torch.optim.Adam([w], lr=value)
        (w * w).sum().backward()
        optimizer.step()
        return {"w": w, "o": optimizer}

    one, two = build(0.1), build(0.2)
    restore(two, flatten(one))
    assert same(one["o"].state_dict(), two["o"].state_dict()) and torch.equal(one["w"], two["w"])


def test_the_state_dicts_of_torch_are_taken_as_they_are() -> None:
    """Files that were saved with ``optimizer.state_dict()`` have numbers, and modules within a wrapper its prefix."""
    model, optimizer = trained()
    saved = {"model": data_parallel(model).state_dict(), "optimizer": optimizer.state_dict()}
    other, theirs = trained(1, 0)
    restore({"model": other, "optimizer": theirs}, flatten(saved))
    assert same(other.state_dict(), model.state_dict()) and same(theirs.state_dict(), optimizer.state_dict())


def test_versions_of_layers_are_kept() -> None:
    class Old(nn.Linear):
        _version = 3
        seen: Any = None

        def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
            Old.seen = metadata.get("version")
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    flat = flatten({"m": nn.Sequential(Old(1, 1), nn.BatchNorm1d(1))})
    assert flat.tree["m"]["versions"] == {"0": 3, "1": 2}
    restore({"m": nn.Sequential(Old(1, 1), nn.BatchNorm1d(1))}, flat)
    assert Old.seen == 3
    Old._version = 4
    restore({"m": data_parallel(nn.Sequential(Old(1, 1), nn.BatchNorm1d(1)))}, flat)
    assert Old.seen == 3


@pytest.mark.parametrize("at", ["layer", "wrapper", "method"])
def test_modules_with_a_way_of_their_own_are_loaded_in_that_way(at: str) -> None:
    called = []

    class Own(nn.Linear):
        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            called.append(at)
            return super().load_state_dict(*args, **kwargs)

    layer = Own(1, 1) if at == "method" else nn.Linear(1, 1)
    model = layer if at == "method" else data_parallel(nn.Sequential(layer))
    if at != "method":
        (layer if at == "layer" else model).register_load_state_dict_post_hook(lambda *_: called.append(at))
    flat = flatten({"m": nn.Linear(1, 1) if at == "method" else nn.Sequential(nn.Linear(1, 1))})
    restore({"m": model}, flat)
    assert called == [at] and torch.equal(layer.weight, next(iter(flat.tensors.values())))


def test_plain_modules_are_filled_and_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's load_state_dict takes a second for a thousand layers."""
    flat = flatten({"m": trained(1)[0]})
    model = DistributedDataParallel.__new__(DistributedDataParallel)  # without a group
    nn.Module.__init__(model)
    model.module = trained(0)[0]
    take_both_forms(model)
    monkeypatch.setattr(nn.Module, "load_state_dict", lambda *_, **__: pytest.fail("loaded by copying"))
    monkeypatch.setattr(DistributedDataParallel, "__del__", lambda _: None, raising=False)
    restore({"m": model}, flat)
    assert all(torch.equal(tensor, flat.tensors[f"m.{name}"]) for name, tensor in model.module.state_dict().items())


def test_extra_state_of_modules_is_kept() -> None:
    class Extra(nn.Linear):
        extra: Any = None

        def get_extra_state(self) -> Any:
            return self.extra

        def set_extra_state(self, state: Any) -> None:
            self.extra = state

    one, two = Extra(1, 1), Extra(1, 1)
    one.extra = {"scale": torch.ones(3), "n": 2}
    restore({"m": two}, flatten({"m": one}))
    assert same(two.extra, one.extra) and torch.equal(one.weight, two.weight)


def test_every_rank_has_its_own_value_and_newcomers_keep_theirs() -> None:
    def build(rank: int) -> dict[str, Any]:
        return {"rng": PerRank({"torch": torch.full((3,), rank, dtype=torch.uint8), "python": random.Random(rank).getstate()}), "epoch": 1}

    saved = [flatten(build(rank), rank) for rank in range(2)]
    assert list(saved[1].tensors) == ["rng@1"] and saved[0].tree == saved[1].tree
    everything = Flat({**saved[0].tensors, **saved[1].tensors}, saved[0].tree)
    for rank, expected in ((0, 0), (1, 1), (2, 7)):
        state = build(7)
        restore(state, everything, rank)
        assert same(state["rng"].value, build(expected)["rng"].value)
    restore({"rng": PerRank(1), "epoch": 0}, Flat({}, {"epoch": 3}))  # a checkpoint from before
    deep: dict[str, Any] = {"a": [{"b": PerRank(1)}]}
    restore(deep, flatten({"a": [{"b": PerRank(2)}]}))
    assert deep["a"][0]["b"].value == 2


def test_a_value_per_rank_may_have_a_state_and_keeps_its_size() -> None:
    sizes = {flatten({"r": PerRank(Wheel(random.Random(seed).getstate()))}).tensors["r@0"].numel() for seed in range(20)}
    assert sizes == {8192}
    wheel = Wheel()
    restore({"r": PerRank(wheel)}, flatten({"r": PerRank(Wheel({"a": torch.eye(2)}))}))
    assert same(wheel.state, {"a": torch.eye(2)})
    flat = flatten({"r": PerRank(1)})
    flat.tensors["r@0"][3] = 0
    with pytest.raises(TrainError, match=r"r: the checkpoint's value for this rank cannot be read"):
        restore({"r": PerRank(1)}, flat)


# -- what does not fit --------------------------------------------------------------------------------------------------------


def test_what_the_checkpoint_lacks_is_named_or_kept() -> None:
    model, optimizer = trained()
    flat = flatten({"m": model, "o": optimizer, "epoch": 3})
    wider = nn.Sequential(OrderedDict(model=model))
    for state, text in (
        ({"m": model, "x": 1}, r"the checkpoint has no x; it has m, o, epoch"),
        ({"m": wider}, r"the checkpoint has no m\.model\.embedding\.weight"),
        ({"m": wider, "o": torch.optim.SGD(wider.parameters())}, r"the checkpoint has no m\.model"),
        ({"o": torch.optim.SGD(wider.parameters(), lr=1.0), "m": wider}, r"o: the checkpoint's optimizer has no parameter model\.embed"),
        ({"epoch": torch.ones(1)}, r"epoch is a tensor"),
        ({"epoch": optimizer}, r"no optimizer here"),
    ):
        with pytest.raises(TrainError, match=text):
            targets(state, flat.tree, flat.tensors)
    state = {"m": model, "x": 5, "epoch": 0, "n": [nn.Linear(1, 1)]}
    assert restore(state, flat, strict=False)["x"] == 5 and state["epoch"] == 3
    assert unused({"m": model}, flat.tree) == ["o", "epoch"]
    assert unused({"m": model.block, "o": optimizer, "epoch": 0}, flat.tree)[:2] == ["m.embedding.weight", "m.block.0.weight"]


def test_a_tree_without_its_tensors_is_refused() -> None:
    flat = flatten({"m": nn.Linear(1, 1)})
    with pytest.raises(TrainError, match=r"the checkpoint has no tensor m\.bias, although its values refer to it"):
        targets({"m": nn.Linear(1, 1)}, flat.tree, {"m.weight": flat.tensors["m.weight"]})


def test_groups_that_had_other_options_are_not_joined() -> None:
    model = nn.Linear(1, 1)
    apart = torch.optim.SGD([{"params": model.weight, "lr": 1.0}, {"params": model.bias, "lr": 2.0}])
    flat = flatten({"m": model, "o": apart})
    with pytest.raises(TrainError, match=r"o: parameters of one group are in groups of the checkpoint with other options"):
        restore({"m": model, "o": torch.optim.SGD(model.parameters(), lr=3.0)}, flat)


def test_a_module_without_memory_is_refused() -> None:
    flat = flatten({"m": nn.Linear(1, 1)})
    with pytest.raises(TrainError, match=r"m\.weight is on the meta device"):
        targets({"m": nn.Linear(1, 1, device="meta")}, flat.tree, flat.tensors)


def test_the_json_of_thousands_of_tensors_is_written_once_and_changes_with_their_names() -> None:
    model, optimizer = trained(steps=0)
    first = encode_values(flatten({"m": model, "o": optimizer}).tree)
    model(torch.arange(5)).sum().backward()
    optimizer.step()
    flat = flatten({"m": model, "o": optimizer})
    assert flat.tree["m"] is not None and flatten({"m": model, "o": optimizer}).tree["o"]["state"] is flat.tree["o"]["state"]
    assert encode_values(flat.tree) != first and json.loads(encode_values(flat.tree)) == flat.tree
    assert to_node([1, (2,)], "", lambda *_: None) == [1, {"$": "tuple", "items": [2]}]
