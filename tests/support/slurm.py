"""Runs a Slurm cluster of this machine's own: one controller and some nodes, each in a network and process namespace of its own.

Needs root, what ``tests.support.hosts`` needs, and Debian's slurmctld, slurmd, slurm-client and munge (see ``missing``).
All state is in one folder. The daemons end with the process that made them, however that ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support import hosts
from tests.support.until import PATIENCE, until

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel", "squeue", "setpriv")
PACKAGES = "slurmctld slurmd slurm-client munge util-linux"

# Short times: a requeued job may begin after cred_expire (5 s, the least), and a node that does not answer is down after SlurmdTimeout.
# KillOnBadExit and JobRequeue are not Slurm's defaults: what a job needs, its script has to ask for.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/linear
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout={silence}
SlurmctldTimeout=10
InactiveLimit=0
MinJobAge=300
KillWait={kill_wait}
UnkillableStepTimeout=120
SchedulerParameters=sched_interval=1,sched_min_interval=100000,batch_sched_delay=0,bf_interval=1
KillOnBadExit=1
JobRequeue=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={nodes} CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes={nodes} Default=YES MaxTime=INFINITE PriorityTier=1 State=UP
PartitionName=urgent Nodes={nodes} MaxTime=INFINITE PriorityTier=2 State=UP
"""

OWN_PROCESSES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

# The first process of a namespace: it outlives the daemon, so that a node whose slurmd has died goes on.
FIRST = '"$@" & wait; exec sleep infinity'


class Slurm:
    """The cluster. Its nodes are ``h0``, ``h1``, ...; the controller runs on a host of its own behind them."""

    def __init__(self, folder: Path, count: int = 3, silence: int = 60, kill_wait: int = 30, more: str = "") -> None:
        self.folder, self.count = folder, count
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._started: dict[str, subprocess.Popen[str]] = {}
        self._hosts = hosts.Hosts(count + 1, folder)
        names = f"h[0-{count - 1}]" if count > 1 else "h0"
        try:
            text = CONFIGURATION.format(controller=f"h{count}", folder=folder, nodes=names, silence=silence, kill_wait=kill_wait)
            (folder / "slurm.conf").write_text(f"{text}{more}\n")
            (folder / "state").mkdir()
            self._start_munge()
            self.start("slurmctld", count, "slurmctld", "-D", "-c")
            for number in range(count):
                (folder / f"spool-h{number}").mkdir()
                self.start_node(number)
            self.await_idle()
        except BaseException:
            self.close()
            raise

    def start(self, name: str, number: int, *command: str) -> None:
        """Start a daemon on a host, in a process namespace of its own that ends with this process."""
        command = ("setpriv", "--pdeathsig=KILL", *self._hosts[number].inside(*OWN_PROCESSES, "sh", "-c", FIRST, name, *command))
        with open(self.folder / f"{name}.out", "a") as out:
            self._started[name] = subprocess.Popen(command, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, text=True)

    def start_node(self, number: int) -> None:
        """Start a node, again if it has been started before."""
        self.kill_node(number)
        self.start(f"node{number}", number, "slurmd", "-D", "-N", f"h{number}")

    def return_node(self, number: int) -> None:
        """Start a lost node again, and wait until jobs can have it.

        The controller may wait for two minutes that a job which is over has ended there; setting the node down ends this wait.
        """
        self.start_node(number)
        self.run("scontrol", "update", f"nodename=h{number}", "state=down", "reason=test")
        resume = self._hosts[self.count].inside("scontrol", "update", f"nodename=h{number}", "state=resume")

        def idle() -> bool:
            subprocess.run(resume, env=self.env, capture_output=True)  # refused until the node has come
            return self.nodes_in("idle") == self.count

        until(idle, f"h{number} to be idle", state=self.log, pause=0.2)

    def kill_node(self, number: int) -> None:
        """Kill every process of a node at once: slurmd, its steps, the agent and the workers."""
        node = self._started.pop(f"node{number}", None)
        if node is not None:
            node.kill()  # this is unshare; the kernel kills the first process of the namespace with it
            node.wait()

    def pids(self, number: int, program: str) -> list[int]:
        """Return the processes on a node that have ``program`` as a word of their command line."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # the process has ended meanwhile
                words = [os.path.basename(word) for word in (process / "cmdline").read_text().split("\0")]
                if program in words and os.readlink(process / "ns/net") == self._hosts[number].inode:
                    found.append(int(process.name))
        return found

    def kill(self, number: int, program: str) -> None:
        """Kill every process on a node that has ``program`` as a word of its command line, as by the kernel for memory."""
        for pid in self.pids(number, program):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def submit(self, *arguments: str, env: Mapping[str, str]) -> str:
        """Run sbatch with these arguments and return the job's number."""
        return self.run("sbatch", "--parsable", *arguments, env={**self.env, **env}).strip()

    def run(self, *command: str, env: Mapping[str, str] | None = None) -> str:
        """Run a client on the controller's host and return its output. Raises AssertionError when it fails."""
        command = tuple(self._hosts[self.count].inside(*command))
        done = subprocess.run(command, env=env or self.env, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """Return what ``scontrol show job`` says of a job."""
        words = self.run("scontrol", "-o", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def nodes_in(self, state: str) -> int:
        """Return how many nodes are in that state; 0 while the controller does not answer yet."""
        command = self._hosts[self.count].inside("sinfo", "-h", "-N", "-p", "main", "-t", state)
        return len(subprocess.run(command, env=self.env, capture_output=True, text=True).stdout.splitlines())

    def await_idle(self) -> None:
        """Wait until each node is idle."""
        until(lambda: self.nodes_in("idle") == self.count, f"{self.count} idle nodes", state=self.log, pause=0.1)

    def log(self) -> str:
        paths = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in paths)

    def close(self) -> None:
        for process in self._started.values():
            process.kill()
        for process in self._started.values():
            process.wait()
        self._hosts.close()

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        socket = self.folder / "munge.socket"
        self.start("munge", self.count, "munged", "--foreground", "--force", f"--socket={socket}", *files)
        until(socket.exists, "munge's socket", state=self.log)


def missing() -> str:
    """Return why this machine cannot run such a cluster; empty when it can."""
    if os.geteuid():
        return "Slurm's daemons are started as root"
    if absent := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"{', '.join(absent)} missing (Debian: {PACKAGES})"
    if reason := hosts.missing():
        return reason
    tried = subprocess.run([*OWN_PROCESSES, "true"], capture_output=True, text=True, timeout=60)
    return tried.stderr.strip() or "no namespace of processes can be made" if tried.returncode else ""


@contextmanager
def slurm(folder: Path, count: int = 3, silence: int = 60, kill_wait: int = 30, more: str = "") -> Iterator[Slurm]:
    made = Slurm(folder, count, silence, kill_wait, more)
    try:
        yield made
    finally:
        made.close()
