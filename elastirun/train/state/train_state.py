"""``TrainState``: what a run is, in one object that a ``Checkpointer`` saves and restores.

See docs/checkpoints.md.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from elastirun.train.arguments import named, verify_type, whole
from elastirun.train.errors import WrongType
from elastirun.train.state.per_rank import PerRank, is_stateful


class TrainState(dict[str, Any]):
    """A dict of everything that a run needs to go on as if it had never stopped.

        run = TrainState(model=ddp, optimizer=optimizer, data=loader)
        checkpoints.restore(run)
        ...
            optimizer.step()
            run.step += 1
            checkpoints.save(run.step, run)

    model, optimizer   a module and what steps it, as they are, wrapped or not
    scheduler, data    None, or what has ``state_dict`` and ``load_state_dict``, such as an ``ElasticDataLoader``
    rng                save each rank's random numbers (torch on CPU and GPU, ``random``), too; a rank that the checkpoint does not know
                       keeps its own. Default: True
    more               other parts of the state, and plain values

    ``step``: finished steps of the optimizer; 0 in a new run. Raises TrainError for parts that have no state.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, scheduler: Any = None, data: Any = None, rng: bool = True, **more: Any
    ) -> None:
        verify_type(model, nn.Module, "model", "a torch.nn.Module")
        whole("step", more.get("step", 0), 0)
        optional = {"scheduler": scheduler, "data": data}
        parts = {"optimizer": optimizer, **{name: part for name, part in optional.items() if part is not None}}
        for name, part in parts.items():
            if isinstance(part, nn.Module) or not (is_stateful(part) or isinstance(part, Mapping | list | tuple)):
                like = ", as an ElasticDataLoader has" * (name == "data")
                raise WrongType(f"{name} must have state_dict() and load_state_dict(){like}, not be {named(part)}")
        super().__init__(step=0, model=model, **parts)
        if rng:
            self["rng"] = PerRank(RandomNumbers())
        self.update(more)

    @property
    def step(self) -> int:
        """Return the number of finished steps."""
        return int(self["step"])

    @step.setter
    def step(self, value: int) -> None:
        self["step"] = whole("step", value, 0)


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
