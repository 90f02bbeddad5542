"""What may happen to a Job, each from its start to its end. A function's docstring is the promise that it checks."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable

import yaml

from tests.deploy import manifests
from tests.deploy.containers.jobs import Cluster, Job
from tests.deploy.containers.pods import PATIENCE
from tests.deploy.manifests import Manifest
from tests.support.etcd_server import BINARY
from tests.support.until import until

RIGHT = 95.0  # percent of the held-out images; an undisturbed training reaches 97 to 98
EPOCHS = 12  # of 21 steps each

# The example, slowly until a file is removed: what is to happen then happens during the training, however busy the machine is.
SLOWLY = """
import os, runpy, sys, time
sleep, SLOW = time.sleep, "/checkpoints/slow"
time.sleep = lambda seconds: sleep(seconds) if seconds != 1.0 or os.path.exists(SLOW) else None
sys.argv = ["examples/train.py", "--checkpoint=/checkpoints/digits", "--pause=1.0", "--every=2", *sys.argv[1:]]
runpy.run_path("examples/train.py", run_name="__main__")
"""

Scenario = Callable[[Cluster], Job]


def overlay(name: str) -> list[Manifest]:
    """Return an overlay. ``etcd-smoke`` is cpu-smoke with what the overlay etcd changes in the base."""
    documents = manifests.overlay("cpu-smoke")
    if name == "etcd-smoke":
        etcd, own = container_of(manifests.overlay("etcd")), container_of(documents)
        variables = {entry["name"]: entry["value"] for entry in etcd["env"] if "value" in entry}
        set_variables(own, **{name: variables[name] for name in ("PET_RDZV_BACKEND", "PET_RDZV_ENDPOINT", "PET_RDZV_CONF")})
        own["volumeMounts"] = etcd["volumeMounts"]
        pod, other = (manifests.only(found, "Job")["spec"]["template"]["spec"] for found in (documents, manifests.overlay("etcd")))
        pod["volumes"] += [volume for volume in other["volumes"] if volume["name"] == "etcd-tls"]
    return documents


def smoke(size: int = 3, name: str = "cpu-smoke", **variables: str) -> list[Manifest]:
    """Return the manifests of the overlay cpu-smoke with another number of pods and more variables."""
    documents = overlay(name)
    spec = manifests.only(documents, "Job")["spec"]
    spec["completions"] = spec["parallelism"] = size
    # The first round waits for all pods. A longer wait than the default, for a busy machine.
    set_variables(container_of(documents), **{"PET_NNODES": f"1:{size}", "PET_LAST_CALL": "30", **variables})
    return documents


def serve_etcd(cluster: Cluster) -> None:
    """Start the three members of deploy/kubernetes/etcd, with its script's certificates and this machine's etcd."""
    folder = manifests.FOLDER / "etcd"
    script = subprocess.run(["sh", str(folder / "make-certificates.sh"), "1"], capture_output=True, text=True, timeout=60)
    assert script.returncode == 0, script.stderr
    secrets = [document for document in yaml.safe_load_all(script.stdout) if document]
    members = cluster.serve([*manifests.render(folder), *secrets], ["--volume", f"{BINARY}:/usr/bin/etcd:ro"])
    for index in range(3):
        members.at(index).says("serving client traffic|ready to serve client requests")


def slow(size: int = 3, name: str = "cpu-smoke", **variables: str) -> list[Manifest]:
    """Return the same for a training that goes on slowly until ``hurry`` is called."""
    documents = smoke(size, name, **variables)
    container_of(documents)["args"] = ["--no-python", "python3", "-c", SLOWLY, f"--epochs={EPOCHS}"]
    return documents


def start_slowly(cluster: Cluster, documents: list[Manifest], machines: int | None = None) -> Job:
    (cluster.claim("smoke-train") / "slow").touch()
    return cluster.apply(documents, machines=machines)


def saved(cluster: Cluster, after: int = 0) -> None:
    """Wait until there is a checkpoint that counts, of a step later than ``after``."""
    folder = cluster.claim("smoke-train") / "digits"

    def steps() -> list[int]:
        return [int(path.parent.name.removeprefix("step-")) for path in folder.glob("step-*/commit.json")]

    until(lambda: max(steps(), default=0) > after, f"a checkpoint after step {after}", PATIENCE)


def hurry(cluster: Cluster) -> None:
    (cluster.claim("smoke-train") / "slow").unlink()


def container_of(documents: list[Manifest]) -> Manifest:
    (found,) = manifests.only(documents, "Job")["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def set_variables(container: Manifest, **variables: str) -> None:
    container["env"] = [entry for entry in container["env"] if entry["name"] not in variables]
    container["env"] += [{"name": name, "value": value} for name, value in variables.items()]


def trained(job: Job) -> None:
    """Check that the Job is complete and the model what it should be."""
    assert job.ends() == "Complete", job.story()
    found = re.findall(r"test accuracy ([\d.]+) %", job.output)
    assert found and float(found[-1]) >= RIGHT, job.story()


def succeeded(job: Job, index: int, which: int = 0) -> bool:
    """Return whether a pod ended with 0, or was deleted because another one had: the success of one is that of the Job."""
    pod = job.at(index, which)
    return pod.phase == "Succeeded" or (pod.deleted and pod.code == 143)


def plain(cluster: Cluster) -> Job:
    """Three pods train to the end."""
    job = cluster.apply(smoke())
    trained(job)
    assert len(job.pods) == 3 and all(succeeded(job, index) for index in range(3)), job.story()
    return job


def eviction(cluster: Cluster) -> Job:
    """An evicted pod ends with 143, uses up no retry, and its replacement joins under the same name. Probes are green all the time."""
    job = start_slowly(cluster, slow())
    job.at(0).says("3 workers on cpu")
    assert [job.at(1).get(path)[0] for path in ("/healthz", "/readyz", "/status")] == [200, 200, 200]
    metrics = job.at(1).get("/metrics")[1]
    assert "\nelastirun_world_size 3.0\n" in metrics or "prometheus-client is not installed" in metrics, metrics
    saved(cluster)
    before = len(job.at(0).lines)
    job.at(1).terminate(disruption=True)
    assert job.at(1).ends() == 143, job.story()
    job.at(0).says("3 workers on cpu: going on after step", before)
    hurry(cluster)
    trained(job)
    assert len(job.pods) == 4 and all(succeeded(job, index, which) for index, which in ((0, 0), (1, 1), (2, 0))), job.story()
    assert not job.retries(1), job.story()
    return job


def raising_script(cluster: Cluster) -> Job:
    """A script that raises fails the Job at once, and the pod's status names the exception."""
    documents = smoke(PET_MAX_RESTARTS="0")
    container_of(documents)["args"] = ["--no-python", "python3", "-c", "raise ValueError('no such corpus')"]
    job = cluster.apply(documents)
    assert job.ends().startswith("Failed: PodFailurePolicy"), job.story()
    failed = [pod for pod in job.pods if pod.code == 1]
    assert failed, job.story()
    for pod in failed:
        said = json.loads(pod.termination_message)
        assert (said["verdict"], said["error"]) == ("failed", "ValueError: no such corpus"), pod.termination_message
    return job


def killed_agent(cluster: Cluster) -> Job:
    """A killed agent ends the whole pod with 137, which counts; the others go on, and the replacement joins."""
    job = start_slowly(cluster, slow())
    job.at(0).says("3 workers on cpu")
    job.at(2).do("kill", "--signal", "KILL")
    assert job.at(2).ends() == 137, job.story()
    job.at(2, which=1).says("round .* nodes")
    hurry(cluster)
    trained(job)
    assert job.retries(2) == 1 and len(job.pods) == 4, job.story()
    return job


def paused(cluster: Cluster) -> Job:
    """A pod that falls silent does not answer its probes; the others go on without it. When it wakes up it is a new node of the job."""
    job = start_slowly(cluster, slow())
    job.at(0).says("3 workers on cpu")
    saved(cluster)
    job.at(2).do("pause")
    job.at(0).says("2 workers on cpu: going on after step")
    assert job.at(2).get("/healthz", patience=2)[0] == 0
    assert job.at(0).get("/healthz")[0] == 200
    before = len(job.at(0).lines)
    job.at(2).do("unpause")
    job.at(0).says("3 workers on cpu: going on after step", before)
    hurry(cluster)
    trained(job)
    assert len(job.pods) == 3, job.story()
    return job


def scaled(cluster: Cluster) -> Job:
    """Two pods become four, then three: the number of workers follows, and the pod with the highest index leaves with 143."""
    job = start_slowly(cluster, slow(size=2, PET_NNODES="2:4", PET_LAST_CALL="0.5"))
    job.at(0).says("2 workers on cpu")
    saved(cluster)
    job.scale(4)
    job.at(0).says("4 workers on cpu: going on after step")
    before = len(job.at(0).lines)
    job.scale(3)
    assert job.at(3).ends() == 143, job.story()
    job.at(0).says("3 workers on cpu: going on after step", before)
    hurry(cluster)
    trained(job)
    assert len(job.pods) == 4 and not any(job.retries(index) for index in range(4)), job.story()
    return job


def scale_command(cluster: Cluster) -> Job:
    """Calls of `elastirun scale` in a pod: 2 starts the first round while two of four pods are Pending; 4 and 3 lose no step."""
    (cluster.claim("smoke-train") / "train.py").write_text(SLOWLY)
    settings = {"PET_LAST_CALL": f"{10 * PATIENCE:g}", "PET_LOG_DIR": "/checkpoints/logs", "PET_PRELOAD": "torch,sklearn.datasets"}
    documents = smoke(size=4, **settings)
    container_of(documents)["args"] = ["/checkpoints/train.py", f"--epochs={EPOCHS}"]
    job = start_slowly(cluster, documents, machines=2)
    job.at(0).says("2 of at most 4 nodes joined")
    scale(job, 2, "2 joined", where=0)
    saved(cluster)
    job.place(4)
    for index in (2, 3):
        job.at(index).says("round 1 has its 2 nodes; this node is a spare")
    scale(job, 4, "2 in the round", where=3)  # a spare
    ended = [int(step) for step in re.findall(r"all workers stop after step (\d+)", job.at(0).output)]
    saved(cluster, after=ended[0])
    scale(job, 3, "4 in the round", where=1)
    job.at(3).says("round 3 has its 3 nodes; this node is a spare")
    hurry(cluster)
    trained(job)
    assert len(job.pods) == 4 and all(succeeded(job, index) for index in range(4)), job.story()
    ended, began = (re.findall(rf"{text} after step (\d+)", job.at(0).output) for text in ("all workers stop", "going on"))
    assert ended == began and len(began) == 2, job.story()
    lines = [json.loads(line) for path in cluster.claim("smoke-train").glob("logs/*/events.jsonl") for line in path.open()]
    assert {line["repeated"] for line in lines if line["event"] == "round_spent"} == {0}, job.story()
    causes = {(line["round"], line["cause"]) for line in lines if line["event"] == "broken"}
    assert causes == {(1, "join"), (2, "join")}, causes
    return job


def scale(job: Job, count: int, now: str, where: int) -> None:
    """Call `elastirun scale` in the pod of index ``where``, and wait until so many workers train."""
    before, called = len(job.at(0).lines), time.monotonic()
    printed = job.at(where).run("elastirun", "scale", str(count))
    assert printed.endswith(f"': {count} nodes wanted, {now}"), printed
    for index in range(count):
        job.at(index).says(rf"round \d+: {count} nodes, {count} workers")
    begun = time.monotonic()
    job.at(0).says(f"{count} workers on cpu", before)
    job.note(f"scaled to {count}: round {begun - called:.1f} s after the call, training {time.monotonic() - called:.1f} s after")


def lost_store(cluster: Cluster) -> Job:
    """Without etcd the store moves when index 0 is killed with its guard: no other pod ends, and its replacement finds the job."""
    job = start_slowly(cluster, slow())
    job.at(0).says("3 workers on cpu")
    saved(cluster)
    job.at(0).do("kill", "--signal", "KILL")
    assert job.at(0).ends() == 137, job.story()
    job.at(0, which=1).says("the store of this job has moved to")
    job.at(0, which=1).says("round .* 3 nodes")
    hurry(cluster)
    trained(job)
    assert job.codes(0)[0] == 137 and len(job.pods) == 4 and job.retries(0) == 1, job.story()
    return job


def evicted_store(cluster: Cluster) -> Job:
    """Without etcd an evicted index 0 hands the store over: no other pod ends, and its replacement, at another address, finds the job."""
    job = start_slowly(cluster, slow())
    job.at(0).says("3 workers on cpu")
    saved(cluster)
    job.at(0).terminate(disruption=True)
    assert job.at(0).ends() == 143, job.story()
    job.at(0, which=1).says("the store of this job has moved to")
    job.at(0, which=1).says("round .* 3 nodes")
    hurry(cluster)
    trained(job)
    assert len(job.pods) == 4 and not any(job.retries(index) for index in range(3)), job.story()
    return job


def annotated(cluster: Cluster) -> Job:
    """The annotation for a number of nodes: 2 of 4 pods begin at once, then 4 go on after the same step, then 3; all pods stay."""
    documents = slow(size=4, PET_NNODES="1:5", PET_LAST_CALL=f"{10 * PATIENCE:g}")
    manifests.only(documents, "Job")["spec"]["template"]["metadata"]["annotations"] = {"elastirun.io/nodes": "2"}
    job = start_slowly(cluster, documents)
    until(lambda: "2 workers on cpu" in job.output, "2 workers", PATIENCE, state=job.story)
    saved(cluster)
    job.annotate("4")
    until(lambda: "4 workers on cpu: going on after step" in job.output, "4 workers", PATIENCE, state=job.story)
    job.annotate("3")
    until(lambda: "3 workers on cpu: going on after step" in job.output, "3 workers", PATIENCE, state=job.story)
    hurry(cluster)
    trained(job)
    assert len(job.pods) == 4 and not any(job.retries(index) for index in range(4)), job.story()
    ended, began = (sorted(re.findall(rf"{text} after step (\d+)", job.output)) for text in ("all workers stop", "going on"))
    assert ended == began and len(began) == 2, job.story()
    return job


def lost_first_index(cluster: Cluster) -> Job:
    """With etcd index 0 is a pod like any other: when it is killed the others go on, and its replacement joins."""
    serve_etcd(cluster)
    job = start_slowly(cluster, slow(name="etcd-smoke"))
    job.at(0).says("3 workers on cpu")
    job.at(0).do("kill", "--signal", "KILL")
    assert job.at(0).ends() == 137, job.story()
    job.at(0, which=1).says("round .* 3 nodes")
    hurry(cluster)
    trained(job)
    assert job.codes(0)[0] == 137 and len(job.pods) == 4 and job.retries(0) == 1, job.story()
    return job


# A worker without torch, which ends when a file is there. The agent of a sick machine is a real one that cannot kill a worker.
PATIENT = """
import os, signal, time
if os.environ.get("DEAF"): signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("at work, world size", os.environ["WORLD_SIZE"], flush=True)
while not os.path.exists("/checkpoints/done"): time.sleep(0.1)
"""
SICK = """
import os
if os.environ["JOB_COMPLETION_INDEX"] == "2" and os.path.exists("/checkpoints/sick"):
    os.unlink("/checkpoints/sick")  # the replacement runs on another machine
    os.environ["DEAF"] = "1"
    from elastirun.agent.processes import process
    from elastirun.agent.workers import workers
    process.Process.kill_group = lambda self: None  # as if the worker hung in the kernel
    workers.GIVE_UP = 1.0
from elastirun.cli.main import main
main()
"""


def patient(**variables: str) -> list[Manifest]:
    documents = smoke(**variables)
    container_of(documents)["args"] = ["--no-python", "python3", "-c", PATIENT]
    return documents


def sick_machine(cluster: Cluster) -> Job:
    """An agent whose machine cannot kill a worker ends with 202, which counts; its replacement joins, and the message names the cause."""
    documents = patient(PET_GRACE="1")
    container_of(documents)["command"] = ["python3", "-c", SICK]
    (cluster.claim("smoke-train") / "sick").touch()
    job = cluster.apply(documents)
    job.at(2).says("at work, world size 3")
    job.at(1).do("kill", "--signal", "KILL")
    assert job.at(2).ends() == 202, job.story()
    assert json.loads(job.at(2).termination_message)["verdict"] == "sick", job.at(2).termination_message
    job.at(2, which=1).says("at work, world size 3")
    (cluster.claim("smoke-train") / "done").touch()
    assert job.ends() == "Complete" and job.retries(2) == 1, job.story()
    return job


def excluded(cluster: Cluster) -> Job:
    """A pod whose fixed rank another one holds ends with 204: its index has failed for good, and the job succeeds without it."""
    documents = patient(PET_RDZV_BACKEND="static", PET_MASTER_ADDR="smoke-train-0.smoke-train", PET_NNODES="2", PET_LAST_CALL="0.5")
    job = cluster.apply(documents, lambda index: ["--env", f"PET_NODE_RANK={min(index, 1)}"])
    job.at(0).says("at work, world size 2")
    one, other = job.at(1), job.at(2)
    while one.code is None and other.code is None:
        time.sleep(0.1)
    (cluster.claim("smoke-train") / "done").touch()
    assert job.ends() == "Complete" and len(job.failed) == 1 and len(job.pods) == 3, job.story()
    assert sorted({one.code, other.code} - {143}) == [0, 204], job.story()
    return job


def strange_surroundings(cluster: Cluster) -> Job:
    """Another user than the image's, no HOME, 64 MB of shared memory and a /proc that hides other users' processes: it trains as well."""
    documents = smoke()
    container = container_of(documents)
    container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] != "shm"]
    pod = manifests.only(documents, "Job")["spec"]["template"]["spec"]
    pod["volumes"] = [volume for volume in pod["volumes"] if volume["name"] != "shm"]
    pod["securityContext"] |= {"runAsUser": 12345, "runAsGroup": 12345}
    options = ["--unsetenv", "HOME", "--shm-size", "64m", "--security-opt", "proc-opts=hidepid=2"]
    job = cluster.apply(documents, lambda index: options)
    trained(job)
    assert len(job.pods) == 3, job.story()
    return job


# Leaves orphans, which process 1 must reap, and looks for dead ones that nobody reaped.
ORPHANS = """
import os, time
for _ in range(20): os.system("(setsid sleep 0.1 &)")
time.sleep(1)
def state(pid):
    try: return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
    except OSError: return ""
print("process 1 is", open("/proc/1/cmdline").read().split(chr(0))[1], flush=True)
print("zombies:", sum(state(pid) == "Z" for pid in os.listdir("/proc") if pid.isdecimal()), flush=True)
while True: time.sleep(1)
"""


def process_one(cluster: Cluster) -> Job:
    """The agent is process 1: it reaps what workers leave, passes SIGTERM on, and all pods end with 143 within their grace."""
    documents = smoke()
    container_of(documents)["args"] = ["--no-python", "python3", "-c", ORPHANS]
    job = cluster.apply(documents)
    for index in range(3):
        assert job.at(index).says("zombies").endswith("zombies: 0"), job.story()
        assert "elastirun" in job.at(index).says("process 1 is"), job.story()
    job.scale(0)
    begun = time.monotonic()
    assert [job.at(index).ends() for index in range(3)] == [143] * 3, job.story()
    assert time.monotonic() - begun < 90, job.story()
    return job


ALL: dict[str, Scenario] = {
    "plain": plain,
    "eviction": eviction,
    "raising-script": raising_script,
    "killed-agent": killed_agent,
    "paused": paused,
    "scaled": scaled,
    "scale-command": scale_command,
    "sick-machine": sick_machine,
    "excluded": excluded,
    "lost-store": lost_store,
    "evicted-store": evicted_store,
    "lost-first-index": lost_first_index,
    "strange-surroundings": strange_surroundings,
    "process-one": process_one,
    "annotated": annotated,
}
