"""Writes one checkpoint as a single file: for ``torch.load``, or as safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, BinaryIO

from elastirun.checkpoint.claims import Published
from elastirun.checkpoint.directory import Directory
from elastirun.checkpoint.record import clip
from elastirun.checkpoint.tensors import MAX_BYTES, NAMES, TENSORS, VALUES, SavedTensor, assemble, decode_tensors, volume
from elastirun.errors import CheckpointError

SAFETENSORS = ".safetensors"
FOR_TORCH = ("", ".pt", ".pth", ".bin", ".ckpt")  # other ends of names: a file for torch.load
_SAFE = "float64 F64 float32 F32 float16 F16 bfloat16 BF16 float8_e4m3fn F8_E4M3 float8_e5m2 F8_E5M2 complex64 C64 bool BOOL"
_SAFE += " int64 I64 int32 I32 int16 I16 int8 I8 uint64 U64 uint32 U32 uint16 U16 uint8 U8"
SAFE_NAMES = dict(zip(_SAFE.split()[::2], _SAFE.split()[1::2], strict=True))  # torch's types by the names that safetensors has for them


def export_file(place: Directory, found: Published, to: str) -> str:
    """Write the checkpoint ``found`` as the new file ``to``; return one line about it. Raises ``CheckpointError`` and OSError."""
    folder, (_, suffix) = os.path.dirname(to), os.path.splitext(to)
    if suffix not in (SAFETENSORS, *FOR_TORCH):
        forms = f"{SAFETENSORS} for safetensors; {', '.join(FOR_TORCH[1:])} or nothing for a file of torch.save"
        raise CheckpointError(f"{to}: the form {suffix} is not known; the name may end in {forms}")
    if not os.path.isdir(folder or "."):
        raise CheckpointError(f"{to} cannot be made: there is no folder {folder}")
    if os.path.lexists(to):
        raise CheckpointError(f"{to} exists already: choose another name")
    for damage in place.verify(found, look="sha256"):
        raise CheckpointError(f"{place.path}/{found.name} is damaged, and is not exported: {damage}")
    try:
        tensors = decode_tensors(place.read(found, TENSORS, MAX_BYTES), NAMES)
    except CheckpointError as error:
        raise CheckpointError(f"{place.file(found, TENSORS)}: {error}") from None
    partial = f"{to}.{os.getpid()}.partial"
    try:
        with open(partial, "xb") as file:
            left_out = _write_safetensors(file, place, found, tensors) if to.endswith(SAFETENSORS) else _save(file, place, found, tensors)
            file.flush()
            os.fsync(file.fileno())
        os.rename(partial, to)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise
    return f"{to}: {found.name}, {len(tensors)} tensors, {os.path.getsize(to)} bytes{left_out}"


def _write_safetensors(file: BinaryIO, place: Directory, found: Published, tensors: Mapping[str, SavedTensor[str]]) -> str:
    """Write the tensors by name: the header's length, the header (JSON), the data of one tensor after the other."""
    assert found.commit
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "step": str(found.commit.step)}}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in SAFE_NAMES:
            raise CheckpointError(f"the tensor {clip(name)} has the type {tensor.dtype}, which safetensors does not have")
        start, end = end, end + sum(chunk.nbytes for chunk in tensor.chunks)
        header[name] = {"dtype": SAFE_NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        file.write(assemble(tensor, lambda name: place.content(found, name)))
    return "; other values are left out"


def _save(file: BinaryIO, place: Directory, found: Published, tensors: Mapping[str, SavedTensor[str]]) -> str:
    """Write the whole state with torch.save. Tensors that share their memory still do."""
    import torch

    from elastirun.train.state.values import decode_values, to_value

    made: dict[SavedTensor[str], torch.Tensor] = {}

    def tensor(name: str) -> torch.Tensor:
        if name not in tensors:
            raise CheckpointError(f"{place.file(found, VALUES)} refers to a tensor {clip(name)}, which {TENSORS} does not have")
        saved = tensors[name]
        if saved not in made:
            dtype = getattr(torch, saved.dtype, None)
            if not isinstance(dtype, torch.dtype) or any(
                chunk.nbytes != dtype.itemsize * volume(chunk.box.sizes) for chunk in saved.chunks
            ):
                raise CheckpointError(f"the tensor {clip(name)} is of type {clip(saved.dtype)}, which this torch does not have")
            data = assemble(saved, lambda file: place.content(found, file))
            made[saved] = (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).reshape(saved.shape)
        return made[saved]

    left_out: list[Any] = []
    tree = _without_ranks(decode_values(place.read(found, VALUES, MAX_BYTES)), left_out)
    torch.save(to_value(tree, "", tensor), file)
    return f"; {len(left_out)} values that each rank has its own of are None" if left_out else ""


def _without_ranks(node: Any, left_out: list[Any]) -> Any:
    """Return a tree of values with None for those per rank, and with tensors for arrays, so that every torch loads it."""
    if isinstance(node, list):
        return [_without_ranks(each, left_out) for each in node]
    if not isinstance(node, dict):
        return node
    if node.get("$") == "array":
        return {"$": "tensor"}
    if node.get("$") == "per_rank":
        left_out.append(node)
        return None
    return {key: _without_ranks(each, left_out) for key, each in node.items()}
