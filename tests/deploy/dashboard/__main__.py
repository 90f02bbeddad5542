"""Draws the dashboard of a real job of four nodes that goes through ten faults, as a browser shows it with Grafana's own components.

    python -m tests.deploy.dashboard docs/dashboard.png              ten faults on four nodes: 12 minutes or more
    python -m tests.deploy.dashboard OUT.png --prometheus http://HOST:9090 --last 3600     what a Prometheus has already

Needs npm of Node 20.11 or later, and chromium; for the job also prometheus and torch. npm fetches 440 MB into build/dashboard the first
time. A Grafana server is not needed: ``page/`` does what it does, with the panels' own queries (see docs/kubernetes.md#monitoring).

``--calm``: seconds of training between two faults. ``--keep``: where the job's logs and the data of Prometheus stay. Exit code 1: the page
was not drawn, or not all that the dashboard asks for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.deploy.manifests import FOLDER
from tests.support.cluster import free_port
from tests.support.until import until

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
DASHBOARD = FOLDER / "overlays" / "monitoring" / "elastirun.json"
NODES = ("node-a", "node-b", "node-c", "node-d")
SCRAPE = 3  # seconds from one scrape to the next
OPTIONS = [
    *("--nnodes=2:4", "--nproc-per-node=2", "--rdzv-id=llama-7b", "--max-restarts=12", "--hang-timeout=12", "--strikes=50"),
    *("--grace=5", "--last-call=1", "--set=restart-pause=0"),
]


class Job:
    """Agents of four nodes on loopback addresses, each with a health port that Prometheus scrapes. ``folder``: logs, orders, addresses."""

    def __init__(self, folder: Path, calm: float) -> None:
        self.folder, self.calm, self.store = folder, calm, free_port()
        self.agents: dict[str, tuple[subprocess.Popen[bytes], int]] = {}  # the running ones by node, with their health ports

    def start(self, node: str) -> None:
        """Start the agent of a node, at another port than the one before had: a new pod has a new address."""
        port, number = free_port(), NODES.index(node)
        where = [f"--rdzv-endpoint=127.0.0.1:{self.store}", f"--rdzv-conf=is_host={int(number == 0)}", f"--local-addr=127.0.0.{number + 1}"]
        where += [f"--node-name={node}", f"--health-port=127.0.0.1:{port}", f"--log-dir={self.folder}/logs"]
        command = [sys.executable, "-m", "elastirun", *OPTIONS, *where, str(HERE / "worker.py")]
        environment = {**os.environ, "TEST_FOLDER": str(self.folder), "TEST_NODE": node, "OMP_NUM_THREADS": "1"}
        with open(self.folder / f"{node}.said", "ab") as said:
            agent = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
        self.agents[node] = agent, port
        self.tell_prometheus()

    def tell_prometheus(self) -> None:
        path = self.folder / "targets.json"
        path.with_suffix(".new").write_text(json.dumps([{"targets": [f"127.0.0.1:{port}" for _, port in self.agents.values()]}]))
        path.with_suffix(".new").replace(path)

    def ends(self, node: str) -> None:
        """Wait for the end of a node's agent."""
        self.agents[node][0].wait(60)
        del self.agents[node]
        self.tell_prometheus()

    def stop(self) -> None:
        """End the job, and wait for its agents."""
        for agent, _ in self.agents.values():
            agent.terminate()
        for agent, _ in self.agents.values():
            agent.wait(60)

    def status(self) -> dict[str, Any]:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{self.agents[NODES[0]][1]}/status", timeout=5) as answer,
        ):
            found: dict[str, Any] = json.load(answer)
            return found
        return {"round": 0, "nodes": [], "steps": []}

    def trains(self, after: int) -> int:
        """Wait until the running nodes make steps in a later round than ``after``, and for the calm. Return the round."""
        print(time.strftime("%H:%M:%S"), f"round {after} is over", flush=True)

        def found() -> int:
            now = self.status()
            steps = [worker["steps"] for worker in now["steps"]]
            all_in = len(now["nodes"]) == len(self.agents) and steps and min(steps) > 5
            return int(now["round"]) if all_in and now["round"] > after else 0

        number = until(found, f"a round after {after}", 180, state=self.status, pause=0.3)
        time.sleep(self.calm)
        return number

    def kill(self, node: str, *local_ranks: int, signum: int = signal.SIGKILL) -> None:
        for local_rank in local_ranks:
            os.kill(int((self.folder / f"{node}-{local_rank}.pid").read_text()), signum)

    def leave(self, node: str) -> None:
        self.agents[node][0].terminate()
        self.ends(node)

    def lose(self, node: str) -> None:
        """Kill a node's agent, its guard and its workers at once."""
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environment = (process / "environ").read_bytes().split(b"\0")
                if {f"TEST_FOLDER={self.folder}".encode(), f"TEST_NODE={node}".encode()} <= set(environment):
                    os.kill(int(process.name), signal.SIGKILL)
        self.ends(node)


def go_through(job: Job) -> None:
    """Run the job with its ten faults. Six are on node-c."""
    for node in NODES:
        job.start(node)
    number = job.trains(0)
    faults: list[Callable[[], None]] = [
        lambda: job.kill("node-c", 1),
        lambda: job.kill("node-a", 0),
        lambda: (job.folder / "raise-node-c-0").touch(),
        lambda: job.kill("node-c", 0, 1, signum=signal.SIGSTOP),
        lambda: job.kill("node-c", 0),
        lambda: job.lose("node-d"),
        lambda: job.start("node-d"),  # no fault
        lambda: job.kill("node-b", 1),
        lambda: job.kill("node-c", 0, 1, signum=signal.SIGSTOP),
        lambda: job.leave("node-d"),
        lambda: job.start("node-d"),
    ]
    for fault in faults:
        fault()
        number = job.trains(number)
    (job.folder / "slow-node-c").touch()
    until(lambda: b"is a straggler" in (job.folder / "node-c.said").read_bytes(), "a straggler", 300, pause=1.0)
    time.sleep(job.calm)


@contextlib.contextmanager
def running(folder: Path, calm: float) -> Iterator[tuple[Job, str]]:
    """A job before its start, and the address of a Prometheus that scrapes it."""
    job, at = Job(folder, calm), f"127.0.0.1:{free_port()}"
    found = [{"files": [str(folder / "targets.json")], "refresh_interval": "1s"}]
    scrape = {"job_name": "agents", "scrape_interval": f"{SCRAPE}s", "scrape_timeout": f"{SCRAPE}s", "file_sd_configs": found}
    (folder / "prometheus.yaml").write_text(json.dumps({"scrape_configs": [scrape]}))
    options = [f"--web.listen-address={at}", f"--storage.tsdb.path={folder}/data", f"--config.file={folder}/prometheus.yaml"]
    with open(folder / "prometheus.said", "w") as said, subprocess.Popen(["prometheus", *options], stdout=said, stderr=said) as server:
        try:
            yield job, f"http://{at}"
        finally:
            job.stop()
            server.terminate()


def draw(out: Path, prometheus: str, begin: float, end: float, scrape: float, more: str) -> int:
    """Draw the dashboard with what Prometheus has of that time. Return 0; 1: something is missing on the page."""
    page = ROOT / "build" / "dashboard"
    shutil.copytree(HERE / "page", page, dirs_exist_ok=True)
    if not (page / "node_modules").exists():
        subprocess.run(["npm", "install", "--legacy-peer-deps", "--no-audit", "--no-fund", "--loglevel=error"], cwd=page, check=True)
    query = urllib.parse.urlencode({"from": begin, "to": end, "scrape": scrape, "width": 1600, "theme": "dark"})
    chromium = shutil.which("chromium") or shutil.which("google-chrome") or "chromium"
    return subprocess.run(["node", "draw.mjs", DASHBOARD, prometheus, out.absolute(), chromium, f"{query}&{more}"], cwd=page).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prometheus")
    parser.add_argument("--last", type=float, default=3 * 3600.0, help="seconds, with --prometheus")
    parser.add_argument("--scrape", type=float, default=15.0, help="seconds from one scrape to the next, with --prometheus")
    parser.add_argument("--more", default="", help="of the page's address: theme=light, width=1280, var-run_id=JOB")
    parser.add_argument("--calm", type=float, default=38.0)
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    if given.prometheus:
        return draw(given.out, given.prometheus, time.time() - given.last, time.time(), given.scrape, given.more)
    with tempfile.TemporaryDirectory() as temporary:
        try:
            with running(Path(temporary), given.calm) as (job, prometheus):
                began = time.time()
                go_through(job)
                end = time.time()
                job.stop()
                return draw(given.out, prometheus, began, end, SCRAPE, given.more)
        finally:
            if given.keep:
                shutil.copytree(temporary, given.keep, symlinks=True)


if __name__ == "__main__":
    sys.exit(main())
