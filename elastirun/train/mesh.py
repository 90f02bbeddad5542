"""The mesh of a job in its workers: torch's ``DeviceMesh`` in the shape that the launcher gave this round, and what spans it.

docs/parallelism.md has the picture.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastirun.mesh import Mesh
from elastirun.train.arguments import named
from elastirun.train.errors import TrainError, WrongType, WrongUse
from elastirun.train.sharded import is_sharded, local_part, placed_as

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MESH = "ELASTIRUN_MESH"  # names and sizes in this round, set by the agent


def build_mesh(otherwise: str | None = None, *, device: str | None = None) -> DeviceMesh:
    """Return the mesh of this round, in which ``elastirun --mesh`` has laid out the ranks. Every rank calls it.

        mesh = build_mesh("dp=auto,pp=2,tp=4")
        parallelize_module(model, mesh["tp"], plan)
        ddp = DistributedDataParallel(model, device_mesh=mesh["dp"])
        loader = ElasticDataLoader(dataset, 256, device_mesh=mesh["dp"])

    otherwise   the mesh where the launcher was told of none, as under torchrun: dimensions from the outermost to the innermost, one of
                them ``auto``. Default: that is an error
    device      type of the devices; default "cuda" where there is a GPU, else "cpu"

    Makes the default process group if there is none, as torch's ``init_device_mesh`` does. Raises TrainError where the ranks do not fill
    the mesh.
    """
    from torch.distributed.device_mesh import init_device_mesh

    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    text = os.environ.get(MESH, "")
    wanted = None if otherwise is None else _parsed(otherwise)
    if text:
        sizes = _told(text)
        if wanted is not None and wanted.names != tuple(sizes):
            raise WrongUse(f"the launcher has the mesh {text}, and the script wants {otherwise}: give both the same dimensions")
    elif wanted is None:
        raise WrongUse(
            "the launcher was told of no mesh: start with elastirun --mesh=dp=auto,tp=2, or give one, build_mesh('dp=auto,tp=2')"
        )
    elif not wanted.fits(world):
        raise TrainError(
            f"a world of {world} ranks is no multiple of {wanted.unit}, the ranks of one replica of {otherwise}: start a multiple"
        )
    else:
        sizes = dict(zip(wanted.names, wanted.shape(world), strict=True))
    if (number := math.prod(sizes.values())) != world:
        raise TrainError(f"the mesh {text or otherwise} has {number} ranks, and the world {world}: start as many workers as it has")
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _parsed(text: str) -> Mesh:
    try:
        return Mesh.parse(text)
    except (AttributeError, ValueError) as error:
        raise WrongUse(f"build_mesh({text!r}): {error if isinstance(error, ValueError) else 'write a text such as dp=auto,tp=2'}") from None


def _told(text: str) -> dict[str, int]:
    """Return names and sizes in the launcher's ``text``."""
    parts = [part.partition("=") for part in text.split(",")]
    sizes = {name: int(size) for name, _, size in parts if name.isidentifier() and size.isdecimal() and int(size)}
    if len(sizes) != len(parts):
        raise TrainError(f"{MESH}={text} is no mesh such as dp=2,tp=2; the launcher sets it (--mesh): leave it alone, or unset it")
    return sizes


def verify_no_mesh(instead: str) -> None:
    """Raise WrongUse in a job with a mesh of several dimensions, where "all ranks" is no sensible default. ``instead``: what to give."""
    text = os.environ.get(MESH, "")
    if "," in text:
        raise WrongUse(f"this job has the mesh {text}, so ranks may share a replica: give {instead}")


def verify_mesh(mesh: Any) -> None:
    """Raise WrongUse unless ``mesh`` is a DeviceMesh."""
    if not hasattr(mesh, "get_coordinate"):
        raise WrongUse(f"device_mesh has to be a DeviceMesh, such as build_mesh()['dp'], not {named(mesh)}")


def place_in(mesh: DeviceMesh) -> tuple[int, int]:
    """Return the place of this rank among the coordinates of ``mesh``, and their number. Ranks that differ elsewhere only share one."""
    verify_mesh(mesh)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise WrongUse("this rank is not in the device_mesh that was given: load data on its ranks alone")
    place = 0
    for at, size in zip(coordinate, mesh.shape, strict=True):
        place = place * size + at
    return place, mesh.size()


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, *, across: DeviceMesh | None = None
) -> Tensor:
    """Scale the gradients so that their norm over the whole model is at most ``max_norm``; return the norm before, without dimensions.

    As ``torch.nn.utils.clip_grad_norm_``, of which parts of the gradients are on other ranks: those of DTensors on the ranks of their
    mesh, and those of other parameters on the ranks of ``across``, one dimension, such as ``mesh["pp"]`` for the stages of a pipeline.
    Every rank calls it. A weight that two stages have counts twice, and ``mesh["dp"]``, whose ranks have copies, would count all again.
    Raises WrongUse where ``across`` is no single dimension, or one that gradients are DTensors on.
    """
    if across is not None and (not hasattr(across, "get_group") or across.ndim != 1):
        raise WrongUse("across has to be one dimension of a DeviceMesh, such as build_mesh()['pp']")
    if hasattr(parameters, "parameters") or hasattr(parameters, "param_groups"):
        raise WrongType(f"clip_grad_norm_() takes parameters, not {named(parameters)}: give module.parameters()")
    params = [param for param in ([parameters] if isinstance(parameters, Tensor) else parameters) if param.grad is not None]
    kinds: dict[Any, list[Tensor]] = {}  # by the meshes that the gradients are on
    for param in params:
        spec: Any = param
        kinds.setdefault((spec.device_mesh, spec.placements) if is_sharded(param) else None, []).append(param)
    norms = [_norm(kind, each, norm_type, across) for kind, each in kinds.items()]
    device = norms[0].device if norms else torch.device(across.device_type if across is not None else "cpu")
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros((), device=device)
    if across is not None:
        total = _norm_over(across, total, norm_type)
    for each in kinds.values():
        torch.nn.utils.clip_grads_with_norm_(each, max_norm, total)
    return total


def _norm(kind: Any, params: Sequence[Any], norm_type: float, across: DeviceMesh | None) -> Tensor:
    """Return the norm of the gradients of ``params``, which are all on the mesh of ``kind``, or on none."""
    if kind is None:
        return torch.nn.utils.get_total_norm([param.grad for param in params], norm_type)
    mesh, placements = kind
    if across is not None and len({*across.mesh.flatten().tolist()} & {*mesh.mesh.flatten().tolist()}) > 1:
        raise WrongUse("gradients are DTensors on the dimension across, whose parts count already: give the one of the pipeline, or none")
    parts = [local_part(placed_as(param, param.grad)) for param in params]
    filled = [part for part in parts if part.numel()]
    found = torch.nn.utils.get_total_norm(filled, norm_type) if filled else parts[0].new_zeros(())
    for dim, placement in enumerate(placements):
        if placement.is_shard():
            found = _norm_over(mesh[mesh.mesh_dim_names[dim]] if mesh.ndim > 1 else mesh, found, norm_type)
    return found


def _norm_over(mesh: DeviceMesh, norm: Tensor, norm_type: float) -> Tensor:
    """Return the norm of all that the ranks of ``mesh``, one dimension, have, of which ``norm`` is this rank's. Types may differ."""
    if mesh.size() == 1:
        return norm
    everyones = [torch.empty((), dtype=torch.float64, device=norm.device) for _ in range(mesh.size())]
    dist.all_gather(everyones, norm.to(torch.float64), group=mesh.get_group())
    total: Tensor = torch.linalg.vector_norm(torch.stack(everyones), norm_type).to(norm.dtype)
    return total
