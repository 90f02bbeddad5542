"""Sends the state of a run to new ranks a slice at a time, between the steps of those that train.

A new rank makes the same steps without data of its own, so it sees every reduced gradient. A slice has the same elements of a parameter and
of all that the optimizer keeps for it: from then on the new rank's own steps keep them right, because the optimizer treats each element by
itself. What is left (buffers, other parts of the state) and the plain values come last, in one piece; so does all of a state whose
optimizer needs more than single elements.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from elastirun.train.errors import ModelMismatch
from elastirun.train.groups.waits import finish_message
from elastirun.train.state.loading import load, targets
from elastirun.train.state.per_rank import PerRank
from elastirun.train.state.train_state import TrainState
from elastirun.train.state.tree import Flat, flatten
from elastirun.train.state.values import DTYPES, decode_values, encode_values

SLICE = 8 << 20  # bytes of a slice at least: copied within 2 ms, which is what it costs those that train
LARGEST = 256 << 20  # bytes of a slice, of which each rank has a copy; where it is not enough, the state comes at once, without a copy
FLOW = 100_000_000  # bytes for each second that a step takes: where steps are long, so may be the copies
# Those of torch.optim that change each element of a parameter by its own gradient and its own part of the optimizer's state alone.
ELEMENTWISE = "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()
TAG = 0x51CE  # of these messages: the script may send others
TensorRange = tuple[str, int, int]  # elements of a tensor: its name, the first one, and the one after the last


def cut(sizes: Mapping[str, tuple[int, int]], together: Sequence[Sequence[str]], most: int) -> list[list[TensorRange]]:
    """Return slices of at most ``most`` bytes.

    ``sizes``: elements of each tensor, and bytes of one; ``together``: names of tensors of one size, whose elements belong together.
    """
    slices: list[list[TensorRange]] = []
    room = 0
    for names in together:
        count, width = sizes[names[0]][0], sum(sizes[name][1] for name in names)
        at = 0
        while at < count:
            if room < width:
                slices.append([])
                room = max(most, width)
            stop = min(count, at + room // width)
            slices[-1] += [(name, at, stop) for name in names]
            room -= (stop - at) * width
            at = stop
    return slices


def belonging(state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names of each parameter and of what its optimizer keeps for it. Empty if the state cannot come in slices."""
    names = {_memory(tensor): name for name, tensor in tensors.items() if tensor.numel() > 1 and tensor.is_contiguous()}
    together = []
    for optimizer in (part for part in state.values() if isinstance(part, Optimizer)):
        if type(optimizer).__name__ not in ELEMENTWISE or not type(optimizer).__module__.startswith("torch.optim."):
            return []
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            kept = [value for value in optimizer.state.get(param, {}).values() if isinstance(value, Tensor) and value.numel() > 1]
            if any(value.shape != param.shape or _memory(tensor) not in names for value in kept for tensor in (value, param)):
                return []
            if _memory(param) in names:
                together.append([names[_memory(tensor)] for tensor in (param, *kept)])
    return together


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor is, and how many elements it has: a view may begin at the same place."""
    return tensor.data_ptr(), tensor.numel()


def _due(done: int, slices: int, together: bool) -> Sequence[int]:
    """Return the numbers of the pieces that are sent after this step: a slice; if ``together``, what is left comes with the last one."""
    return (done, slices) if done == slices - 1 and together else (done,)


class Sender:
    """Sends the state of this rank to the new ``ranks`` of ``group``.

    ``more``: numbers that they get with it. ``seconds``: how long a step takes. ``pieces``: in so many at most.
    """

    def __init__(
        self, state: TrainState, ranks: Sequence[int], group: dist.ProcessGroup, more: Sequence[float], seconds: float, pieces: int
    ) -> None:
        self._state, self._ranks, self._group, self._limit = state, ranks, group, limit_of(group)
        flat = flatten(_shared(state))
        self._sizes = {name: (tensor.numel(), tensor.element_size()) for name, tensor in flat.tensors.items()}
        together = belonging(state, flat.tensors) if pieces > 1 else []
        self._slices = cut(self._sizes, together, most := max(SLICE, int(FLOW * seconds)))
        while len(self._slices) >= pieces > 1:  # and one more for what is in no slice
            self._slices = cut(self._sizes, together if most < LARGEST else [], most := most + most // 4)
        self._sent = 0
        self._staging = torch.zeros(max((_nbytes(one, self._sizes) for one in self._slices), default=0), dtype=torch.uint8, device="cpu")
        self._under_way: list[tuple[Any, Tensor]] = []  # each with its message, which must stay until then
        rest = _rest(state, flat.tensors, self._slices)
        self._together = _nbytes_of(rest, flat.tensors) <= SLICE  # as it is now: the new ranks cannot know what it will be
        self._begin_text(_described(flat, self._slices, more, rest, self._together))

    @property
    def done(self) -> bool:
        """Whether everything is sent."""
        return self._sent > len(self._slices)

    def go_on(self) -> None:
        """Send the next slice; with the last one, or after it, what is left. Another step may begin while a slice is on its way."""
        self._wait()  # the new ranks have taken part in the last step: they have it
        flat = flatten(_shared(self._state))
        slices = len(self._slices)
        for number in _due(self._sent, slices, self._together):
            if number < slices:
                self._begin_slice(flat, self._slices[number])
            else:
                self._begin_rest(flat, _rest(self._state, flat.tensors, self._slices))
            self._sent += 1

    def finish(self) -> None:
        """Wait for what is on its way. The new ranks have it."""
        self._wait()

    def _begin_slice(self, flat: Flat, part: Sequence[TensorRange]) -> None:
        box, at = self._staging[: _nbytes(part, self._sizes)], 0
        for name, start, stop in part:
            piece = _bytes(flat.tensors[name], start, stop)
            box[at : at + len(piece)] = piece
            at += len(piece)
        self._begin(box)

    def _begin_rest(self, flat: Flat, rest: Sequence[str]) -> None:
        """Send what is in no slice: in a copy, so that another step may change it; much of it as it is, which is waited for."""
        much = _nbytes_of(rest, flat.tensors) > SLICE
        self._begin_text(_described(flat, self._slices, (), rest, self._together))
        for name in rest:
            data = _bytes(flat.tensors[name].contiguous())
            self._begin(data.to("cpu", copy=not much))
        if much:
            self._wait()

    def _begin(self, box: Tensor) -> None:
        self._under_way += [(dist.isend(box, rank, self._group, TAG), box) for rank in self._ranks]

    def _begin_text(self, text: str) -> None:
        data = bytearray(text.encode())
        self._begin(torch.tensor([len(data)], dtype=torch.int64, device="cpu"))
        self._begin(torch.frombuffer(data, dtype=torch.uint8))

    def _wait(self) -> None:
        for work, _ in self._under_way:
            finish_message(work, self._limit)
        self._under_way = []


class Receiver:
    """Takes the state of rank ``source`` of ``group``. ``more``: the numbers that came with it.

    From the beginning the plain values are right, and the optimizer's counts of steps; after each ``go_on`` one slice more.
    """

    def __init__(self, state: TrainState, source: int, group: dist.ProcessGroup) -> None:
        self._state, self._source, self._group, self._limit = state, source, group, limit_of(group)
        self._received = 0
        told = self._receive_values()
        self._slices: list[list[TensorRange]] = [[(name, start, stop) for name, start, stop in one] for one in told["slices"]]
        self.more: list[float] = told["more"]
        self._together: bool = told["together"]
        self._staging = torch.zeros(max((_nbytes(one, self._sizes) for one in self._slices), default=0), dtype=torch.uint8, device="cpu")

    @property
    def done(self) -> bool:
        """Whether the state is whole."""
        return self._received > len(self._slices)

    def go_on(self) -> None:
        """Wait for the next slice; with the last one, or after it, for what is left."""
        slices = len(self._slices)
        for number in _due(self._received, slices, self._together):
            if number < slices:
                self._take_slice(self._slices[number])
            else:
                told = self._receive_values()  # there may be more of it than at the beginning
                for name in told["rest"]:
                    tensor = self._wanted[name]
                    came = self._receive(torch.empty(tensor.nbytes, dtype=torch.uint8, device="cpu"))
                    tensor.detach().copy_(came.view(tensor.dtype).view(tensor.shape))
                self._load(told)
            self._received += 1

    def _take_slice(self, part: Sequence[TensorRange]) -> None:
        box, at = self._receive(self._staging[: _nbytes(part, self._sizes)]), 0
        for name, start, stop in part:
            piece = _bytes(self._wanted[name], start, stop)
            piece.copy_(box[at : at + len(piece)])
            at += len(piece)

    def _receive_values(self) -> dict[str, Any]:
        """Take the plain values, and make the tensors that this rank does not have yet."""
        told = self._receive_text()
        saved = {name: _Saved(DTYPES[dtype], shape) for name, dtype, shape in told["tensors"]}
        tree = decode_values(told["values"].encode("ascii"))
        self._wanted = targets(_shared(self._state), tree, saved)
        if missing := saved.keys() - self._wanted.keys():
            raise ModelMismatch(
                f"the other ranks have {', '.join(sorted(missing)[:3])}, which this script has not made: what it adds while it trains, "
                "such as a group of parameters, it must have before Elastic(...)"
            )
        for name in self._wanted.keys() & told["single"].keys():
            self._wanted[name].detach().fill_(told["single"][name])
        self._load(told)
        self._wanted = targets(_shared(self._state), tree, saved)  # those that are in the state now
        self._sizes = {name: (tensor.numel(), tensor.element_size()) for name, tensor in self._wanted.items()}
        return told

    def _load(self, told: dict[str, Any]) -> None:
        shared = _shared(self._state)
        with torch.no_grad():
            self._state.update(load(shared, decode_values(told["values"].encode("ascii")), self._wanted))

    def _receive(self, box: Tensor) -> Tensor:
        work = dist.irecv(box, self._source, self._group, TAG)
        finish_message(work, self._limit)
        return box

    def _receive_text(self) -> dict[str, Any]:
        size = int(self._receive(torch.zeros(1, dtype=torch.int64, device="cpu")))
        found: dict[str, Any] = json.loads(bytes(self._receive(torch.empty(size, dtype=torch.uint8, device="cpu")).tolist()))
        return found


@dataclass(frozen=True)
class _Saved:
    """The type and the shape of a tensor, for ``targets``."""

    dtype: torch.dtype
    shape: Sequence[int]


def limit_of(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of ``group``. Messages between two ranks need it: theirs is the one with which the connections were made."""
    found: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return found


def _shared(state: TrainState) -> dict[str, Any]:
    """Return the parts of ``state`` that all ranks have alike."""
    return {name: part for name, part in state.items() if not isinstance(part, PerRank)}


def _described(flat: Flat, slices: Sequence[Sequence[TensorRange]], more: Sequence[float], rest: Sequence[str], together: bool) -> str:
    """Return the plain values, the tensors of one element, the names of all tensors, and the pieces they come in, as JSON."""
    tensors = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in flat.tensors.items()]
    single = {name: tensor.item() for name, tensor in flat.tensors.items() if tensor.numel() == 1 and not tensor.is_complex()}
    values = encode_values(flat.tree).decode("ascii")
    pieces = {"slices": slices, "rest": list(rest), "together": together}
    return json.dumps({"values": values, "tensors": tensors, "single": single, "more": list(more), **pieces})


def _rest(state: Mapping[str, Any], tensors: Mapping[str, Tensor], slices: Sequence[Sequence[TensorRange]]) -> list[str]:
    """Return the names of what is in no slice, and of a parameter for which the optimizer keeps more than when the slices were made.

    It has made that from the parameter as it was then, on a new rank perhaps from a part of it.
    """
    sliced = {name for one in slices for name, _, _ in one}
    grown = {name for names in belonging(state, tensors) if not sliced.issuperset(names) for name in names} if sliced else set()
    return sorted(name for name in (tensors.keys() - sliced) | grown if tensors[name].numel())


def _nbytes(part: Sequence[TensorRange], sizes: Mapping[str, tuple[int, int]]) -> int:
    return sum((stop - start) * sizes[name][1] for name, start, stop in part)


def _nbytes_of(names: Sequence[str], tensors: Mapping[str, Tensor]) -> int:
    return sum(tensors[name].nbytes for name in names)


def _bytes(tensor: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
    """Return the memory of some elements of a contiguous tensor. A change of it does not count as one of the tensor."""
    return tensor.detach().data.view(-1)[start:stop].view(torch.uint8)
