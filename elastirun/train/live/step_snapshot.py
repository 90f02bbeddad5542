"""The position of a run, of what a step changes that has no gradients in the end; the undoing of a new worker's first step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elastirun.train.data.loader import ElasticDataLoader
from elastirun.train.errors import WrongUse
from elastirun.train.live.state_copy import StateKept
from elastirun.train.state.per_rank import PerRank
from elastirun.train.state.train_state import TrainState


class StepSnapshot:
    """The state at the last finished step, of what a step changes that has no gradients in the end: the loader, and schedulers.

    ``others``: the names of other parts that such a step may change, such as averages of the parameters.
    """

    def __init__(self, state: TrainState, loader: ElasticDataLoader) -> None:
        self._loader = loader
        self._optimizers = [part for value in state.values() for part in _leaves(value) if isinstance(part, Optimizer)]
        named = [(name, part) for name, value in state.items() for part in _leaves(value) if hasattr(part, "state_dict")]
        self._schedulers = [part for name, part in named if name == "scheduler" or isinstance(part, LRScheduler)]
        kept = {id(part) for part in (loader, *self._optimizers, *self._schedulers)}
        others = [name for name, part in state.items() if name not in ("step", "model") and id(part) not in kept]
        self.others = [name for name in others if not isinstance(state[name], PerRank)]
        self._state = state
        self._kept = {name: list(_leaves(value)) for name, value in state.items() if name != "step" and name not in others}
        self._global_batch = loader.global_batch_size  # of the whole training
        self._groups_of = [len(optimizer.param_groups) for optimizer in self._optimizers]
        self._parameters = self._count_parameters()
        self.take()

    def verify(self) -> None:
        """Raise WrongUse if the script has changed what a worker that comes later would have as it was at first."""
        for name, parts in self._kept.items():
            if [id(part) for part in _leaves(self._state.get(name))] != [id(part) for part in parts]:
                raise WrongUse(f"{name!r} in the state was replaced after Elastic(...), which goes on with the first: keep that one")
        if self._loader.global_batch_size != self._global_batch:
            raise WrongUse(
                f"the loader's global_batch_size was changed from {self._global_batch} to {self._loader.global_batch_size} after "
                "Elastic(...): a worker that comes later would not know. Give the loader one size for the whole training"
            )
        if (count := self._count_parameters()) != self._parameters:
            raise WrongUse(
                f"the model had {self._parameters} parameters when Elastic(...) was made, and has {count} now: nobody reduces those "
                "that came since, and a worker that comes later has none of them. Make all layers before; requires_grad says which train"
            )
        self.verify_groups()

    def verify_groups(self) -> None:
        """Raise WrongUse if an optimizer has other groups of parameters than at first."""
        for optimizer, before in zip(self._optimizers, self._groups_of, strict=True):
            if (count := len(optimizer.param_groups)) != before:
                raise WrongUse(
                    f"{type(optimizer).__name__} had {before} param_groups when Elastic(...) was made, and has {count} now: "
                    "a worker that comes later would have the first ones. Give it all groups before; requires_grad says which train"
                )

    def take(self, with_others: bool = False) -> None:
        """Note where the run stands. ``with_others``: ``restore`` brings ``others`` back, too, of which this makes a copy."""
        self._kept_others = StateKept(self._state, self.others) if with_others else None
        self._data = self._loader.state_dict()
        self._rates = [dict(scheduler.state_dict()) for scheduler in self._schedulers]
        self._options = [_options(group) for group in self._groups()] if self._schedulers else []
        self._marks = {name: _mark(self._state[name]) for name in self.others}

    def restore(self) -> None:
        """Go back to where the run stood."""
        self._loader.load_state_dict(self._data)
        for scheduler, rates in zip(self._schedulers, self._rates, strict=True):
            scheduler.load_state_dict(rates)
        for group, options in zip(self._groups() if self._schedulers else (), self._options, strict=True):
            for name, value in options.items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(name), torch.Tensor):
                    group[name].copy_(value)  # a compiled step reads this very tensor
                else:
                    group[name] = value
        if self._kept_others is not None:
            self._kept_others.put_back(self._state)

    @property
    def changed(self) -> list[str]:
        """Return which of ``others`` have changed since the last ``take``, as far as their tensors and numbers show."""
        return [name for name in self.others if _mark(self._state[name]) != self._marks[name]]

    def _count_parameters(self) -> int:
        modules = (part for parts in self._kept.values() for part in parts if isinstance(part, torch.nn.Module))
        return sum(1 for module in modules for _ in module.parameters())

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's learning rate and the like. A learning rate may be a tensor, which schedulers change in place."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in group.items() if name != "params"}


def _mark(value: Any) -> list[object]:
    """Return what is another list when tensors in ``value`` were changed in place, or plain values in it replaced."""
    found: list[object] = []
    for leaf in _leaves(value):
        if isinstance(leaf, torch.nn.Module):
            found += _mark([*leaf.parameters(), *leaf.buffers()])
        elif isinstance(leaf, torch.Tensor):
            found.append((id(leaf), 0 if leaf.is_inference() else leaf._version))
        elif isinstance(leaf, (int, float, str)):
            found.append(leaf)
    return found


def _leaves(value: Any) -> Iterator[Any]:
    """Yield ``value``, or what is in it if it is a list, a tuple or a dict."""
    if isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _leaves(part)
    else:
        yield value


class Rehearsal:
    """A step that a new worker makes by itself, before it has a state: ``undo`` brings back what was there before."""

    def __init__(self, state: TrainState, model: torch.nn.Module, loader: ElasticDataLoader) -> None:
        self._state, self._model = state, model
        self._position = StepSnapshot(state, loader)
        self._step = state.step
        self._others = StateKept(state, self._position.others)
        self._trained = [param.requires_grad for param in model.parameters()]
        self._tensors = {name: tensor.detach().clone() for name, tensor in self._here()}

    def undo(self) -> None:
        """Bring the model, the position and the count of steps back. Optimizers keep the memory of their states.

        A buffer that the step has made, or made larger, stays as it is: it is as those of the others are, who have trained.
        """
        with torch.no_grad():
            for name, tensor in self._here():
                before = self._tensors.get(name)
                if before is not None and before.shape == tensor.shape:
                    tensor.copy_(before)
        self._position.restore()
        self._state.step = self._step

    def train_as_before(self) -> None:
        """Train the parameters that the script trains, not those of the others that this rank was to join."""
        for param, trained in zip(self._model.parameters(), self._trained, strict=True):
            param.requires_grad_(trained)

    def forget(self) -> None:
        """Bring all back, and the optimizers as they were before their first step: this worker begins a run, with others like it."""
        self.undo()
        self._others.put_back(self._state)
        for part in (leaf for value in self._state.values() for leaf in _leaves(value)):
            if isinstance(part, Optimizer):
                part.state.clear()

    def _here(self) -> Iterator[tuple[str, torch.Tensor]]:
        return chain(self._model.named_parameters(), self._model.named_buffers())
