"""Pipeline x data parallelism, with tensor parallelism where "tp" is larger than 1: each rank has one or two stages of a replica.

elastirun --nproc-per-node=4 --mesh=dp=auto,pp=2,tp=1 examples/mesh/pipeline.py
elastirun --nproc-per-node=8 --mesh=dp=auto,pp=2,tp=2 examples/mesh/pipeline.py --schedule=ScheduleZBVZeroBubble
"""

from contextlib import ExitStack

import torch
from common import Transformer, arguments, loss_of, split, train
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from elastirun.train import DistributedDataParallel, Stages, build_mesh

MICRO = 2  # micro-batches of a step


def main() -> None:
    args = arguments(__doc__)
    torch.distributed.init_process_group("gloo")
    mesh = build_mesh("dp=auto,pp=2,tp=1", device="cpu")
    kind = getattr(pipelining, args.schedule, None) or getattr(pipelining.schedules, args.schedule)
    own = places(args.schedule, mesh["pp"].get_local_rank(), mesh["pp"].size())
    count = mesh["pp"].size() * len(own)
    parts = [Transformer().stage(number, count) for number in own]
    if mesh["tp"].size() > 1:
        parts = [split(part, mesh["tp"]) for part in parts]
    ddps = [DistributedDataParallel(part, device_mesh=mesh["dp"]) for part in parts]
    group = mesh["pp"].get_group()
    stages = [PipelineStage(ddp, number, count, torch.device("cpu"), group=group) for number, ddp in zip(own, ddps, strict=True)]
    schedule = kind(stages[0] if len(own) == 1 else stages, MICRO * mesh["pp"].size(), loss_fn=loss_of)

    def compute(x: Tensor, targets: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        last = {"target": targets, "losses": losses} if count - 1 in own else {}
        with ExitStack() as unreduced:
            for ddp in ddps:
                unreduced.enter_context(ddp.no_sync())
            schedule.step(*([x] if 0 in own else []), **last)
        for ddp in ddps:
            ddp.reduce()  # the mean over "dp"; in schedules that do not compute the gradients of inputs and weights apart hooks would do
        return torch.stack(losses).mean().detach() if losses else None

    train(args, mesh, mesh["dp"], Stages(*ddps), compute)


def places(schedule: str, rank: int, ranks: int) -> list[int]:
    """Return the numbers of the stages of ``rank``: one, or two for the schedules that need them."""
    if schedule in ("ScheduleGPipe", "Schedule1F1B"):
        return [rank]
    return [rank, 2 * ranks - 1 - rank] if "ZBV" in schedule or "DualPipeV" in schedule else [rank, rank + ranks]


if __name__ == "__main__":
    main()
