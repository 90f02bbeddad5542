"""Run tests in a copy of the package in which one rule is taken out."""

from __future__ import annotations

import compileall
import contextlib
import gc
import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from multiprocessing import util
from pathlib import Path
from py_compile import PycInvalidationMode

import pytest

from tests.support import daily
from tests.support.changes import Change, changed
from tests.support.worlds import PRELOAD

ROOT = Path(__file__).resolve().parents[2]
OURS = ("elastirun", "tests", "benchmarks")
SHARE = 12  # one of so many mutants runs each day,
AGAIN = 2  # and one of so many of their tests with all rules in place, where it is only to be seen that they can pass in the copy
TIMEOUT = 400.0  # seconds for the tests of one mutant
PATIENCE = 15.0  # seconds that a test waits for what does not come without the rule; many mutants are noticed by that


@dataclass(frozen=True)
class Mutant:
    """``rule`` is broken in ``<folder>/<module>.py`` by ``changes`` of what has the qualified ``name``; then ``test`` fails.

    Without ``changes`` the rule is broken when ``old``, which stands once in the module, becomes ``new``.
    """

    rule: str
    module: str
    old: str
    new: str
    test: str  # pytest's name of it
    folder: str = ""
    name: str = ""
    changes: tuple[Change, ...] = ()

    def broken(self, source: str) -> str:
        """Return the ``source`` of the module without the rule."""
        if self.changes:
            return changed(source, self.name, self.changes)
        assert source.count(self.old) == 1, f"{self.rule}: give the mutant the line that holds the rule now"
        return source.replace(self.old, self.new)

    def path(self, root: Path) -> Path:
        return root / self.folder / f"{self.module}.py"


def mutants_in(folder: str, tests: str) -> Callable[[str, str, str, str, str, str], Mutant]:
    """Return a function that makes mutants of modules in ``folder``, each with a test in ``tests``."""

    def mutant(rule: str, module: str, old: str, new: str, file: str, test: str) -> Mutant:
        return Mutant(rule, module, old, new, f"{tests}/test_{file}.py::test_{test}", folder)

    return mutant


def named_in(folder: str, tests: str) -> Callable[..., Mutant]:
    """Return a function that makes mutants by name: ``where`` is ``module:Class.function``, with dots for folders."""

    def mutant(rule: str, where: str, *changes: Change, seen_by: str) -> Mutant:
        module, _, name = where.partition(":")
        file, _, test = seen_by.partition("::")
        return Mutant(rule, module.replace(".", "/"), "", "", f"{tests}/test_{file}.py::test_{test}", folder, name, changes)

    return mutant


def due(mutants: Sequence[Mutant]) -> Sequence[Mutant]:
    """Return those of ``mutants`` that run today: one of ``SHARE``, others each day."""
    return daily.due(mutants, SHARE)


def each(mutants: Sequence[Mutant]) -> pytest.MarkDecorator:
    """Return a decorator of a test that takes each of ``mutants`` that runs today in turn as ``one``."""
    return pytest.mark.parametrize("one", due(mutants), ids=[one.rule.replace(" ", "_") for one in due(mutants)])


@dataclass(frozen=True)
class Outcome:
    """The exit code of pytest (minus the number of the signal that ended it), its output, and how long it took."""

    code: int
    text: str
    seconds: float

    @property
    def rule_is_missed(self) -> bool:
        """Whether the one test has failed, and not because the changed code cannot run at all."""
        return self.code == 1 and "1 failed" in self.text and "SyntaxError" not in self.text and "NameError" not in self.text


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package and its tests."""
    to = tmp_path_factory.mktemp("mutants")
    copy_to(to)
    return to


def copy_to(folder: Path) -> None:
    """Copy the package and its tests into ``folder``, links resolved, and compile them once.

    A compiled file holds the hash of its source, so that it is passed over where the source is a mutant, and is good again afterwards.
    """
    for name in OURS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(folder / name, quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
    shutil.copy(ROOT / "pyproject.toml", folder)


def unnoticed(copy: Path, one: Mutant) -> str:
    """Run the test of ``one`` without the rule, in ``copy``. Return empty text if the test has noticed that, else what it has printed."""
    found = run_mutant(copy, one.path(copy), one)
    said = f"exit code {found.code} after {found.seconds:.0f} s"
    return "" if found.rule_is_missed else f"{one.test} passes without the rule, or the mutant cannot run: {said}\n{found.text[-2000:]}"


def again(mutants: Sequence[Mutant], day: int) -> Sequence[str]:
    """Return one of ``AGAIN`` of the tests of the mutants that run today, others when they run again. Of a single test there is no half."""
    tests = list(dict.fromkeys(one.test for one in due(mutants)))
    return tests[day // SHARE % AGAIN :: AGAIN] or tests


def failing(copy: Path, mutants: Sequence[Mutant]) -> str:
    """Run tests of ``mutants`` with all rules in place. Return empty text if they pass, else what they have printed."""
    tests = again(mutants, date.today().toordinal())
    found = run(copy, *tests, WORLD_START="forkserver")  # after many tests this process may have threads, which a fork cannot share
    failed = [line for line in found.text.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "\n".join([*failed, found.text[-2000:]]) if found.code else ""


def run_mutant(copy: Path, path: Path, one: Mutant) -> Outcome:
    """Run the test of ``one`` with its change of ``path``, which is in ``copy``."""
    original = path.read_text()
    path.write_text(one.broken(original))
    try:
        return run(copy, one.test, TEST_PATIENCE=f"{PATIENCE:g}")
    finally:
        path.write_text(original)


def run(copy: Path, *tests: str, **environ: str) -> Outcome:
    """Run ``tests`` in the copy with the variables ``environ``, in a fork of a process that has torch and pytest but not our modules."""
    assert tests, "name a test: without one pytest runs all of them"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    env = {**os.environ, "PYTHONPATH": str(copy), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "WORLD_START": "fork", **environ}
    for name in ("CI", "BUILD_NUMBER", "TEST_DAY"):  # with the first two pytest would list all differences of large bytes, for minutes
        env.pop(name, None)
    with tempfile.NamedTemporaryFile() as output:
        process = context.Process(target=_pytest, args=(str(copy), tests, env, output.name))
        process.start()
        began = time.monotonic()
        process.join(TIMEOUT)
        if process.exitcode is None:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGABRT)  # faulthandler writes where it stands
            process.join(5.0)
            with contextlib.suppress(ProcessLookupError):  # the signal has ended all of them
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        assert process.exitcode is not None
        return Outcome(process.exitcode, Path(output.name).read_text(errors="replace"), time.monotonic() - began)


def _pytest(folder: str, tests: tuple[str, ...], env: Mapping[str, str], output: str) -> None:
    os.setsid()
    gc.freeze()  # pytest collects garbage several times; what torch has made need not be looked through each time
    fd = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.path.insert(0, folder)
    multiprocessing.set_start_method("fork", force=True)  # of a loader's workers: those of a fork server would outlive this process
    for name in list(sys.modules):
        if name.partition(".")[0] in OURS:
            del sys.modules[name]
    importlib.invalidate_caches()
    import elastirun

    assert str(elastirun.__file__).startswith(folder)
    # The thread of faulthandler's time limit would be in the way of forking ranks.
    options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=0"]
    code = pytest.main([*options, *tests])
    sys.stdout.flush()
    util._exit_function()  # end daemon processes, as at an exit of the interpreter
    os._exit(code)
