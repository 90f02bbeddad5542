"""``ShardedOptimizer``: an optimizer whose state is spread over the ranks of a data-parallel module (ZeRO-1).

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, stage 1. See docs/parallelism.md.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from elastirun.train.arguments import named
from elastirun.train.ddp.module import DistributedDataParallel
from elastirun.train.errors import TrainError, WrongUse
from elastirun.train.groups.collectives import gather_text
from elastirun.train.sharded import TensorPart, is_sharded, local_part, with_part
from elastirun.train.state.layout import local_box
from elastirun.train.state.values import DTYPES
from elastirun.train.zero.gathering import Gathering
from elastirun.train.zero.rows import Rows, Shape, cut

# Those of torch.optim that change each element of a parameter by its own gradient and its own part of the optimizer's state alone.
ELEMENTWISE = "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()
_Kind = tuple[torch.dtype, torch.device]
ADVICE = "make the module and the optimizer anew, and restore the checkpoint"


def is_elementwise(kind: type) -> bool:
    """Return whether optimizers of this class treat each element by itself, as those of torch in ``ELEMENTWISE``."""
    return kind.__name__ in ELEMENTWISE and kind.__module__.startswith("torch.optim.")


class ShardedOptimizer(Optimizer):
    """Keeps the state of ``kind`` for 1/W of the parameters of ``ddp`` on each of its W ranks, with the result of ``kind`` alone.

        ddp = DistributedDataParallel(model)
        optimizer = ShardedOptimizer(ddp, torch.optim.AdamW, lr=1e-3, fused=True)

    ddp       a DistributedDataParallel of elastirun. Every rank makes the optimizer, and steps it, at the same point
    kind      a class of torch.optim that treats each element by itself: AdamW, Adam, SGD, RMSprop, … (``ELEMENTWISE``)
    params    parameters, or groups of them, all of ``ddp``; default: all that are trained
    options   those of ``kind``

    After each backward the gradients are whole on every rank, as without it: clipping, GradScaler and schedulers need no change. ``step``
    changes the rows of this rank and gives them to the others. The parameters have the same bits as with ``kind`` alone, also with
    ``fused`` and at any number of ranks; memory for AdamW is 2/W of the parameters' in place of 2, and some MiB for the exchange.

    ``state_dict()`` has torch's form with this rank's part of the state; a ``Checkpointer`` saves the parts of all ranks as one optimizer,
    which any number of ranks restores, with ``kind`` alone, too. ``full_state_dict()`` is whole on every rank. Not with ``Elastic``: a lost
    rank takes its part along, so the job goes on from a checkpoint. Raises TrainError for wrong arguments, and in another world.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        kind: Callable[..., Optimizer],
        params: Iterable[Any] | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(ddp, DistributedDataParallel):
            raise WrongUse(f"ShardedOptimizer needs elastirun.train.DistributedDataParallel(module), not {named(ddp)}")
        if not hasattr(kind, "__name__"):  # no class and no function
            raise WrongUse(f"kind must be the class of an optimizer, such as torch.optim.AdamW, not {named(kind)}")
        if not (isinstance(kind, type) and is_elementwise(kind)):
            raise WrongUse(f"{kind.__name__} may need more than single elements of a parameter: {', '.join(ELEMENTWISE)} can be sharded")
        whole = kind([param for param in ddp.parameters() if param.requires_grad] if params is None else params, **options)
        world = ddp._reducer.world
        self._ddp, self._transport, self._ranks, self._rank = ddp, world.transport, world.size, world.rank
        self._rows: dict[Tensor, Rows] = {}  # of this rank, by parameter
        self._views: dict[Tensor, Tensor] = {}  # of these rows: the parameters of the optimizer within
        self._shares: list[list[tuple[Tensor, Rows]]] = [[] for _ in range(self._ranks)]  # of each rank
        self._gatherings: list[Gathering] = []
        super().__init__(whole.param_groups, whole.defaults)
        _verify(self._all_params(), ddp)
        self._share_out()
        own = [[self._views[param] for param in group["params"] if param in self._views] for group in self.param_groups]
        self._within = kind([{**group, "params": views} for group, views in zip(self.param_groups, own, strict=True)], **options)

    def _all_params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _share_out(self) -> None:
        """Decide which rank has which rows, and prepare the exchange. Every rank does it at the same point."""
        kinds: dict[_Kind, list[Tensor]] = {}
        for param in self._all_params():
            kinds.setdefault((param.dtype, param.device), []).append(param)
        for params in kinds.values():
            for share, pieces in zip(self._shares, cut([_shape(local_part(param)) for param in params], self._ranks), strict=True):
                share += [(params[rows.param], rows) for rows in pieces]
        for param, rows in self._shares[self._rank]:
            self._rows[param], self._views[param] = rows, _rows_of(local_part(param).detach(), rows)
        self._gatherings = list(self._gatherings_of({param: local_part(param).detach() for param in self._all_params()}))
        self._places = [local_part(param).data_ptr() for param in self._all_params()]

    def _gatherings_of(self, tensors: Mapping[Tensor, Tensor]) -> Iterator[Gathering]:
        """Yield what exchanges ``tensors``, each as large as this rank's part of its parameter. Every rank calls it at the same point."""
        kinds: dict[_Kind, list[list[Tensor]]] = {}
        for rank, share in enumerate(self._shares if self._ranks > 1 else ()):
            for param, rows in share:
                if (tensor := tensors.get(param)) is not None:
                    flat = kinds.setdefault((tensor.dtype, tensor.device), [[] for _ in range(self._ranks)])
                    flat[rank].append(_flat(_rows_of(tensor, rows)))
        for each in kinds.values():
            yield Gathering(each, self._transport, self._rank)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's rows, and exchange them with the other ranks. Every rank calls it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check()
        for group, own in zip(self.param_groups, self._within.param_groups, strict=True):
            own.update((name, value) for name, value in group.items() if name != "params")
        for param, view in self._views.items():
            view.grad = None if param.grad is None else _rows_of(local_part(param.grad), self._rows[param])
        try:
            self._within.step()
        finally:
            for view in self._views.values():
                view.grad = None
        for gathering in self._gatherings:
            gathering.run()
        return loss

    def _check(self) -> None:
        """Raise TrainError where the rows are not those of the module any more."""
        if self._ddp._reducer.world.transport is not self._transport:
            raise TrainError(f"the module is in another world than this ShardedOptimizer: {ADVICE}")
        if [local_part(param).data_ptr() for param in self._all_params()] != self._places:
            raise TrainError(f"a parameter has other memory than when this ShardedOptimizer was made: {ADVICE}")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; only while the optimizer is made."""
        if self._views:
            raise TrainError("a ShardedOptimizer takes all parameters when it is made: give groups as params")
        super().add_param_group(param_group)

    # -- the state --------------------------------------------------------------------------------------------------------

    def has_part(self, param: Tensor) -> bool:
        """Return whether this rank keeps state for ``param``."""
        return param in self._views

    def empty_part(self, param: Tensor, dtype: torch.dtype) -> Tensor:
        """Return an empty tensor for the state of this rank's rows of ``param``."""
        return self._part(param, torch.empty_like(self._views[param], dtype=dtype))

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """Return the state by parameter, as far as this rank has it; tensors of rows are ``TensorPart``."""
        return defaultdict(dict, self.parts())

    @state.setter
    def state(self, value: Any) -> None:
        """Do nothing: torch's class sets an empty one."""

    def parts(self) -> dict[Tensor, dict[str, Any]]:
        """Return the state by parameter, as far as this rank has it."""
        return {
            param: self._described(param, self._within.state[view]) for param, view in self._views.items() if view in self._within.state
        }

    def _described(self, param: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        view = self._views[param]
        return {
            name: self._part(param, value) if isinstance(value, Tensor) and param.dim() and value.shape == view.shape else value
            for name, value in state.items()
        }

    def _part(self, param: Tensor, local: Tensor) -> Tensor:
        box, _ = local_box("", param)
        first = self._rows[param].start
        return TensorPart(local, param.shape, [box.offsets[0] + first, *box.offsets[1:]]) if param.dim() else local

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's form, as far as this rank has it: tensors of rows are ``TensorPart``."""
        index = {param: at for at, param in enumerate(self._all_params())}
        groups = [{**group, "params": [index[param] for param in group["params"]]} for group in self.param_groups]
        return {"state": {index[param]: state for param, state in self.parts().items()}, "param_groups": groups}

    def full_state_dict(self) -> dict[str, Any]:
        """Return the whole state, as ``kind`` alone would have it. Every rank calls it, after the same step."""
        params, found = self._all_params(), self.parts()
        own = {at: _spell(found[param]) for at, param in enumerate(params) if param in found}
        everyones = gather_text(json.dumps(own), self._ddp.process_group, params[0].device)
        told = {int(at): state for text in everyones for at, state in json.loads(text).items()}
        state = {at: {name: _read(*spelled) for name, spelled in told[at].items()} for at in sorted(told)}
        for name in sorted({name for each in told.values() for name in each}):
            having = [at for at, each in told.items() if name in each and each[name][0] in DTYPES and each[name][1] is None]
            whole = {params[at]: torch.empty_like(local_part(params[at].detach()), dtype=state[at][name].dtype) for at in sorted(having)}
            for param in whole.keys() & found.keys():
                _rows_of(whole[param], self._rows[param]).copy_(local_part(found[param][name]))
            for gathering in self._gatherings_of(whole):
                gathering.run()
            for at in having:
                state[at][name] = with_part(params[at].detach(), whole[params[at]])
        return {**self.state_dict(), "state": state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this rank's part of ``state_dict``, which may be whole, as of ``kind`` alone, or have parts as ``state_dict()``.

        Raises TrainError for other groups, and for another rank's part.
        """
        params, saved_groups = self._all_params(), state_dict["param_groups"]
        if [len(group["params"]) for group in saved_groups] != [len(group["params"]) for group in self.param_groups]:
            raise TrainError(
                "the state has other groups than this ShardedOptimizer, or other numbers of parameters in them: make both alike"
            )
        self._verify_own(params, state_dict["state"])
        taken = {
            params[at]: {name: self._own_rows(params[at], value) for name, value in state.items()}
            for at, state in state_dict["state"].items()
            if params[at] in self._views
        }
        views = [group["params"] for group in self._within.param_groups]
        index = {view: at for at, view in enumerate(chain.from_iterable(views))}
        groups = [{**saved, "params": [index[view] for view in own]} for saved, own in zip(saved_groups, views, strict=True)]
        self._within.load_state_dict({"state": {index[self._views[p]]: state for p, state in taken.items()}, "param_groups": groups})
        for group, own in zip(self.param_groups, self._within.param_groups, strict=True):
            group.update((name, value) for name, value in own.items() if name != "params")

    def _verify_own(self, params: Sequence[Tensor], states: Mapping[int, Mapping[str, Any]]) -> None:
        """Raise TrainError for parts of tensors that are other ranks'."""
        for at, state in states.items():
            for value in state.values():
                if isinstance(value, TensorPart):
                    own = self._part(params[at], self._views[params[at]]) if params[at] in self._views else None
                    if not isinstance(own, TensorPart) or (own.offsets, own.local.shape) != (value.offsets, value.local.shape):
                        raise TrainError("this is the state of another rank's part: save full_state_dict(), or use a Checkpointer")

    def _own_rows(self, param: Tensor, value: Any) -> Any:
        if not isinstance(value, Tensor) or not param.dim() or tuple(value.shape) != tuple(param.shape):
            return value
        if isinstance(value, TensorPart):
            return value.local.clone()
        rows, local = self._rows[param], local_part(value)
        if is_sharded(param) and not is_sharded(value):
            box, _ = local_box("", param)
            for dim, (begin, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                local = local.narrow(dim, begin, size)
        return _rows_of(local, rows).clone()  # not a view: the whole would stay in memory


def _verify(params: Sequence[Tensor], ddp: DistributedDataParallel) -> None:
    """Raise WrongUse for parameters that are not trained by ``ddp``, or have sparse gradients."""
    trained = {id(param) for param in ddp._reducer.params}
    if any(id(param) not in trained for param in params):
        raise WrongUse("ShardedOptimizer has a parameter that is frozen, or not of ddp: leave it out, or all params")
    if ddp._reducer.parts.planner.sparse:
        raise WrongUse("a gradient of the module is sparse, of which there are no rows: use sparse=False")


def _shape(param: Tensor) -> Shape:
    """Return the rows of a parameter. It is not cut where these are not in one piece of memory."""
    rows = param.shape[0] if param.dim() else 1
    width = param.numel() // rows if rows else 0
    return Shape(rows if width else 0, width, whole=param.dim() > 0 and rows > 1 and param.stride(0) != width)


def _rows_of(tensor: Tensor, rows: Rows) -> Tensor:
    return tensor[rows.start : rows.stop] if tensor.dim() else tensor


def _flat(part: Tensor) -> Tensor:
    """Return the memory of ``part``, flat."""
    numbers = torch.view_as_real(part) if part.is_complex() else part
    order = sorted(range(numbers.dim()), key=numbers.stride, reverse=True)
    try:
        return numbers.permute(order).view(-1)
    except RuntimeError:
        raise WrongUse(f"a parameter of shape {list(part.shape)} has gaps in its memory: give ShardedOptimizer a copy of it") from None


def _spell(state: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Return a parameter's state as JSON has it: of tensors with rows the type alone."""
    found: dict[str, tuple[str, Any]] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            number = None if value.dim() else value.item()
            found[name] = str(value.dtype).removeprefix("torch."), [number.real, number.imag] if isinstance(number, complex) else number
        else:
            found[name] = type(value).__name__, value
    return found


def _read(kind: str, value: Any) -> Any:
    if kind not in DTYPES:
        return value
    if value is None:
        return torch.empty(0, dtype=DTYPES[kind])
    return torch.tensor(complex(*value) if isinstance(value, list) else value, dtype=DTYPES[kind])
