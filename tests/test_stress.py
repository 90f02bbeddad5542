"""The list of suites that are started by hand is true."""

from __future__ import annotations

import pytest

from tests.stress import SUITES, about, main


@pytest.mark.parametrize("name", SUITES)
def test_each_suite_says_in_a_line_what_it_does(name: str) -> None:
    assert about(SUITES[name]).endswith((".", "]"))


def test_a_name_that_is_none_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nonsense"]) == 2
    assert capsys.readouterr().err == "stress: no suite 'nonsense'; python -m tests.stress lists them\n"
