"""Small checkpoints for tests: their files in an image, and a save of them without a writer process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from elastirun.checkpoint.directory import Claim, Directory
from elastirun.checkpoint.image import PAGE, Description, Image, round_up
from elastirun.checkpoint.record import Commit, FileSum

FENCE = "store:{}"


def content(step: int, size: int = PAGE + 100) -> dict[str, bytes]:
    """The files of a checkpoint of ``step``, which differ from those of every other step."""
    return {"__0_0.distcp": (b"%08d" % step) * (size // 8), "tensors.json": b'{"step":%d}' % step, "empty": b""}


def image_for(description: Description) -> Image:
    """Return an empty image for the files of ``description``, with room for it. The product's own sum needs torch: ``staging.py``."""
    return Image.create(max(at + size for at, size in description.files.values()) + 2 * PAGE)


def image_of(step: int, save: int = 1, files: Mapping[str, bytes] | None = None) -> Image:
    """A complete image with the files of ``step``."""
    files = content(step) if files is None else files
    places, at = {}, PAGE
    for name, data in files.items():
        places[name] = (at, len(data))
        at = round_up(at + len(data))
    description = Description(save, step, "", 0, 0, 1, places, tuple(files))
    image = image_for(description)
    for name, data in files.items():
        image.memory[places[name][0] : places[name][0] + len(data)] = data
    image.finish(description)
    return image


def commit_of(step: int, sequence: int, files: Mapping[str, FileSum], round: int = 0) -> Commit:
    return Commit(step, sequence, FENCE.format(round) if round else "", round, 1, 1.5e9, files)


def claimed(directory: Directory, fence: str) -> Claim:
    """Claim and clean ``directory``, as rank 0 and its writer do when a round begins."""
    claim = directory.claim(fence, yes)
    directory.backend.clean(claim.name)
    return claim


def yes() -> bool:
    """The round is current."""
    return True


def stage(directory: Directory, claim: str, step: int, sequence: int) -> Commit:
    """Write the files of ``step`` aside; return the commit to publish."""
    files = {name: directory.backend.write(claim, step, name, memoryview(data)) for name, data in content(step).items()}
    directory.backend.sync(claim, step)
    return commit_of(step, sequence, files)


def save(directory: Directory, claim: str, step: int, sequence: int, keep: int = 2, current: Callable[[], bool] = yes) -> str:
    """Write, publish and prune as a writer does; return the name of the published folder."""
    name = directory.publish(claim, stage(directory, claim, step, sequence), current)
    directory.prune(claim, keep)
    return name


def entries(path: Path | str) -> list[str]:
    return sorted(os.listdir(path))
