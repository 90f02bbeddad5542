"""A Slurm for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.slurm import Slurm, slurm


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm")) as made:
        yield made
