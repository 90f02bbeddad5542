"""Mutants that the suite does not run today fit the code as well."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from tests.support.mutants import AGAIN, ROOT, SHARE, Mutant, again, due

PARTS = ("agent", "checkpoint", "rendezvous", "train")


def mutants(part: str) -> tuple[Mutant, ...]:
    found: tuple[Mutant, ...] = importlib.import_module(f"tests.{part}.test_mutants").MUTANTS
    return found


@pytest.mark.parametrize("part", PARTS)
def test_each_mutant_breaks_its_module_and_names_a_test(part: str) -> None:
    for one in mutants(part):
        source = one.path(ROOT).read_text()
        assert one.broken(source) != source, one.rule
        file, _, name = one.test.partition("::")
        assert f"def {name.partition('[')[0]}(" in Path(ROOT, file).read_text(), f"{one.rule}: there is no {one.test}"


def long_tests(path: Path) -> set[str]:
    """Return the names of the tests in ``path`` that only TEST_LONG=1 runs."""
    found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    return {node.name for node in found if "pytest.mark.long" in map(ast.unparse, node.decorator_list)}


@pytest.mark.parametrize("part", PARTS)
def test_no_mutant_names_a_test_that_is_skipped(part: str) -> None:
    long = {file: long_tests(ROOT / file) for file in {one.test.partition("::")[0] for one in mutants(part)}}
    for one in mutants(part):
        file, _, name = one.test.partition("::")
        assert name.partition("[")[0] not in long[file], f"{one.rule}: {name} runs with TEST_LONG=1 only"


def test_a_test_that_is_skipped_is_found() -> None:
    assert "test_after_deaths_and_hangs_in_a_change_of_the_world_the_others_go_on" in long_tests(
        ROOT / "tests/system/test_live_disturbances.py"
    )


def test_each_mutant_has_its_day(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for day in range(739000, 739000 + SHARE):
        monkeypatch.setenv("TEST_DAY", str(day))
        found += due(mutants("agent"))
    assert sorted(one.rule for one in found) == sorted(one.rule for one in mutants("agent"))
    monkeypatch.delenv("TEST_DAY")
    assert due(mutants("agent")) == mutants("agent")


@pytest.mark.parametrize("part", PARTS)
def test_on_each_day_tests_run_with_all_rules_in_place(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for day in range(739000, 739000 + SHARE * AGAIN):
        monkeypatch.setenv("TEST_DAY", str(day))
        assert again(mutants(part), day)
