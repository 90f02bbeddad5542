"""Commit records: what is written is read again, and nothing else is."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from elastirun.checkpoint.record import Commit, FileSum, decode, encode, is_file_name, sums_from_lists
from elastirun.errors import CheckpointError
from tests.fuzz import mutated

ONE = Commit(100, 7, "abc:3", 3, 2, 1.5e9, {"__0_0.distcp": FileSum(10, "a" * 64, 7), ".metadata": FileSum(0, "0" * 64, 0)})


def changed(**fields: Any) -> bytes:
    return json.dumps({**json.loads(encode(ONE)), **fields}).encode()


def test_a_record_is_read_as_it_was_written() -> None:
    assert decode(encode(ONE)) == ONE
    assert decode(encode(replace(ONE, files={}, fence="", round=0))) == replace(ONE, files={}, fence="", round=0)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "format"),
        (changed(format=2), "its format is 2"),
        (changed(more=1), "fields"),
        (changed(step=101), "checksum"),
        (changed(time=float("nan")), "not JSON"),
        (encode(ONE)[:-1], "not JSON"),
        (b" " * (40 << 20), "bytes"),
    ],
)
def test_what_is_no_record_is_refused_in_a_few_words(data: bytes, why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        decode(data)


@pytest.mark.parametrize(
    "bad",
    [
        {"step": -1},
        {"step": True},
        {"sequence": 2**60},
        {"fence": "a\nb"},
        {"fence": "x" * 1000},
        {"world_size": 0},
        {"time": float("inf")},
        {"files": {"../x": FileSum(1, "a" * 64, 5)}},
        {"files": {"commit.json": FileSum(1, "a" * 64, 5)}},
        {"files": {"x": FileSum(-1, "a" * 64, 5)}},
        {"files": {"x": FileSum(1, "a" * 64, 2**32)}},
        {"files": {"x": FileSum(1, "A" * 64, 5)}},
        {"files": {"x": FileSum(1, "a" * 64 + "\n", 5)}},
    ],
)
def test_what_could_not_be_read_is_not_written(bad: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        encode(replace(ONE, **bad))


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\0", "a\n", "é", "-rf", "x" * 300, "commit.json"])
def test_a_name_that_is_more_than_a_name_is_refused(name: str) -> None:
    assert not is_file_name(name)


def test_lists_of_the_writer_are_checked() -> None:
    assert sums_from_lists({"x": [1, "a" * 64, 5]}) == {"x": FileSum(1, "a" * 64, 5)}
    for bad in ([], {"x": []}, {"x": [1]}, {"x": ["a" * 64, 1, 5]}, {"x": [1, "a" * 64]}, {"x": {"size": 1}}, {"x": None}):
        with pytest.raises(CheckpointError):
            sums_from_lists(bad)


def test_random_bytes_are_refused() -> None:
    good = encode(ONE)
    for seed in range(2000):
        data = mutated(random.Random(seed), good)
        try:
            found = decode(data)
        except CheckpointError:
            continue
        assert found == ONE  # a space more between two fields is no other record
