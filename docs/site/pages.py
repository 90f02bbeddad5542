"""Writes what a site is built from: the pages of the repository, as they are, and an API reference. python docs/site/pages.py build/docs

The site has the layout of the repository, so relative links lead to the same files in both. A file of source text that a page links to
gets a page of its own, which shows its text; a folder, one that lists its files.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[#)])")
FENCE = re.compile(r"^```.*?^```", re.S | re.M)
PAGES = ("*.md", "docs/**/*.md", "benchmarks/*.md", "deploy/*.md")
SHOWN = {".svg", ".png", ".json"}  # suffixes of files that browsers show; all others get a page
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".sbatch": "bash", ".service": "ini"}

# The API reference: by page, its introduction and its names. Each name of ``elastirun.train.__all__`` is on one page.
TRAIN = "elastirun.train"
API = {
    "launch": (
        "Starting workers from Python",
        "[Frameworks and notebooks](../frameworks.md) has examples.",
        ["elastirun.launch", *(f"elastirun.errors.{name}" for name in ("ElastirunError", "UsageError", "StartError", "JobFailed"))],
    ),
    "ddp": (
        "Data-parallel training",
        "[Data-parallel training](../ddp.md) goes through the cases.",
        [f"{TRAIN}.DistributedDataParallel", f"{TRAIN}.Agreement"],
    ),
    "data": (
        "Data",
        "[Data](../data.md) explains both modes.",
        [f"{TRAIN}.{name}" for name in ("ElasticDataLoader", "ElasticShards", "DeterministicShards", "keyed_rng")],
    ),
    "checkpoints": (
        "Checkpoints",
        "[Checkpoints](../checkpoints.md) has the picture.",
        [f"{TRAIN}.{name}" for name in ("Checkpointer", "TrainState", "PerRank", "Stages", "load_checkpoint")],
    ),
    "mesh": (
        "Meshes",
        "[Meshes](../parallelism.md) explains `--mesh`.",
        [f"{TRAIN}.{name}" for name in ("build_mesh", "clip_grad_norm_", "ShardedOptimizer")],
    ),
    "worker": (
        "Steps, stops and the current round",
        "[The environment of a worker](../worker.md) explains when to call these. `elastirun.progress` needs no torch; "
        "`elastirun.train.progress` is the same function.",
        ["elastirun.progress.progress", "elastirun.progress.saving", f"{TRAIN}.is_current", f"{TRAIN}.Drain"],
    ),
    "elastic": (
        "Live elasticity",
        "[Experimental](../support.md#experimental). [Live elasticity](../elastic.md) explains it.",
        [f"{TRAIN}.elastic.init_process_group", f"{TRAIN}.elastic.Elastic"],
    ),
    "errors": (
        "Errors of training",
        "Each is a `RuntimeError`. A `WrongUse` that is not caught ends the job at once, because a restart would meet it again.",
        [f"{TRAIN}.errors.{name}" for name in ("TrainError", "WrongUse", "ModelMismatch", "OutsideForward", "Diverged", "RoundUnknown")]
        + [f"{TRAIN}.errors.{name}" for name in ("CheckpointError", "ClaimLost", "ReductionFailed", "PeerLost")],
    ),
}


def public_names() -> set[str]:
    """Return the names that ``elastirun.train`` exports, without importing it."""
    for node in ast.parse((ROOT / "elastirun" / "train" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    raise LookupError("elastirun/train/__init__.py has no __all__")


def api_pages() -> dict[str, str]:
    """Return the pages of the API reference by their paths."""
    pages = {}
    for name, (title, introduction, objects) in API.items():
        pages[f"docs/api/{name}.md"] = "\n\n".join([f"# {title}", introduction, *(f"::: {each}" for each in objects)]) + "\n"
    return pages


def navigation() -> list[dict[str, object]]:
    """Return the order of the pages: that of docs/index.md, which has all of them, then the API reference."""
    nav: list[dict[str, object]] = [{"elastirun": "README.md"}]
    before, *sections = re.split(r"^## ", (ROOT / "docs" / "index.md").read_text(), flags=re.M)
    first = [{"All pages": "docs/index.md"}, *(entry for entry in _entries(before) if "README.md" not in entry.values())]
    for section in sections:
        title, _, text = section.partition("\n")
        nav.append({title: first + _entries(text)})
        first = []
    return [*nav, {"API": [{API[Path(path).stem][0]: path} for path in api_pages()]}]


def _entries(text: str) -> list[dict[str, str]]:
    """Return the title and the path of each page that ``text`` links to. A decision's number is followed by its title in the next cell."""
    entries = []
    for name, path, title in re.findall(r"\[([^\]]*)\]\(([^)]*)\)(?: \| (.*) \|$)?", text, re.M):
        label = f"{name} {title}" if name.isdecimal() else name[0].upper() + name[1:]
        entries.append({label: posixpath.normpath(f"docs/{path}")})
    return entries


def targets(path: str, text: str) -> dict[str, str]:
    """Return the links of the page ``path`` that lead to no page and no picture, by their text: the paths in the repository."""
    found = {}
    for link in LINK.findall(FENCE.sub("", text)):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
        if (ROOT / target).exists() and not target.endswith(".md") and Path(target).suffix not in SHOWN:
            found[link] = target
    return found


def source_page(target: str) -> str:
    """Return the page of a file of source text, or of all files in a folder."""
    head = f"{_options('search: {exclude: true}', 'hide: [navigation]')}# {target}\n\n"
    if (ROOT / target).is_dir():
        files = sorted(file for file in (ROOT / target).rglob("*") if file.is_file() and "__pycache__" not in file.parts)
        inside = [str(file.relative_to(ROOT)) for file in files]
        return head + "\n".join(f"## {path[len(target) + 1 :]}\n\n{_fenced(path)}" for path in inside)
    return head + _fenced(target)


def _options(*lines: str) -> str:
    """Return options of Material for a page, to stand before its text."""
    return "\n".join(["---", *lines, "---", "", ""])


def _fenced(path: str) -> str:
    return f"``````{LANGUAGES.get(Path(path).suffix, 'text')}\n{(ROOT / path).read_text()}\n``````\n"


def pages() -> dict[str, str]:
    """Return all pages by their paths: those of the repository, those of source text that they link to, the API reference."""
    found = api_pages()
    for file in (file for pattern in PAGES for file in sorted(ROOT.glob(pattern))):
        path, text = str(file.relative_to(ROOT)), file.read_text()
        links = targets(path, text)
        found[path] = LINK.sub(lambda match, links=links: f"{match[0]}.md" if match[0] in links else match[0], text)  # type: ignore[misc]
        found |= {f"{target}.md": source_page(target) for target in links.values()}
    found["README.md"] = _options("hide: [navigation]") + found["README.md"]  # it is alone in its part
    return found


def configuration() -> str:
    """Return the text of mkdocs.yml, with the paths of this repository in place of ROOT."""
    return (HERE / "mkdocs.yml").read_text().replace("ROOT", str(ROOT))


def write(folder: Path) -> None:
    """Write the configuration of mkdocs and all that it needs into ``folder``, which is emptied before."""
    shutil.rmtree(folder, ignore_errors=True)
    for path, text in pages().items():
        file = folder / "pages" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for file in (ROOT / "docs").iterdir():
        if file.suffix in SHOWN:
            shutil.copy(file, folder / "pages" / "docs")
    shutil.copy(HERE / "site.css", folder / "pages")
    (folder / "mkdocs.yml").write_text(f"{configuration()}\nnav: {json.dumps(navigation(), indent=1)}\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
