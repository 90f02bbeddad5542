"""``TrainState``: what a run is, in one object that a ``Checkpointer`` saves and restores.

See docs/checkpoints.md.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from elastirun.train.state.per_rank import PerRank


class TrainState(dict[str, Any]):
    """A dict of everything that a run needs to go on as if it had never stopped.

        run = TrainState(model=ddp, optimizer=optimizer, data=loader)
        checkpoints.restore(run)
        ...
            optimizer.step()
            run.step += 1
            checkpoints.save(run.step, run)

    model, optimizer   as they are, wrapped or not
    scheduler, data    None, or what has ``state_dict`` and ``load_state_dict``, such as an ``ElasticDataLoader``
    rng                save each rank's random numbers (torch on CPU and GPU, ``random``), too; a rank that the checkpoint does not know
                       keeps its own. Default: True
    more               other parts of the state, and plain values

    ``step``: finished steps of the optimizer; 0 in a new run.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, scheduler: Any = None, data: Any = None, rng: bool = True, **more: Any
    ) -> None:
        super().__init__(step=0, model=model, optimizer=optimizer)
        optional = {"scheduler": scheduler, "data": data, "rng": PerRank(RandomNumbers()) if rng else None}
        self.update({name: part for name, part in optional.items() if part is not None})
        self.update(more)

    @property
    def step(self) -> int:
        """Return the number of finished steps."""
        return int(self["step"])

    @step.setter
    def step(self, value: int) -> None:
        self["step"] = value


class RandomNumbers:
    """The state of this process's random number generators: torch's on the CPU and on the current GPU, and Python's."""

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"cpu": torch.get_rng_state(), "python": random.getstate()}
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["cpu"])
        random.setstate(state["python"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
