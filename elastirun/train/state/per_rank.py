"""Values of which every rank has its own, for example the state of its random numbers."""

from __future__ import annotations

import base64
import ctypes
import json
from typing import Any

import torch
from torch import Tensor

from elastirun.checkpoint.record import clip, number, parse
from elastirun.errors import CheckpointError
from elastirun.train.sharded import is_sharded
from elastirun.train.state.values import DTYPES, check_node, to_node, to_value

LIMIT = 64 << 20  # bytes; larger values belong into sharded tensors
SMALLEST = 1024  # bytes; sizes are powers of two, so that a few more digits do not change the plan of a checkpoint's files


class PerRank:
    """Marks a value of which every rank has its own, for example the state of its random numbers.

    ``value``: plain values, small tensors, or an object with ``state_dict`` and ``load_state_dict``. A rank that the checkpoint does not
    know keeps the value that it has.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def as_tensor(self, path: str) -> Tensor:
        """Return the value as the bytes of JSON, with spaces at the end. Raises ``CheckpointError`` if it is too large."""
        tensors: dict[str, Tensor] = {}
        value = self.value.state_dict() if is_stateful(self.value) else self.value
        node = to_node(value, "", tensors.__setitem__)
        if any(map(is_sharded, tensors.values())):
            raise CheckpointError(f"{path}: a sharded tensor is no value per rank: put it into the state as it is")
        plain = {"value": node, "tensors": {name: _spell(tensor) for name, tensor in tensors.items()}}
        try:
            data = json.dumps(plain, separators=(",", ":"), allow_nan=False).encode("ascii")
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: a checkpoint cannot hold this value: {clip(str(error))}") from None
        if len(data) > LIMIT:
            raise CheckpointError(f"{path}: a value per rank has {len(data)} bytes, of {LIMIT} at most")
        size = max(SMALLEST, 1 << (len(data) - 1).bit_length())
        return torch.frombuffer(bytearray(data.ljust(size)), dtype=torch.uint8)

    def take_tensor(self, path: str, tensor: Tensor) -> None:
        """Set the value to what ``as_tensor`` has spelled. Raises ``CheckpointError``."""
        try:
            plain = parse(_bytes(tensor), 2 * LIMIT)
            tensors = {name: _read(spelled) for name, spelled in plain["tensors"].items()}
            check_node(plain["value"])
            value = to_value(plain["value"], "", tensors.__getitem__)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: the checkpoint's value for this rank cannot be read: {clip(str(error))}") from None
        if is_stateful(self.value):
            self.value.load_state_dict(value)
        else:
            self.value = value


def is_stateful(value: object) -> bool:
    """Return whether ``value`` is an object that says what its state is and takes it back, and not a class."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict") and not isinstance(value, type)


def _bytes(tensor: Tensor) -> bytes:
    whole = tensor.detach().cpu().contiguous()
    return ctypes.string_at(whole.data_ptr(), whole.nbytes) if whole.nbytes else b""


def _spell(tensor: Tensor) -> dict[str, Any]:
    kind = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": kind, "shape": list(tensor.shape), "base64": base64.b64encode(_bytes(tensor)).decode()}


def _read(spelled: dict[str, Any]) -> Tensor:
    kind, shape = DTYPES[spelled["dtype"]], [number(size) for size in spelled["shape"]]
    data = bytearray(base64.b64decode(spelled["base64"], validate=True))
    return torch.frombuffer(data, dtype=kind).reshape(shape) if data else torch.empty(shape, dtype=kind)
