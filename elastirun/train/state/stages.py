"""``Stages``: the stages of a pipeline that one rank has, as one module with the names of the whole model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from elastirun.errors import CheckpointError
from elastirun.train.arguments import verify_type
from elastirun.train.state.names import plain_names


class Stages(nn.Module):
    """The stages of a pipeline that this rank has, to be saved and restored as its part of one model.

        parts = [stage_0, stage_5]                  # modules, wrapped or not
        model = Stages(*parts)
        run = TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()))

    Tensors keep the names that they have in their stage, without those of wrappers. So each stage has to name its layers as the whole
    model does, for example ``layers.4.up.weight``: a checkpoint of all ranks is then one of the whole model, and fits any other number
    of stages, or a single process. Raises CheckpointError for a name that two stages have. It has no ``forward``.
    """

    def __init__(self, *parts: nn.Module) -> None:
        for part in parts:
            verify_type(part, nn.Module, "each part of Stages(*parts)", "a torch.nn.Module")
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def _names(self, keep_vars: bool) -> Iterator[tuple[nn.Module, list[tuple[str, str]], Mapping[str, Any]]]:
        """Yield each part, the name in the whole model and in the part of its tensors, and its state dict."""
        seen: set[str] = set()
        for part in self.parts:
            own = part.state_dict(keep_vars=keep_vars)
            names = list(zip(plain_names(part, list(own)), own, strict=True))
            if twice := sorted(name for name, _ in names if name in seen):
                raise CheckpointError(f"two stages have {twice[0]}: let each name its layers as the whole model does")
            seen.update(name for name, _ in names)
            yield part, names, own

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return the tensors of all parts by their names in the whole model."""
        found: Any = OrderedDict() if destination is None else destination
        versions = getattr(found, "_metadata", OrderedDict())
        for part, names, own in self._names(keep_vars):
            found.update((prefix + name, own[key]) for name, key in names)
            versions.update((prefix + name, layer) for name, layer in _layers(part, own).items())
        found._metadata = versions  # as torch's state dicts have it
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Give each part its own. ``strict``: it has to be all there. What no part has is left out."""
        versions = getattr(state_dict, "_metadata", {})
        for part, names, own in self._names(keep_vars=False):
            given = OrderedDict((key, state_dict[name]) for name, key in names if name in state_dict)
            layers = zip(getattr(own, "_metadata", {}).items(), _layers(part, own), strict=True)
            given._metadata = {key: versions.get(name, layer) for (key, layer), name in layers}  # type: ignore[attr-defined]
            part.load_state_dict(given, strict, assign)


def _layers(part: nn.Module, own: Any) -> dict[str, Any]:
    """Return what torch notes of each layer of ``part``, such as its version, by the layer's name in the whole model."""
    layers = getattr(own, "_metadata", {})
    return dict(zip(plain_names(part, list(layers)), layers.values(), strict=True))
