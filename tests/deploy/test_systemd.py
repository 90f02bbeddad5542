"""deploy/systemd/elastirun@.service, read by systemd itself and compared with the agent's exit codes. No systemd runs."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

from elastirun.agent.failures.exit_codes import ExitCode
from elastirun.rendezvous.timing import Timing
from tests.support.until import PATIENCE

FOLDER = Path(__file__).parents[2] / "deploy/systemd"
UNIT = FOLDER / "elastirun@.service"


@pytest.fixture(scope="module")
def service() -> configparser.SectionProxy:
    parser = configparser.RawConfigParser()
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(UNIT.read_text())
    return parser["Service"]


def test_an_agent_starts_again_where_that_may_help(service: configparser.SectionProxy) -> None:
    final = {int(code) for code in ExitCode if 0 < code < 128} | {int(ExitCode.SICK)}
    assert service["Restart"] == "on-failure"
    assert {*map(int, service["RestartPreventExitStatus"].split())} == final
    assert service["SuccessExitStatus"] == str(ExitCode.signalled(15))


def test_the_agent_alone_is_told_to_stop_and_has_more_time_than_its_workers(service: configparser.SectionProxy) -> None:
    assert service["KillMode"] == "mixed" and float(service["TimeoutStopSec"]) >= Timing.grace + 10
    assert service["OOMPolicy"] == "continue"  # one killed worker is no end of the agent


def test_workers_reach_their_gpus(service: configparser.SectionProxy) -> None:
    """Each of these implies a list of allowed devices, or forbids code that compilers and CUDA make."""
    assert not {"PrivateDevices", "ProtectClock", "DevicePolicy", "DeviceAllow", "MemoryDenyWriteExecute"} & set(service)


def test_the_example_starts_the_script_with_options_from_variables(service: configparser.SectionProxy) -> None:
    lines = [line for line in (FOLDER / "digits.env").read_text().splitlines() if not line.startswith("#")]
    variables = dict(line.split("=", 1) for line in lines)
    assert service["EnvironmentFile"] == "/etc/elastirun/%i.env"
    assert service["ExecStart"].split() == ["/opt/elastirun/bin/elastirun", "$ARGUMENTS"]
    assert {*variables} - {"ARGUMENTS"} and all(name.startswith("PET_") for name in variables if name != "ARGUMENTS")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing (Debian: systemd)")
def test_systemd_can_read_the_unit(tmp_path: Path) -> None:
    path = tmp_path / UNIT.name
    path.write_text(UNIT.read_text().replace("/opt/elastirun/bin/elastirun", "/bin/true"))  # the program must be there
    command = ["systemd-analyze", "verify", "--man=no", str(path).replace("@", "@digits")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0 and str(tmp_path) not in done.stderr, done.stderr
