"""Mutants that the suite does not run today fit the code as well."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.support.mutants import AGAIN, ROOT, SHARE, Mutant, again, due

PARTS = ("agent", "checkpoint", "cli", "rendezvous", "report", "train")


def mutants(part: str) -> tuple[Mutant, ...]:
    found: tuple[Mutant, ...] = importlib.import_module(f"tests.{part}.test_mutants").MUTANTS
    return found


@pytest.mark.parametrize("part", PARTS)
def test_each_mutant_changes_one_line_and_names_a_test(part: str) -> None:
    for one in mutants(part):
        assert one.path(ROOT).read_text().count(one.old) == 1, f"{one.rule}: give the mutant the line that holds the rule now"
        file, _, name = one.test.partition("::")
        assert f"def {name.partition('[')[0]}(" in Path(ROOT, file).read_text(), f"{one.rule}: there is no {one.test}"


def test_each_mutant_has_its_day(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for day in range(739000, 739000 + SHARE):
        monkeypatch.setenv("TEST_MUTANTS", str(day))
        found += due(mutants("agent"))
    assert sorted(one.rule for one in found) == sorted(one.rule for one in mutants("agent"))
    monkeypatch.setenv("TEST_MUTANTS", "all")
    assert due(mutants("agent")) == mutants("agent")


@pytest.mark.parametrize("part", PARTS)
def test_on_each_day_tests_run_with_all_rules_in_place(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for day in range(739000, 739000 + SHARE * AGAIN):
        monkeypatch.setenv("TEST_MUTANTS", str(day))
        assert again(mutants(part), day)
