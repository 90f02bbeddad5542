"""The mesh of a job in its workers: torch's ``DeviceMesh`` in the shape that the launcher gave this round, and what spans it.

docs/parallelism.md has the picture.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastirun.mesh import Mesh
from elastirun.train.errors import TrainError, WrongUse
from elastirun.train.sharded import is_sharded

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
    if text:
        sizes = {name: int(size) for name, _, size in (part.partition("=") for part in text.split(","))}
    elif otherwise is None:
        raise WrongUse(
            "the launcher was told of no mesh: start with elastirun --mesh=dp=auto,tp=2, or give one, build_mesh('dp=auto,tp=2')"
        )
    else:
        sizes = _sizes(otherwise, world)
    number = 1
    for size in sizes.values():
        number *= size
    if number != world:
        raise TrainError(f"the mesh {text or otherwise} has {number} ranks, and the world {world}")
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _sizes(text: str, world: int) -> dict[str, int]:
    try:
        mesh = Mesh.parse(text)
    except ValueError as error:
        raise WrongUse(f"{text}: {error}") from None
    if not mesh.fits(world):
        raise TrainError(f"a world of {world} ranks is no multiple of {mesh.unit}, the ranks of one replica of {text}")
    return dict(zip(mesh.names, mesh.shape(world), strict=True))


def verify_no_mesh(instead: str) -> None:
    """Raise WrongUse in a job with a mesh of several dimensions, where "all ranks" is no sensible default. ``instead``: what to give."""
    text = os.environ.get(MESH, "")
    if "," in text:
        raise WrongUse(f"this job has the mesh {text}, so ranks may share a replica: give {instead}")


def place_in(mesh: DeviceMesh) -> tuple[int, int]:
    """Return the place of this rank among the coordinates of ``mesh``, and their number. Ranks that differ elsewhere only share one."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise WrongUse("this rank is not in the device_mesh that was given")
    place = 0
    for at, size in zip(coordinate, mesh.shape, strict=True):
        place = place * size + at
    return place, mesh.size()


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, *, across: DeviceMesh | None = None
) -> Tensor:
    """Scale the gradients so that their norm over the whole model is at most ``max_norm``; return the norm before.

    As ``torch.nn.utils.clip_grad_norm_``, of which parts of the gradients are on other ranks: those of DTensors on the ranks of their
    mesh, and those of other parameters on the ranks of ``across``, one dimension, such as ``mesh["pp"]`` for the stages of a pipeline.
    Every rank calls it. A weight that two stages have counts twice.
    """
    kinds: dict[Any, list[Tensor]] = {}
    for param in [parameters] if isinstance(parameters, Tensor) else parameters:
        grad: Any = param.grad
        if grad is not None:
            kinds.setdefault((grad.device_mesh, grad.placements) if is_sharded(grad) else None, []).append(param)
    norms = [_whole(torch.nn.utils.get_total_norm([param.grad for param in each], norm_type)) for each in kinds.values()]  # type: ignore[misc]
    device = norms[0].device if norms else torch.device(across.device_type if across is not None else "cpu")
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros((), device=device)
    if across is not None and across.size() > 1:
        everyones = [torch.empty_like(total) for _ in range(across.size())]
        dist.all_gather(everyones, total, group=across.get_group())
        total = torch.linalg.vector_norm(torch.stack(everyones), norm_type)
    for each in kinds.values():
        torch.nn.utils.clip_grads_with_norm_(each, max_norm, total)
    return total


def _whole(norm: Any) -> Tensor:
    found: Tensor = norm.full_tensor() if is_sharded(norm) else norm
    return found
