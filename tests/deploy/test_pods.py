"""The end of a container, as the containers' tests read it. No podman is needed."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.deploy.containers.pods import START_ERROR, Pod


class FakePodman:
    """Answers ``inspect`` with ``state``, and runs a program that ends with ``code`` in place of a container."""

    def __init__(self, state: str, code: int) -> None:
        self.state, self.code = state, code

    def __call__(self, *args: str, check: bool = True) -> str:
        assert args[0] == "inspect"
        return self.state

    def start(self, *args: str) -> subprocess.Popen[str]:
        return subprocess.Popen(["sh", "-c", f"exit {self.code}"], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("state", "code", "wanted"),
    [
        ("exited 3 false", 3, (3, False)),
        ("exited 137 true", 137, (137, True)),
        ("created 0 false", 127, (START_ERROR, False)),
        ("", 125, (125, False)),
    ],
)
def test_a_container_that_never_started_has_failed(tmp_path: Path, state: str, code: int, wanted: tuple[int, bool]) -> None:
    podman, told = FakePodman(state, code), list[Pod]()
    cluster = SimpleNamespace(new_address=lambda: "10.0.0.2", folder=tmp_path, podman=podman)
    pod = Pod(cast(Any, SimpleNamespace(name="job", cluster=cluster, tell=told.append)), 0)
    pod._process = podman.start()
    pod._follow()
    assert (pod.code, pod.oom_killed, told) == (*wanted, [pod])
    assert pod.phase == "Failed"
