"""Import layers (which modules a module may import) and banned names. ruff counts the branches of each function."""

from __future__ import annotations

import ast
import functools
import graphlib
import io
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.until import PATIENCE

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"elastirun": ROOT / "elastirun", "elastirun.agent": ROOT / "agent", "elastirun.rendezvous": ROOT / "rendezvous"}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
BANNED_SUFFIXES = ("Manager", "Handler", "Executor", "Holder", "Helper", "Util", "Utils", "Impl", "Base")
SPAWNERS = ("elastirun.functions", "elastirun.worker.function_worker")  # spawn of the standard library, for one user; no agent
METADATA = "elastirun.train.checkpoints.dcp"  # writes the pickle that torch reads, and reads torch's by a list: docs/decisions/0017
UNPICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}


@dataclass(frozen=True)
class Layer:
    """What the modules below ``name`` may import: each other, the standard library, and what is listed."""

    name: str
    also: tuple[str, ...] = ()
    in_functions: tuple[str, ...] = ()  # slow or optional: imported only where it is used
    never: tuple[str, ...] = ()


EFFECTS = ("asyncio", "logging", "multiprocessing", "os", "queue", "random", "select", "selectors", "socket", "subprocess")
EFFECTS += ("threading", "time", "elastirun.clock", "elastirun.linux", "elastirun.threads")
SHARED = ("elastirun.errors", "elastirun.clock", "elastirun.threads", "elastirun.__version__", "elastirun.mesh")
PAGE = "elastirun.worker.progress_page"
USUAL = "elastirun.worker.usual_time"
LINUX = "elastirun.linux"
CHECK = "elastirun.agent.check"
LIVE = "elastirun.worker.live_messages"
WORLDS = "elastirun.worker.live_worlds"
CONNECTION = ("elastirun.worker.live_connection", LIVE, WORLDS)
ENDS = "elastirun.agent.observe.round_ends"
ASKING = ("elastirun.worker.agent_socket", "elastirun.worker.current_round")
LAYERS = (  # the first that a module is below counts
    Layer("elastirun.rendezvous.stores", ("elastirun.rendezvous", *SHARED), in_functions=("torch", "etcd3", "grpc", "google.protobuf")),
    Layer("elastirun.rendezvous.store_thread", ("elastirun.rendezvous", *SHARED)),
    # decisions
    Layer("elastirun.rendezvous", SHARED, never=(*EFFECTS, "elastirun.rendezvous.store_thread", "elastirun.rendezvous.stores")),
    Layer("elastirun.agent.observe.node_states", never=EFFECTS),
    Layer(ENDS, ("elastirun.rendezvous",), never=EFFECTS),
    Layer("elastirun.agent.observe.account", (PAGE, ENDS, "elastirun.agent.observe.node_states", "elastirun.rendezvous"), never=EFFECTS),
    Layer("elastirun.agent.hangs.detection", (PAGE,), never=EFFECTS),
    Layer("elastirun.agent.hangs.causes", never=EFFECTS),
    Layer("elastirun.agent.hangs.stragglers", (PAGE, USUAL), never=EFFECTS),
    Layer("elastirun.agent.observe.step_rates", (PAGE,), never=EFFECTS),
    Layer("elastirun.agent.failures.strikes", ("elastirun.rendezvous",), never=EFFECTS),
    Layer("elastirun.agent.workers.parking", never=EFFECTS),
    *(Layer(f"{CHECK}.{name}", (CHECK,), never=EFFECTS) for name in ("records", "own_findings", "between", "verdict", "table")),
    Layer("elastirun.agent.processes.preload.forkserver", in_functions=("elastirun.worker.optimizer_steps",)),  # in workers
    Layer("elastirun.agent.status.metrics", in_functions=("prometheus_client",)),
    Layer("elastirun.agent.observe.tracing", ("elastirun.agent.observe.events", "elastirun.threads"), in_functions=("opentelemetry",)),
    Layer("elastirun.chaos.verdict", never=EFFECTS),
    Layer("elastirun.report", ("elastirun.errors", "elastirun.linux", "elastirun.agent.observe.node_states")),
    Layer("elastirun.agent.status.own_agents", ("elastirun.agent", "elastirun.worker.agent_socket")),
    Layer(
        "elastirun.agent",
        ("elastirun.rendezvous", "elastirun.config", PAGE, USUAL, LIVE, LINUX, "psutil", *SHARED),
        in_functions=("torch",),
    ),
    Layer("elastirun.checkpoint.__main__", ("elastirun.checkpoint", "elastirun.errors", "click")),
    Layer("elastirun.checkpoint.export", ("elastirun.checkpoint", "elastirun.errors"), in_functions=("torch", "elastirun.train")),
    Layer("elastirun.checkpoint", ("elastirun.errors", "elastirun.clock", LINUX, *ASKING), in_functions=("fsspec",)),
    Layer("elastirun.worker.current_round", ("elastirun.errors", "elastirun.worker.agent_socket")),
    Layer("elastirun.worker.agent_socket"),
    Layer(LINUX),
    Layer(PAGE, never=EFFECTS),
    Layer(USUAL, never=EFFECTS),
    Layer(LIVE, never=EFFECTS),
    Layer(WORLDS, never=EFFECTS),
    Layer("elastirun.worker.live_connection", (LIVE, "elastirun.errors", LINUX)),
    Layer("elastirun.progress", (PAGE,)),
    Layer("elastirun.worker.optimizer_steps", ("elastirun.progress", PAGE)),
    Layer(
        "elastirun.train",
        ("torch", "elastirun.checkpoint", "elastirun.errors", "elastirun.mesh", "elastirun.progress", USUAL, LINUX, *CONNECTION, *ASKING),
    ),
    Layer("elastirun.errors", never=EFFECTS),
    Layer("elastirun.mesh", never=EFFECTS),
    Layer("elastirun.standard_streams"),
    Layer("elastirun.config", ("elastirun.rendezvous.timing", *SHARED), never=EFFECTS),
    Layer("elastirun", ("click",), in_functions=("torch", "psutil"), never=("elastirun.rendezvous", "elastirun.train")),  # the command line
)


def sources() -> Iterator[tuple[str, Path]]:
    """Every module of the product with its installed name."""
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if path.resolve().is_relative_to(PACKAGES[package].resolve()):  # Python 3.13's rglob may walk into the links
                yield ".".join((package, *(part for part in parts if part != "__init__"))), path


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(tree: ast.Module, module: str, package: bool) -> Iterator[tuple[str, bool, int]]:
    """(imported name, is it needed when this module is imported, line) of each import statement."""

    def visit(node: ast.AST, eager: bool) -> Iterator[tuple[str, bool, int]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, eager, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                parents = module.split(".") if package else module.split(".")[:-1]
                origin = ".".join([*parents[: len(parents) - node.level + 1], *([node.module] if node.module else [])])
            yield from ((f"{origin}.{alias.name}", eager, node.lineno) for alias in node.names)
        later = isinstance(node, FUNCTION) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, eager and not later)

    return visit(tree, True)


def inside(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def violations(module: str, tree: ast.Module, package: bool = False) -> list[str]:
    """The imports of ``module`` that its layer forbids, as ``name: line: import``."""
    layer = next(layer for layer in LAYERS if inside(module, (layer.name,)))
    found = []
    for name, eager, line in imports(tree, module, package):
        allowed = name.split(".")[0] in sys.stdlib_module_names or inside(name, (layer.name, *layer.also))
        lazily = not eager and inside(name, layer.in_functions)
        if inside(name, layer.never) or not (allowed or lazily):
            found.append(f"{module}:{line}: imports {name}")
    return found


def test_every_module_keeps_to_its_layer() -> None:
    assert [text for module, path in sources() for text in violations(module, tree_of(path), path.name == "__init__.py")] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("elastirun.rendezvous.machine", "import torch"),
        ("elastirun.rendezvous.machine", "def f():\n    import torch"),
        ("elastirun.rendezvous.machine", "import time"),
        ("elastirun.rendezvous.machine", "from . import store_thread"),
        ("elastirun.rendezvous.machine", "from elastirun.config import Timing"),
        ("elastirun.rendezvous.machine", "from ..agent import workers"),
        ("elastirun.rendezvous.store_thread", "from elastirun import agent"),
        ("elastirun.rendezvous.stores.tcp", "from torch.distributed import TCPStore"),
        ("elastirun.agent.workers.spec", "import torch"),
        ("elastirun.agent.workers.spec", "import click"),
        ("elastirun.agent.status.metrics", "import prometheus_client"),
        ("elastirun.agent.status.health", "def f():\n    import prometheus_client"),
        ("elastirun.agent.workers.spec", "from elastirun.cli.main import main"),
        ("elastirun.cli.main", "from elastirun.rendezvous import machine"),
        ("elastirun.cli.main", "import torch"),
        ("elastirun.config", "import elastirun.agent"),
        ("elastirun.train.ddp.module", "from elastirun.agent import spec"),
        ("elastirun.train.ddp.module", "import psutil"),
        ("elastirun.checkpoint.image", "def f():\n    import torch"),
        ("elastirun.checkpoint.backends.objects", "import fsspec"),
        ("elastirun.checkpoint.writer", "from elastirun.train import ddp"),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str) -> None:
    assert len(violations(module, ast.parse(source))) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("elastirun.rendezvous.machine", "import json"),
        ("elastirun.rendezvous.machine", "from . import ranks"),
        ("elastirun.rendezvous.machine", "from .records import NodeRow"),
        ("elastirun.rendezvous.machine", "from elastirun.errors import StoreError"),
        ("elastirun.rendezvous.stores.tcp", "import time\ndef f():\n    import torch"),
        ("elastirun.rendezvous.stores.tcp", "if TYPE_CHECKING:\n    from torch.distributed import TCPStore"),
        ("elastirun.agent.agent", "import psutil\nfrom elastirun.config import LaunchConfig"),
        ("elastirun.agent.agent", "from elastirun.rendezvous.machine import step"),
        ("elastirun.agent.status.metrics", "def f():\n    import prometheus_client"),
        ("elastirun.cli.main", "import click\nfrom elastirun.config import LaunchConfig\nfrom elastirun.agent.agent import run"),
        ("elastirun.train.ddp.module", "import torch.distributed as dist\nfrom elastirun.train.reduction import buckets"),
        ("elastirun.train.checkpoints.staging", "from elastirun.checkpoint.image import Image"),
        ("elastirun.checkpoint.__main__", "import click"),
        ("elastirun.checkpoint.export", "def f():\n    import torch"),
        ("elastirun.checkpoint.backends.objects", "def f():\n    import fsspec"),
    ],
)
def test_an_allowed_import_is_not(module: str, source: str) -> None:
    assert violations(module, ast.parse(source)) == []


def cycle(sources: Mapping[str, ast.Module]) -> list[str]:
    """Modules that import each other in a circle when they are imported, the first one again at the end; empty when there are none.

    ``sources``: the modules by name. Importing a module also runs the packages that it is in.
    """

    def needed(name: str, module: str) -> set[str]:
        parts = name.split(".")
        found = {".".join(parts[:count]) for count in range(1, len(parts) + 1)} & sources.keys()
        return {other for other in found if not inside(module, (other,))}

    graph = {}
    for module, tree in sources.items():
        package = any(name.startswith(f"{module}.") for name in sources)
        eager = [name for name, eager, _ in imports(tree, module, package) if eager]
        graph[module] = set().union(*(needed(name, module) for name in eager))
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other() -> None:
    assert cycle({module: tree_of(path) for module, path in sources()}) == []


@pytest.mark.parametrize(
    ("a", "b", "c", "found"),
    [
        ("import p.b", "from p.c import f", "from . import a", True),
        ("import p.b", "import p.c", "", False),
        ("import p.b", "import p.c", "def f():\n    import p.a", False),
        ("import p.b", "import p.c", "if TYPE_CHECKING:\n    import p.a", False),
    ],
)
def test_a_cycle_is_found(a: str, b: str, c: str, found: bool) -> None:
    modules = {"p": "", "p.a": a, "p.b": b, "p.c": c}
    assert bool(cycle({name: ast.parse(source) for name, source in modules.items()})) == found


FLOORS = {  # the folders and loose modules of a package, the lowest first: each imports only what stands before it
    "elastirun.rendezvous": (
        *("wire", "timing", "progress", "failures", "transitions", "rules", "stores", "peers", "store_thread", "updates", "death_notice"),
        *("failover", "store_link", "formation", "earlier_run", "store_tracker", "machine"),
    ),
    "elastirun.agent": (
        *(
            "part",
            "host",
            "processes",
            "output",
            "store",
            "observe",
            "session",
            "guard_lease",
            "workers",
            "round_start",
            "hangs",
            "failures",
            "check",
        ),
        *("quarantine", "termination_log", "wanted_nodes", "status", "ending", "assemble", "agent"),
    ),
    "elastirun.train": (
        *("errors", "arguments", "torch_private", "sharded", "mesh", "autograd_engine", "groups", "reduction", "stopping", "state", "ddp"),
        *("zero", "checkpoints", "data", "live", "elastic"),
    ),
}
MOST_FILES = 14  # of one folder: more cannot be seen at a glance


def room(package: str, name: str) -> str:
    """The folder or loose module of ``package`` that ``name`` is in, or is a part of; empty: none."""
    return name.removeprefix(f"{package}.").partition(".")[0] if name.startswith(f"{package}.") else ""


def climbing(package: str, module: str, tree: ast.Module, folder: bool = False) -> list[str]:
    """The imports of ``module`` that lead to a room above its own, also those in functions and for types alone."""
    floors, found = FLOORS[package], []
    for name, _, line in imports(tree, module, folder):
        own, other = room(package, module), room(package, name)
        if own and other in floors and floors.index(other) > floors.index(own):
            found.append(f"{module}:{line}: {own} imports {other}, which is above it")
    return found


@pytest.mark.parametrize("package", FLOORS)
def test_no_room_imports_one_above_it(package: str) -> None:
    ours = [(module, path) for module, path in sources() if room(package, module)]
    assert {room(package, module) for module, _ in ours} == {*FLOORS[package]}
    assert [text for module, path in ours for text in climbing(package, module, tree_of(path), path.name == "__init__.py")] == []


def test_an_import_of_a_room_above_is_found() -> None:
    above = "if TYPE_CHECKING:\n    from elastirun.agent.status.health import Health"
    assert len(climbing("elastirun.agent", "elastirun.agent.hangs.watch", ast.parse(above))) == 1
    assert climbing("elastirun.agent", "elastirun.agent.hangs.watch", ast.parse("from ..observe import events")) == []


def test_no_folder_has_too_many_files() -> None:
    folders = [path.parent for _, path in sources()]
    assert {str(folder): folders.count(folder) for folder in folders if folders.count(folder) > MOST_FILES} == {}


def test_the_command_line_comes_up_without_torch() -> None:
    """`elastirun --help` must not cost the second that importing torch takes."""
    code = "import sys, elastirun.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=PATIENCE).returncode == 0


def test_workers_that_need_no_sharded_tensors_do_not_import_them() -> None:
    """They would take each worker that starts another second."""
    code = "import sys, elastirun.train; sys.exit(len({'torch.distributed.tensor', 'torch.distributed.checkpoint'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=PATIENCE).returncode == 0


def test_nothing_is_unpickled() -> None:
    found = [
        f"{path}:{line}"
        for module, path in sources()
        for name, _, line in imports(tree_of(path), module, path.name == "__init__.py")
        if (name.split(".")[0] in UNPICKLERS and (module, name) != (METADATA, "pickle"))
        or (name.startswith("multiprocessing") and module not in SPAWNERS)
    ]
    assert found == []


def test_functions_are_short_and_classes_well_named() -> None:
    found = []
    for path in [path for _, path in sources()] + list((ROOT / "examples").rglob("*.py")):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, FUNCTION) and (node.end_lineno or 0) - node.lineno + 1 > 60:
                found.append(f"{path}:{node.lineno}: {node.name} is longer than 60 lines")
            if isinstance(node, ast.ClassDef) and node.name.endswith(BANNED_SUFFIXES):
                found.append(f"{path}:{node.lineno}: a class called {node.name}")
    assert found == []


def test_a_name_belongs_to_one_class() -> None:
    """But for the events of ``observe/events.py``: each has the name of what it tells of, and is written ``events.Stop``."""
    defined = Counter(
        node.name
        for _, path in sources()
        if not path.match("agent/observe/events.py")
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in defined.items() if count > 1] == []


MOST_ATTRIBUTES = 20  # of one class: beyond that it holds more than one idea


def attributes(node: ast.ClassDef) -> set[str]:
    """The names that the class, or a class within it, assigns to ``self``."""
    stored = [n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    return {n.attr for n in stored if isinstance(n.value, ast.Name) and n.value.id == "self"}


def test_no_class_has_too_many_attributes() -> None:
    classes = [node for _, path in sources() for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)]
    assert {node.name for node in classes if len(attributes(node)) > MOST_ATTRIBUTES} == set()


def test_attributes_are_counted() -> None:
    source = "class A:\n  def __init__(self):\n    self.a, self.b = 1, 2\n    self.c: int = 3\n  def f(self):\n    self.d += self.e"
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef) and attributes(node) == {"a", "b", "c", "d"}


MOST_CODE, MOST_MODULES = 34_150, 380  # of the product, see docs/decisions/0031, 0033 and 0034


def lines_of_code(source: str) -> int:
    """Count the lines without comments, docstrings and blanks."""
    texts = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTION)) and ast.get_docstring(node, clean=False) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    no_code = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in no_code]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - texts)


def test_the_product_grows_by_decision_only() -> None:
    found = [path.read_text() for _, path in sources()]
    assert (sum(map(lines_of_code, found)) <= MOST_CODE, len(found) <= MOST_MODULES) == (True, True)


def test_lines_of_code_are_counted() -> None:
    assert lines_of_code('"""Text\nof a module."""\n\n# why\ndef f():\n    """Text."""\n    return [\n        1,\n    ]\n') == 4
