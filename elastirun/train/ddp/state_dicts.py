"""State dicts: saved with torch's names (``module.weight``), loaded with those or with the names of the wrapped module (``weight``)."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def take_both_forms(wrapper: nn.Module) -> None:
    """Let ``wrapper``, whose only child is called ``module``, load state dicts with and without ``module.`` in their names.

    The versions of modules in ``_metadata`` are found as well, also for a wrapper within another module.
    """
    wrapper.register_load_state_dict_pre_hook(_rename)  # type: ignore[no-untyped-call]
    wrapper.register_load_state_dict_post_hook(_restore)  # type: ignore[no-untyped-call]


def _rename(wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Give the wrapper's names to the keys of ``state`` that begin with ``prefix``. ``state`` is a copy of the user's dict."""
    wrapped = wrapper.get_submodule("module")
    tensors = {name for name, _ in (*wrapped.named_parameters(remove_duplicate=False), *wrapped.named_buffers(remove_duplicate=False))}
    names = [key[len(prefix) :] for key in state if key.startswith(prefix)]
    if _without_prefix(names, tensors):
        values = [state.pop(prefix + name) for name in names]  # first all: an old name may be a new one
        state.update(zip([f"{prefix}module.{name}" for name in names], values, strict=True))
    metadata = getattr(state, "_metadata", None) or _metadata_being_loaded()
    if metadata:
        _rename_versions(wrapper, wrapped, metadata, prefix)


def _rename_versions(wrapper: nn.Module, wrapped: nn.Module, metadata: dict[str, Any], prefix: str) -> None:
    """Give the wrapper's names to the versions. ``metadata`` belongs to the user, so ``_restore`` undoes the change."""
    before = dict(metadata)
    modules = {f".{name}" if name else "" for name, _ in wrapped.named_modules()}
    outer = prefix[:-1]
    found = {name for name in modules if (outer + name).removeprefix(".") in before}
    if len(found) > sum(f"{prefix}module{name}" in before for name in modules):
        wrapper._versions_before = metadata, before  # type: ignore[assignment]
        metadata.update({f"{prefix}module{name}": before[(outer + name).removeprefix(".")] for name in found})


def _restore(wrapper: nn.Module, _: Any) -> None:
    """Make the user's metadata what they were before ``_rename_versions``."""
    metadata, before = wrapper.__dict__.pop("_versions_before", (None, None))
    if metadata is not None:
        metadata.clear()
        metadata.update(before)


def _without_prefix(names: list[str], known: set[str]) -> bool:
    """Return whether more of ``names`` are in ``known`` as they are than without ``module.`` at their beginning."""
    return sum(name in known for name in names) > sum(name.startswith("module.") and name[7:] in known for name in names)


def _metadata_being_loaded() -> dict[str, Any] | None:
    """Return the ``_metadata`` of the state dict that is being loaded.

    ``load_state_dict`` gives a nested module only its own version, but the versions of its children are needed, too. So the metadata are
    taken from the variables of the caller, ``nn.Module.load_state_dict``.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_code is not nn.Module.load_state_dict.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else frame.f_locals.get("metadata")
