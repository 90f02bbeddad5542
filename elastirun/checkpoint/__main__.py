"""The command ``elastirun checkpoint``: lists, verifies, shows and exports the checkpoints in a directory.

Bad input ends in one line on stderr and exit status 2; damage that ``verify`` finds, in exit status 1; no checkpoint, in 4,
as with ``elastirun status`` and ``report``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import click

from elastirun.checkpoint.claims import Published, is_step_name
from elastirun.checkpoint.directory import Directory, open_directory
from elastirun.checkpoint.export import export_file
from elastirun.checkpoint.record import clip, parse
from elastirun.checkpoint.tensors import MAX_BYTES, NAMES, TENSORS, VALUES, decode_tensors
from elastirun.errors import CheckpointError, NothingFound

DAMAGED, BAD_INPUT, NOTHING_FOUND = 1, 2, 4  # exit statuses
MAX_DEPTH = 200  # containers within containers; deeper ones are shown as JSON
TAG = "$"  # of what JSON does not have, see elastirun/train/state/values.py
UNITS = ("B", "kB", "MB", "GB", "TB")
AGES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))

_T = TypeVar("_T")
_DIR = click.argument("directory", metavar="DIR")
_STEP = click.option("--step", type=click.IntRange(0), help="The newest checkpoint of this step; without it the newest of all.")


@click.group(no_args_is_help=False)
def command() -> None:
    """List, verify, show and export the checkpoints in DIR: a directory, a URL of fsspec, or one checkpoint's own folder."""


@command.command()
@_DIR
def ls(directory: str) -> None:
    """List the checkpoints, the newest first. A missing or truncated file is found; "verify" reads every byte."""
    place, found = _scan(directory)
    if not found:
        raise NothingFound(f"{place.path} has no checkpoints")
    rows = [("NAME", "STEP", "SEQUENCE", "AGE", "SIZE", "FILES", "WORLD SIZE", "STATE")]
    for one in found:
        state = next((str(damage) for damage in place.verify(one, look="size")), "complete")
        if one.commit is None:
            rows.append((one.name, *"-" * 6, state))
            continue
        commit = one.commit
        size, age = _size(sum(file.size for file in commit.files.values())), _age(time.time() - commit.time)
        rows.append((one.name, str(commit.step), str(commit.sequence), age, size, str(len(commit.files)), str(commit.world_size), state))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@command.command()
@_DIR
@click.option("--step", type=click.IntRange(0), help="Only checkpoints of this step; without it all.")
def verify(directory: str, step: int | None) -> None:
    """Compare every file with its size and checksum. The exit status is 1 if a checkpoint is damaged."""
    place, found = _scan(directory)
    chosen = [one for one in found if step is None or (one.commit and one.commit.step == step)]
    if not chosen:
        raise NothingFound(f"{place.path} has no checkpoint{'s' if step is None else f' of step {step}'}")
    damaged = False
    for one in chosen:
        damages = [str(damage) for damage in place.verify(one, look="sha256")]
        for text in damages or ["whole"]:
            click.echo(f"{one.name}: {text}")
        damaged = damaged or bool(damages)
    if damaged:
        sys.exit(DAMAGED)


@command.command()
@_DIR
@_STEP
def show(directory: str, step: int | None) -> None:
    """Show the record, the tensors and the values of one checkpoint."""
    place, one = _choose(directory, step)
    tensors = _read(place, one, TENSORS, lambda data: decode_tensors(data, NAMES))
    values = _read(place, one, VALUES, lambda data: parse(data, MAX_BYTES))
    commit = one.commit
    assert commit
    when = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(commit.time))
    click.echo(f"{one.name}: step {commit.step}, sequence {commit.sequence}, {when}")
    click.echo(f"published by round {commit.round} ({commit.fence or 'no agent'}), world size {commit.world_size}")
    for name, file in sorted(commit.files.items()):
        click.echo(f"file    {name}  {_size(file.size)}  sha256 {file.sha256}")
    for name, tensor in tensors.items():
        files = sorted({chunk.file for chunk in tensor.chunks})
        size = _size(sum(chunk.nbytes for chunk in tensor.chunks))
        click.echo(f"tensor  {clip(name, 1000)}  {tensor.dtype} {list(tensor.shape)}  {size}  {', '.join(files)}")
    for path, value in _leaves(values, ""):
        click.echo(f"value   {clip(path, 1000)} = {clip(value, 200)}")


@command.command()
@_DIR
@_STEP
@click.option("--to", required=True, metavar="FILE", help="The file to make, which must not exist yet.")
def export(directory: str, step: int | None, to: str) -> None:
    """Write one checkpoint as a single file.

    FILE.safetensors gets the tensors by name. FILE.pt (also .pth, .bin, .ckpt or no ending) gets the whole state, as torch.save writes it.
    """
    place, one = _choose(directory, step)
    click.echo(export_file(place, one, to))


def _scan(path: str) -> tuple[Directory, list[Published]]:
    """Return the directory, and what is published there. ``path`` may also be the folder of one checkpoint. Raises ``CheckpointError``."""
    if not path:
        raise CheckpointError("DIR is empty; give a path")
    folder, _, name = path.rstrip("/").rpartition("/")
    single = is_step_name(name)
    place = open_directory((folder or ("/" if path.startswith("/") else ".")) if single else path)
    try:
        found = [one for one in place.scan() if not single or one.name == name]
    except OSError as error:
        raise CheckpointError(f"{place.path}: {error.strerror or error}") from None
    if not found and not place.exists():
        raise CheckpointError(f"{place.path} does not exist")
    return place, found


def _choose(path: str, step: int | None) -> tuple[Directory, Published]:
    """Return the newest checkpoint with a record, or the newest of ``step``. Raises ``CheckpointError`` and ``NothingFound``."""
    place, found = _scan(path)
    chosen = next((one for one in found if one.commit and step in (None, one.commit.step)), None)
    if chosen is None:
        steps = ", ".join(str(one.commit.step) for one in found[:20] if one.commit)
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise NothingFound(f"{place.path} has {which}" + (f"; it has those of {steps}" if steps else ""))
    return place, chosen


def _read(place: Directory, found: Published, name: str, decode: Callable[[bytes], dict[str, _T]]) -> dict[str, _T]:
    """Return the content of a file that the record names, if it is whole. Raises ``CheckpointError``."""
    assert found.commit
    if name not in found.commit.files:
        raise CheckpointError(f"{place.file(found, name)} is no part of this checkpoint: another program has written it")
    for damage in place.verify(found, {name}, "sha256"):
        raise CheckpointError(f"{place.path}/{found.name} is damaged: {damage}")
    data = place.read(found, name, MAX_BYTES)
    try:
        return decode(data)
    except CheckpointError as error:
        raise CheckpointError(f"{place.file(found, name)}: {error}") from None


def _leaves(node: Any, path: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield (path, text) of each value in the tree of values.json; tensors have been shown."""
    if _tag(node) in ("tensor", "array"):
        return
    children = _children(node) if depth < MAX_DEPTH else None
    if children is None:
        yield path, _text(node)
        return
    for key, each in children:
        yield from _leaves(each, f"{path}.{key}" if path else str(key), depth + 1)


def _tag(node: Any) -> Any:
    """Return the tag of a node; None if JSON has what the node stands for."""
    return node.get(TAG) if isinstance(node, dict) else None


def _items(node: Any) -> Any:
    """Return what a node contains, without its tag."""
    if _tag(node) is None:
        return node
    items = node.get("items")
    if _tag(node) == "dict" and isinstance(items, list):
        return {str(pair[0]): pair[1] for pair in items if isinstance(pair, list) and len(pair) == 2}
    return items


def _children(node: Any) -> list[tuple[Any, Any]] | None:
    """Return (key, node) of what is shown on lines of its own; None if ``node`` takes one line, as a list of numbers does."""
    items = _items(node)
    if isinstance(items, dict) and (items or _tag(node) is None):
        return list(items.items())
    if isinstance(items, list) and any(isinstance(each, (dict, list)) for each in items):
        return list(enumerate(items))
    return None


def _text(node: Any) -> str:
    """Return a node on one line: as JSON, after its tag if it has one."""
    if _tag(node) is None:
        return json.dumps(node)
    return f"{_tag(node)} {json.dumps(node.get('value', _items(node)))}"


def _size(size: float) -> str:
    unit = 0
    while size >= 1000 and unit < len(UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {UNITS[unit]}" if size < 1000 else f"{size:.0f} {UNITS[unit]}"


def _age(seconds: float) -> str:
    return next((f"{seconds / unit:.0f} {name}" for unit, name in AGES if seconds >= unit), "0 s")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit. ``argv`` is without the program's name; None: ``sys.argv``."""
    try:
        command.main(None if argv is None else list(argv), prog_name="elastirun checkpoint", standalone_mode=False)
    except click.ClickException as error:
        _fail(f"{error.format_message()} (see elastirun checkpoint --help)")
    except CheckpointError as error:
        _fail(str(error))
    except NothingFound as error:
        _fail(str(error), NOTHING_FOUND)
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    sys.exit(0)


def _fail(line: str, status: int = BAD_INPUT) -> NoReturn:
    click.echo(f"elastirun checkpoint: {clip(line, 1000)}", err=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
