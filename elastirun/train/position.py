"""The position of a run, of what a step changes that has no gradients in the end; the undoing of a new worker's first step."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from .data import ElasticDataLoader
from .train_state import TrainState


class Position:
    """The state at the last finished step, of what a step changes that has no gradients in the end: the loader, and a scheduler."""

    def __init__(self, state: TrainState, loader: ElasticDataLoader) -> None:
        self._state, self._loader = state, loader
        self.take()

    def take(self) -> None:
        """Note where the run stands."""
        self._data = self._loader.state_dict()
        scheduler = self._state.get("scheduler")
        self._scheduler = None if scheduler is None else dict(scheduler.state_dict())
        self._options = [] if scheduler is None else [_options(group) for group in self._groups()]

    def restore(self) -> None:
        """Go back to where the run stood."""
        self._loader.load_state_dict(self._data)
        if self._scheduler is not None:
            self._state["scheduler"].load_state_dict(self._scheduler)
            for group, options in zip(self._groups(), self._options, strict=True):
                group.update(options)

    def _groups(self) -> list[dict[str, Any]]:
        return [group for part in self._state.values() if isinstance(part, Optimizer) for group in part.param_groups]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's learning rate and the like."""
    return {name: value for name, value in group.items() if name != "params"}


class Rehearsal:
    """A step that a new worker makes by itself, before it has a state: ``undo`` brings back what was there before."""

    def __init__(self, state: TrainState, model: torch.nn.Module, loader: ElasticDataLoader) -> None:
        self._state, self._model = state, model
        self._position = Position(state, loader)
        self._step = state.step
        self._tensors = [tensor.detach().clone() for tensor in self._here()]

    def undo(self) -> None:
        """Bring the model, the position and the count of steps back. Optimizers keep the memory of their states."""
        with torch.no_grad():
            for tensor, before in zip(self._here(), self._tensors, strict=True):
                tensor.copy_(before)
        self._position.restore()
        self._state.step = self._step

    def forget(self) -> None:
        """Bring all back, and the optimizers as they were before their first step: this worker begins a run, with others like it."""
        self.undo()
        for part in self._state.values():
            if isinstance(part, Optimizer):
                part.state.clear()

    def _here(self) -> list[torch.Tensor]:
        return [*self._model.parameters(), *self._model.buffers()]
