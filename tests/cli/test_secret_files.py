"""Secrets in files: bounded reads, pipes that end and pipes that do not, and advice if others can read a secret."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from elastirun.cli import secret_files
from elastirun.cli.secret_files import read_secret_file
from tests.support.until import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
SECRET = b"correct horse battery staple\n"


@pytest.mark.parametrize(("mode", "advice"), [(0o600, ""), (0o400, ""), (0o640, "chmod 600 it"), (0o604, "chmod 600 it")])
def test_a_file_that_others_can_read_comes_with_advice(tmp_path: Path, mode: int, advice: str) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET)
    file.chmod(mode)
    found = read_secret_file(str(file), 100)
    assert found.content == SECRET
    assert found.advice.endswith(advice) and bool(found.advice) == bool(advice)
    assert read_secret_file(str(file), 5).content == SECRET[:5]


@pytest.mark.parametrize(("mode", "advised"), [(0o644, True), (0o440, False), (0o400, False)])
def test_for_a_secret_mounted_by_kubernetes_the_advice_is_default_mode(tmp_path: Path, mode: int, advised: bool) -> None:
    """Kubernetes makes the file a link to ``..data/NAME``, and ``..data`` a link to a folder named by date; fsGroup lets the group read."""
    (tmp_path / "..2026_01_02").mkdir()
    (tmp_path / "..2026_01_02" / "token").write_bytes(SECRET)
    (tmp_path / "..2026_01_02" / "token").chmod(mode)
    (tmp_path / "..data").symlink_to("..2026_01_02")
    (tmp_path / "token").symlink_to("..data/token")
    advice = read_secret_file(str(tmp_path / "token"), 100).advice
    assert ("defaultMode: 0400" in advice) == advised and "chmod" not in advice


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    read, write = os.pipe()

    def slowly() -> None:
        for part in (SECRET[:7], SECRET[7:]):
            os.write(write, part)
        os.close(write)

    thread = threading.Thread(target=slowly)
    thread.start()
    assert read_secret_file(f"/proc/self/fd/{read}", 100) == secret_files.SecretFile(SECRET, "")
    thread.join()
    os.close(read)


def test_a_pipe_without_a_writer_is_an_error_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret_files, "PIPE_WAIT", 0.05)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="nothing more was written to it within 0.05 s"):
        read_secret_file(str(tmp_path / "pipe"), 100)


def test_process_substitution_gives_a_token(tmp_path: Path) -> None:
    """bash's <(...) is a pipe under /dev/fd."""
    command = f"{sys.executable} -m elastirun --dry-run --token-file=<(printf 0123456789abcdef0123) --no-python true"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")
