"""Sends the state of a run to new ranks a slice at a time, between the steps of those that train.

A new rank makes the same steps without data of its own, so it sees every reduced gradient. A slice has the same elements of a parameter and
of all that the optimizer keeps for it: from then on the new rank's own steps keep them right, because the optimizer treats each element by
itself. What is left (buffers, other parts of the state) and the plain values come last, in one piece; so does all of a state whose
optimizer needs more than single elements.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from elastirun.checkpoint.tensors import SavedTensor
from elastirun.train.errors import ModelMismatch
from elastirun.train.groups.waits import finish_message, limit_of
from elastirun.train.live.slice_memory import TAG, SliceMemory
from elastirun.train.state.loading import load, targets
from elastirun.train.state.per_rank import PerRank
from elastirun.train.state.train_state import TrainState
from elastirun.train.state.tree import Flat, flatten
from elastirun.train.state.values import DTYPES, decode_values, encode_values
from elastirun.train.zero.sharded_optimizer import is_elementwise

UNIT = 4 << 20  # bytes that are copied between two looks at the clock, within a millisecond; each slice has at least so many
LARGEST = 256 << 20  # bytes of a slice, of which each rank has a copy; where it is not enough, the state comes at once, without a copy
# The time that a slice may cost those that train: so many seconds, or this part of a step, where that is more.
SECONDS, PART = 0.012, 0.05
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
        if not is_elementwise(type(optimizer)):
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


def _rest_is_due(is_slice: bool, together: bool) -> bool:
    """Return whether what is in no unit comes after this step. ``is_slice``: the last units do; ``together``: the rest comes with them."""
    return together or not is_slice


class Sender:
    """Sends the state of this rank to the new ``ranks`` of ``group``, in slices that take as long as ``SECONDS`` and ``PART`` say.

    ``more``: numbers that they get with it. ``seconds``: how long a step takes. ``pieces``: in so many at most. ``memory``: for the
    slices; the ranks ``near`` have mapped it.
    """

    def __init__(
        self,
        state: TrainState,
        ranks: Sequence[int],
        group: dist.ProcessGroup,
        more: Sequence[float],
        seconds: float,
        pieces: int,
        memory: SliceMemory,
        near: Collection[int],
    ) -> None:
        self._state, self._ranks, self._group, self._memory = state, ranks, group, memory
        self._far = [rank for rank in ranks if rank not in near]
        self._limit = limit_of(group)
        flat = flatten(_shared(state))
        self._sizes = {name: (tensor.numel(), tensor.element_size()) for name, tensor in flat.tensors.items()}
        self._units = cut(self._sizes, belonging(state, flat.tensors) if pieces > 1 else [], UNIT)
        self._sent = 0  # units; one more, when what is in no unit is sent, too
        self._left = pieces - 1  # slices at most: what is in no unit comes after them
        if self._least * UNIT > LARGEST:
            self._units = []
        self._seconds = max(SECONDS, PART * seconds)  # that a slice may take
        self._most = UNIT if self._far else LARGEST  # bytes of the next slice; a connection may be slow, so it is measured first
        self._took: list[Tensor] = []  # seconds that the last slice took, as this rank and the new ones have measured
        self._bytes = 0  # of the last slice
        self._under_way: list[tuple[Any, Tensor]] = []  # each with its message, which must stay until then
        rest = _rest(state, flat.tensors, self._units)
        self._together = _nbytes_of(rest, flat.tensors) <= UNIT  # as it is now: the new ranks cannot know what it will be
        self._begin_text(_described(flat, self._units, more, rest, self._together))

    @property
    def done(self) -> bool:
        """Whether everything is sent."""
        return self._sent > len(self._units)

    @property
    def _least(self) -> int:
        """Return how many units the next slice has at least, so that all come in time."""
        return max(1, -(-(len(self._units) - self._sent) // max(1, self._left)))

    def go_on(self) -> None:
        """Send the next slice; with the last one, or after it, what is left. Another step may begin while a slice is on its way."""
        if self._sent:
            self._wait()  # the new ranks have taken part in the last step: they have it
        flat = flatten(_shared(self._state))
        is_slice = self._sent < len(self._units)
        if is_slice:
            self._begin_slice(flat)
        if self._sent == len(self._units) and _rest_is_due(is_slice, self._together):
            self._begin_rest(flat, _rest(self._state, flat.tensors, self._units))
            self._sent += 1

    def _begin_slice(self, flat: Flat) -> None:
        begun, least, first, at = time.monotonic(), self._sent + self._least, self._sent, 0
        if self._took:
            self._most = min(LARGEST, max(UNIT, int(self._bytes * self._seconds / max(float(max(self._took)), 1e-6))))
        for unit in self._units[first:]:
            size = _nbytes(unit, self._sizes)
            if self._sent >= least and (at + size > self._most or time.monotonic() - begun > self._seconds):
                break
            self._memory.allocate(at + size)
            for name, start, stop in unit:
                piece = _bytes(flat.tensors[name], start, stop)
                self._memory.data[at : at + len(piece)] = piece
                at += len(piece)
            self._sent += 1
            self._memory.say_written(self._sent)
        self._memory.end_slice()
        self._left -= 1
        for rank in self._far:
            self._begin(torch.tensor([self._sent - first], dtype=torch.int64, device="cpu"), [rank])
            self._begin(self._memory.data[:at], [rank])
        self._bytes = at
        self._took = [torch.tensor([time.monotonic() - begun], dtype=torch.float64, device="cpu")]
        for rank in self._ranks:
            self._took.append(box := torch.zeros(1, dtype=torch.float64, device="cpu"))
            self._under_way.append((dist.irecv(box, rank, self._group, TAG), box))

    def _begin_rest(self, flat: Flat, rest: Sequence[str]) -> None:
        """Send what is in no unit: in a copy, so that another step may change it; much of it as it is, which is waited for."""
        self._begin_text(_described(flat, [], (), rest, self._together))
        pieces = [_bytes(flat.tensors[name].contiguous()).cpu() for name in rest]
        if _nbytes_of(rest, flat.tensors) <= UNIT:
            self._begin(torch.cat([torch.empty(0, dtype=torch.uint8, device="cpu"), *pieces]), self._ranks)
            return
        for piece in pieces:
            self._begin(piece, self._ranks)
        self._wait()

    def finish(self) -> None:
        """Wait for what is on its way. The new ranks have it."""
        self._wait()
        self._memory.give_back()

    def _begin(self, box: Tensor, ranks: Sequence[int]) -> None:
        self._under_way += [(dist.isend(box, rank, self._group, TAG), box) for rank in ranks]

    def _begin_text(self, text: str) -> None:
        data = bytearray(text.encode())
        self._begin(torch.tensor([len(data)], dtype=torch.int64, device="cpu"), self._ranks)
        self._begin(torch.frombuffer(data, dtype=torch.uint8), self._ranks)

    def _wait(self) -> None:
        for work, _ in self._under_way:
            finish_message(work, self._limit)
        self._under_way = []


class Receiver:
    """Takes the state of rank ``source`` of ``group``. ``more``: the numbers that came with it.

    From the beginning the plain values are right, and the optimizer's counts of steps; after each ``go_on`` one slice more.
    """

    def __init__(self, state: TrainState, source: int, group: dist.ProcessGroup, memory: SliceMemory | None) -> None:
        self._state, self._source, self._group, self._limit = state, source, group, limit_of(group)
        self._memory = memory  # of the source; None: slices come through ``group``
        self._received = 0  # units; one more, when what is in no unit has come, too
        told = self._receive_values()
        self._units: list[list[TensorRange]] = [[(name, start, stop) for name, start, stop in one] for one in told["units"]]
        self.more: list[float] = told["more"]
        self._together: bool = told["together"]

    @property
    def done(self) -> bool:
        """Whether the state is whole."""
        return self._received > len(self._units)

    def go_on(self) -> None:
        """Wait for the next slice; with the last one, or after it, for what is left."""
        is_slice = self._received < len(self._units)
        if is_slice:
            self._take_slice()
        if self._received == len(self._units) and _rest_is_due(is_slice, self._together):
            told = self._receive_values()  # there may be more of it than at the beginning
            self._take_rest([self._wanted[name].detach() for name in told["rest"]])
            self._load(told)
            self._received += 1

    def _take_slice(self) -> None:
        """Take the next slice, and tell the sender how long that took."""
        begun, at = math.inf, 0
        if self._memory is not None:
            data, units = self._memory.data, self._memory.units(self._received, self._limit.total_seconds())
        else:
            stop = self._received + int(self._receive(torch.zeros(1, dtype=torch.int64, device="cpu")))
            begun, units = time.monotonic(), iter(range(self._received, stop))
            size = sum(_nbytes(unit, self._sizes) for unit in self._units[self._received : stop])
            data = self._receive(torch.empty(size, dtype=torch.uint8, device="cpu"))
        for number in units:
            begun = min(begun, time.monotonic())
            for name, start, stop in self._units[number]:
                piece = _bytes(self._wanted[name], start, stop)
                piece.copy_(data[at : at + len(piece)])
                at += len(piece)
            self._received = number + 1
        took = torch.tensor([time.monotonic() - begun], dtype=torch.float64, device="cpu")
        self._answer = dist.isend(took, self._source, self._group, TAG), took  # both stay until the next one

    def _take_rest(self, tensors: Sequence[Tensor]) -> None:
        """Take what is in no unit: in one message, unless it is much."""
        sizes = [tensor.nbytes for tensor in tensors]
        messages = [sum(sizes)] if sum(sizes) <= UNIT else sizes
        came = [self._receive(torch.empty(size, dtype=torch.uint8, device="cpu")) for size in messages]
        for tensor, data in zip(tensors, came if messages is sizes else torch.split(came[0], sizes), strict=True):
            tensor.copy_(data.clone().view(tensor.dtype).view(tensor.shape))  # a copy is aligned

    def _receive_values(self) -> dict[str, Any]:
        """Take the plain values, and make the tensors that this rank does not have yet."""
        told = self._receive_text()
        saved = {name: SavedTensor(DTYPES[dtype], tuple(shape), ()) for name, dtype, shape in told["tensors"]}
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
        finish_message(dist.irecv(box, self._source, self._group, TAG), self._limit)
        return box

    def _receive_text(self) -> dict[str, Any]:
        size = int(self._receive(torch.zeros(1, dtype=torch.int64, device="cpu")))
        found: dict[str, Any] = json.loads(bytes(self._receive(torch.empty(size, dtype=torch.uint8, device="cpu")).tolist()))
        return found


def _shared(state: TrainState) -> dict[str, Any]:
    """Return the parts of ``state`` that all ranks have alike."""
    return {name: part for name, part in state.items() if not isinstance(part, PerRank)}


def _described(flat: Flat, units: Sequence[Sequence[TensorRange]], more: Sequence[float], rest: Sequence[str], together: bool) -> str:
    """Return the plain values, the tensors of one element, the names of all tensors, and the pieces they come in, as JSON."""
    tensors = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in flat.tensors.items()]
    single = {name: tensor.item() for name, tensor in flat.tensors.items() if tensor.numel() == 1 and not tensor.is_complex()}
    values = encode_values(flat.tree).decode("ascii")
    pieces = {"units": units, "rest": list(rest), "together": together}
    return json.dumps({"values": values, "tensors": tensors, "single": single, "more": list(more), **pieces})


def _rest(state: Mapping[str, Any], tensors: Mapping[str, Tensor], units: Sequence[Sequence[TensorRange]]) -> list[str]:
    """Return the names of what is in no slice, and of a parameter for which the optimizer keeps more than when the slices were made.

    It has made that from the parameter as it was then, on a new rank perhaps from a part of it.
    """
    sliced = {name for one in units for name, _, _ in one}
    grown = {name for names in belonging(state, tensors) if not sliced.issuperset(names) for name in names} if sliced else set()
    return sorted(name for name in (tensors.keys() - sliced) | grown if tensors[name].numel())


def _nbytes(part: Sequence[TensorRange], sizes: Mapping[str, tuple[int, int]]) -> int:
    return sum((stop - start) * sizes[name][1] for name, start, stop in part)


def _nbytes_of(names: Sequence[str], tensors: Mapping[str, Tensor]) -> int:
    return sum(tensors[name].nbytes for name in names)


def _bytes(tensor: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
    """Return the memory of some elements of a contiguous tensor. A change of it does not count as one of the tensor."""
    return tensor.detach().data.view(-1)[start:stop].view(torch.uint8)
