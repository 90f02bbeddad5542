"""Decides from the text of a script what the fork server imports for the workers (``--preload=auto``, see docs/decisions/0018).

``decide`` is a function of texts and of two questions about what is installed. ``of_command`` reads the files and asks.
Whatever cannot be read or parsed imports nothing: the worker that runs it is executed, and says itself what is wrong.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder

from elastirun.agent.processes.preload.forkserver import ROUND_NAMES
from elastirun.config import Command, Preload

TEXT_LIMIT = 1 << 20  # bytes of one file; the analysis takes a second for each MiB
MOST_FILES = 64  # files that are read beside the script
MOST_PACKAGES = 200  # packages whose requirements are followed
MOST_TRIED = 32  # modules that the fork server tries
READS = {"get", "copy", "items", "keys", "values"}  # methods of os.environ that change nothing
WRITES = {"putenv", "unsetenv", "load_dotenv"}  # functions that change environment variables
NO_TORCH = "the script imports neither torch nor a package that needs it"
CHANGES = "the script may change environment variables before it imports torch"
RANKS = re.compile(rf"\b({'|'.join(sorted(ROUND_NAMES))})\b".encode())
REQUIRES = re.compile(r"^Requires-Dist: *([\w.-]+)[^;\n]*(.*)$", re.MULTILINE)  # in a package's METADATA: a name, and when
OF_TORCH = re.compile(r"extra *== *['\"]torch['\"]")  # of packages that can do without, and with which nobody does
OURS = "elastirun"  # requires torch, but only the modules of ``OURS_WITH_TORCH`` import it
OURS_WITH_TORCH = "elastirun.train"
INSTALLED = {"site-packages", "dist-packages"}


@dataclass(frozen=True)
class FileStep:
    """Something that a file does when it is run."""

    first: bool = False  # stands at the top of the file, with nothing but imports before it
    later: bool = False  # is inside a function, which runs nobody knows when


@dataclass(frozen=True)
class EnvironmentChange(FileStep):
    """A change of the environment variables."""


@dataclass(frozen=True, kw_only=True)
class Import(FileStep):
    """An import statement, or what counts as one."""

    module: str
    parts: tuple[str, ...] = ()  # what a ``from`` statement takes out of the module: modules, perhaps

    @property
    def names(self) -> list[str]:
        """The modules that the statement may import."""
        return [self.module, *(f"{self.module}.{part}" for part in self.parts)]

    @property
    def package(self) -> str:
        """The name under which the module was installed."""
        return self.module.partition(".")[0]


Local = tuple[str, Sequence[FileStep]]  # a file of the user's own, with what it does when it is imported


def steps(text: str | bytes, package: str = "") -> list[FileStep]:
    """Return the imports and the changes of the environment in a file of ``package``, in their order; none if it cannot be parsed."""
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        body = ast.parse(text).body
        imports = (ast.Import, ast.ImportFrom)
        rest = next((i for i, node in enumerate(body) if not isinstance(node, imports) and not _is_docstring(node)), len(body))
        found = [step for node in body[:rest] for step in _steps_of(node, package, first=True)]
        return found + [step for node in body[rest:] for step in _steps_of(node, package)]
    return []


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _steps_of(node: ast.AST, package: str, first: bool = False, later: bool = False) -> Iterator[FileStep]:
    if isinstance(node, ast.Import):
        yield from (Import(first, later, module=alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        module = ".".join([*parents, *([node.module] if node.module else [])])
        yield Import(first, later, module=module, parts=tuple(alias.name for alias in node.names))
    elif _changes_environment(node):
        yield EnvironmentChange(later=later)
    later = later or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    for_types = isinstance(node, ast.If) and _name(node.test) == "TYPE_CHECKING"
    for child in node.orelse if isinstance(node, ast.If) and for_types else ast.iter_child_nodes(node):
        yield from _steps_of(child, package, later=later)


def _changes_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        name = _name(node.func)
        return name in WRITES or isinstance(node.func, ast.Attribute) and _name(node.func.value) == "environ" and name not in READS
    if isinstance(node, ast.Subscript):
        return _name(node.value) == "environ" and not isinstance(node.ctx, ast.Load)
    return isinstance(node, ast.AugAssign) and _name(node.target) == "environ"


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def decide(
    script: Sequence[FileStep],
    local: Callable[[Import], Local | None],
    installed: Callable[[str], bool],
    needs_torch: Callable[[str], bool],
) -> Preload:
    """Return what to preload for a script, and why.

    ``local(step)``: the user's own file that is imported; None: there is none of that name. ``installed(package)``: whether it is found
    among the installed packages. ``needs_torch(package)``: whether its requirements say so; asked only if nothing names torch itself.

    torch is preloaded if anything imports it, unless the environment may be changed before: what is set then must have its effect.
    A function that changes it may have been called, unless nothing but imports comes first. Another module is tried only if nothing
    but imports of installed packages comes before it, for the same reason.
    """
    flat = list(_with_local(script, local))
    imports = [(i, step) for i, (step, _) in enumerate(flat) if isinstance(step, Import)]
    at_torch = [i for i, step in imports if _imports_torch(step)]
    at_torch = at_torch or [i for i, step in imports if step.package != OURS and needs_torch(step.package)]
    if not at_torch:
        return Preload(why=NO_TORCH)
    imported = next((i for i in at_torch if not flat[i][0].later), len(flat))
    only_imports = imported < len(flat) and flat[imported][0].first
    if any(isinstance(step, EnvironmentChange) and not (step.later and only_imports) for step, _ in flat[:imported]):
        return Preload(why=CHANGES)
    step, file = flat[at_torch[0]]
    assert isinstance(step, Import)
    return Preload(("torch",), _tried(script, local, installed), f"{file} imports {step.module}")


def _imports_torch(step: Import) -> bool:
    """Return whether the statement imports torch, or a module of ours that does."""
    return step.package == "torch" or any(f"{name}.".startswith(f"{OURS_WITH_TORCH}.") for name in step.names)


def _with_local(script: Sequence[FileStep], local: Callable[[Import], Local | None]) -> Iterator[tuple[FileStep, str]]:
    """Yield what the script does, with what its own files do in place of their imports, and the name of the file."""
    for step in script:
        found = local(step) if isinstance(step, Import) else None
        if found is None:
            yield step, "the script"
        else:
            for inner in found[1]:
                yield replace(inner, first=inner.first and step.first, later=inner.later or step.later), found[0]


def _tried(script: Sequence[FileStep], local: Callable[[Import], Local | None], installed: Callable[[str], bool]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for step in script:
        if not isinstance(step, Import) or not step.first or local(step):
            break
        if step.package not in sys.stdlib_module_names:
            if not installed(step.package):
                break
            found[step.module] = None
    found.pop("torch", None)
    return tuple(found)[:MOST_TRIED]


# -- files and installed packages


def of_command(command: Command) -> Preload:
    """Return what to preload for workers of a Python command, and why."""
    folder = os.getcwd() if command.module else os.path.dirname(os.path.realpath(command.script))
    own = Files([folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
    for name in ("sitecustomize", "usercustomize"):
        spec = PathFinder.find_spec(name)
        if spec and spec.origin and RANKS.search(own.read(spec.origin)):
            return Preload(why=f"{spec.origin} runs before the script, and names a variable of the workers' ranks")
    script = own.of_module(command.script) if command.module else steps(own.read(command.script))
    return decide(script, own.imported, is_installed, needs_torch)


class Files:
    """The user's own Python files: those below ``folders``. Reads a limited number."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = folders
        self._left = MOST_FILES
        self._imported: dict[Import, Local | None] = {}

    def read(self, path: str) -> bytes:
        """Return the file; nothing if it cannot be read, is too large, or is one too many."""
        self._left -= 1
        with suppress(OSError):
            if self._left >= 0 and os.path.isfile(path) and os.path.getsize(path) <= TEXT_LIMIT:
                with open(path, "rb") as file:
                    return file.read()
        return b""

    def imported(self, step: Import) -> Local | None:
        """Return the user's files that an import runs, as one; None: there is none. Their own imports of such files are left out."""
        if step not in self._imported:
            paths = {path: package for name in step.names for path, package in _paths(name, self._folders)}
            found = [inner for path, package in paths.items() for inner in steps(self.read(path), package)]
            others = [inner for inner in found if not isinstance(inner, Import) or not _paths(inner.module, self._folders)]
            self._imported[step] = (os.path.basename([*paths][-1]), others) if paths else None
        return self._imported[step]

    def of_module(self, module: str) -> list[FileStep]:
        """Return what ``python -m module`` does."""
        paths = _paths(module, [*self._folders, *sys.path])
        if paths and os.path.basename(paths[-1][0]) == "__init__.py":
            paths.append((os.path.join(os.path.dirname(paths[-1][0]), "__main__.py"), module))
        return [Import(module=module.partition(".")[0]), *(step for path, package in paths for step in steps(self.read(path), package))]


def _paths(module: str, folders: Sequence[str]) -> list[tuple[str, str]]:
    """Return the files that an import of the module runs, outermost first, each with its package."""
    names = module.split(".")
    for folder in folders:
        found = []
        for end in range(1, len(names) + 1):
            base = os.path.join(folder, *names[:end])
            places = ((f"{base}/__init__.py", names[:end]), (f"{base}.py", names[: end - 1]))
            found += [(path, ".".join(package)) for path, package in places if os.path.isfile(path)][:1]
        if found:
            return found
    return []


@functools.cache
def is_installed(package: str) -> bool:
    """Return whether the package is found among the installed ones."""
    spec = PathFinder.find_spec(package) if package else None
    places = [spec.origin or "", *(spec.submodule_search_locations or ())] if spec else []
    return any(INSTALLED & {*place.split("/")} for place in places)


@functools.cache
def distributions() -> dict[str, str]:
    """Return the file METADATA of each installed package, by its name. Reads folders only; importlib.metadata takes 40 ms to import."""
    found: dict[str, str] = {}
    for folder in sys.path:
        with suppress(OSError):
            for entry in os.listdir(folder or "."):
                if entry.endswith(".dist-info"):
                    found.setdefault(_normal(entry.partition("-")[0]), os.path.join(folder, entry, "METADATA"))
    return found


def needs_torch(package: str) -> bool:
    """Return whether an installed package, or one that it needs, requires torch. A package by another name than its module is unknown."""
    wanted = [_normal(package)]
    for name in wanted:
        try:
            with open(distributions()[name], encoding="utf-8", errors="replace") as file:
                text = file.read(TEXT_LIMIT)
        except (KeyError, OSError):
            continue
        for required, when in REQUIRES.findall(text.partition("\n\n")[0]):
            always, required = "extra" not in when, _normal(required)
            if required == "torch" and (always or name == wanted[0] and OF_TORCH.search(when)):
                return True
            if always and required not in wanted and len(wanted) < MOST_PACKAGES:
                wanted.append(required)
    return False


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()
