"""State dicts: they have torch's names (``module.weight``); loading takes the names of the wrapped module (``weight``), too."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def take_both_forms(wrapper: nn.Module) -> None:
    """Let ``wrapper``, whose only child is called ``module``, load state dicts with and without ``module.`` in their names.

    That holds for the versions of modules in ``_metadata`` as well, and for a wrapper within another module.
    """
    wrapper.register_load_state_dict_pre_hook(_rename)  # type: ignore[no-untyped-call]
    wrapper.register_load_state_dict_post_hook(_restore)  # type: ignore[no-untyped-call]


def _rename(wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Give the names of the wrapper to those keys of ``state`` that begin with ``prefix``. ``state`` is a copy of what the user gave."""
    wrapped = wrapper.get_submodule("module")
    tensors = {name for name, _ in (*wrapped.named_parameters(remove_duplicate=False), *wrapped.named_buffers(remove_duplicate=False))}
    names = [key[len(prefix) :] for key in state if key.startswith(prefix)]
    if _without_prefix(names, tensors):
        values = [state.pop(prefix + name) for name in names]  # all of them first: one module's old name may be another one's new name
        state.update(zip([f"{prefix}module.{name}" for name in names], values, strict=True))
    metadata = getattr(state, "_metadata", None) or _metadata_being_loaded()
    if metadata:
        _rename_versions(wrapper, wrapped, metadata, prefix)


def _rename_versions(wrapper: nn.Module, wrapped: nn.Module, metadata: dict[str, Any], prefix: str) -> None:
    """The same for the versions: ``metadata`` is the user's, so that ``_restore`` gives it back as it was."""
    before = dict(metadata)
    modules = {f".{name}" if name else "" for name, _ in wrapped.named_modules()}
    outer = prefix[:-1]
    found = {name for name in modules if (outer + name).removeprefix(".") in before}
    if len(found) > sum(f"{prefix}module{name}" in before for name in modules):
        wrapper._versions_before = metadata, before  # type: ignore[assignment]
        metadata.update({f"{prefix}module{name}": before[(outer + name).removeprefix(".")] for name in found})


def _restore(wrapper: nn.Module, _: Any) -> None:
    metadata, before = wrapper.__dict__.pop("_versions_before", (None, None))
    if metadata is not None:
        metadata.clear()
        metadata.update(before)


def _without_prefix(names: list[str], known: set[str]) -> bool:
    """Are more of ``names`` known as they are than without ``module.`` at their beginning?"""
    return sum(name in known for name in names) > sum(name.startswith("module.") and name[7:] in known for name in names)


def _metadata_being_loaded() -> dict[str, Any] | None:
    """The ``_metadata`` of the state dict that is being loaded.

    ``load_state_dict`` gives a nested module its own version alone, but its children's versions have to be found, too. So they are taken
    from the variables of the caller, ``nn.Module.load_state_dict``.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_code is not nn.Module.load_state_dict.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else frame.f_locals.get("metadata")
