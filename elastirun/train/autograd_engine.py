"""Calls into torch's autograd engine. All uses of its private names (with an underscore) are in this file.

``torch_private`` has checked that they are there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge


class Listener(Protocol):
    """Receives the events of a backward. Hooks hold a listener weakly, so that parameters and graphs do not keep it alive."""

    def backward_starts(self) -> None: ...
    def gradient_ready(self, index: int) -> None: ...


def before_backward(outputs: Sequence[Tensor], listener: Listener) -> bool:
    """Call ``listener.backward_starts()`` when a backward reaches one of ``outputs``. Return False if none of them has a graph."""
    ref = weakref.ref(listener)

    def start(_: Any) -> None:
        if (listening := ref()) is not None:
            listening.backward_starts()

    nodes = {output.grad_fn for output in outputs if output.grad_fn is not None}
    for node in nodes:
        node.register_prehook(start)
    return bool(nodes)


def after_accumulation(node: Any, listener: Listener, index: int) -> Any:
    """Call ``listener.gradient_ready(index)`` when ``node`` has added to a parameter's ``grad``. Return a handle with ``remove()``.

    The user's hooks on the parameter (``register_post_accumulate_grad_hook``) have run by then; a hook of that kind would run among them.
    """
    ref = weakref.ref(listener)

    def ready(*_: Any) -> None:
        if (listening := ref()) is not None:
            listening.gradient_ready(index)

    return node.register_hook(ready)


def accumulator(param: nn.Parameter) -> Any:
    """Return the graph node that adds to ``param.grad``, frozen or not. As long as it is referenced, the parameter keeps this node."""
    needed = param.requires_grad
    try:
        return get_gradient_edge(param.requires_grad_(True)).node
    finally:
        param.requires_grad_(needed)


def versions_kept(tensors: Sequence[Tensor]) -> AbstractContextManager[object]:
    """Let the block write to ``tensors`` without a change of their version counters: an earlier forward may have saved them."""
    preserve: Any = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
    try:
        kept: AbstractContextManager[object] = preserve(tuple(tensors))
        return kept
    except AttributeError:  # torch 2.6 takes one tensor at a time
        stack = ExitStack()
        for tensor in tensors:
            stack.enter_context(preserve(tensor))
        return stack


def task() -> int:
    """Return a number for the engine's run under way in this thread; -1 without one."""
    number: int = torch._C._current_graph_task_id()
    return number


def running() -> bool:
    """Return whether this is called from within a backward."""
    return task() != -1


def at_the_end(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward under way (of nested ones: the inner one) is over, unless an exception ends it."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def executes(node: Any) -> bool:
    """Return whether the backward under way will accumulate the gradient that belongs to ``node``."""
    with suppress(RuntimeError):  # autograd.grad was asked for this very gradient: it is captured, not accumulated
        return bool(torch._C._will_engine_execute_node(node))
    return False


def accumulates() -> bool:
    """Return whether the backward under way accumulates gradients; ``autograd.grad`` does not.

    Every graph ends in leaves, and one of them is enough to find out.
    """
    node: Any = torch._C._current_autograd_node()
    while node is not None and node.name() != "torch::autograd::AccumulateGrad":
        node = next((following for following, _ in node.next_functions if following is not None), None)
    return node is None or executes(node)
