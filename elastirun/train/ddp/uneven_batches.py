"""Batches of ranks that have different numbers of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from elastirun.train.errors import WrongUse

if TYPE_CHECKING:
    from elastirun.train.ddp.module import DistributedDataParallel

T = TypeVar("T")


def take_batches(ddp: DistributedDataParallel, data: Iterable[T], samples: Callable[[T], float] | None) -> Iterator[T | None]:
    """Yield this rank's batches, then None as long as another rank has some; see ``DistributedDataParallel.batches``."""
    if hasattr(data, "steps"):
        raise WrongUse(f"batches() reads one batch ahead, which {type(data).__name__} would count as consumed: use its steps(ddp)")
    end, source = object(), iter(data)
    ddp._reducer.local_report.read_first()
    batch: Any = next(source, end)
    try:
        while True:
            following = end if batch is end else next(source, end)
            weight = 1.0 if samples is None or batch is end else float(samples(batch))
            ddp._reducer.local_report.announce_batch(weight, more=following is not end)
            step = ddp._reducer.step
            if batch is not end:
                yield batch
            if ddp._reducer.step == step and (batch is end or ddp._reducer.schedule.always_reduces):
                ddp.skip()
                if ddp.agreement.with_data == 0:
                    return
                if batch is end:
                    yield None
            if not ddp.agreement.more:
                return
            batch = following
    finally:
        ddp._reducer.local_report.announce_batch(1.0, more=False)
