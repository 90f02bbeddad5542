"""The examples of examples/mesh train as one process would, also when a node is killed and given back, and resume in other meshes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from elastirun.train import load_checkpoint
from tests.support.cluster import Cluster
from tests.support.until import PATIENCE, until

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "mesh"
LAYOUTS = {
    "tensor_parallel.py": ("dp=auto,tp=2", ()),
    "pipeline.py": ("dp=auto,pp=2,tp=1", ()),
    "pipeline.py zero bubble": ("dp=auto,pp=2,tp=1", ("--schedule=ScheduleZBVZeroBubble",)),
    "pipeline.py all three": ("dp=auto,pp=2,tp=2", ()),
    "fsdp.py": ("replicate=auto,shard=2", ()),
}
PACED = """
import os, runpy, sys, time
import torch
real = time.sleep
time.sleep = lambda seconds: real(0.0 if seconds == 0.1 and os.path.exists({free!r}) else seconds)
sys.argv = [{script!r}, *{arguments!r}]
sys.path.insert(0, {folder!r})
runpy.run_path({script!r}, run_name="__main__")
"""  # the pause after each step ends for good when a file appears


def common() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mesh_common", FOLDER / "common.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def alone(steps: int) -> tuple[Any, dict[int, float]]:
    """Train in this process; return the model and the loss of each step."""
    torch.set_num_threads(1)  # two would wait for each other beside the job
    example = common()
    model, losses = example.Transformer(), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=example.RATE, momentum=0.9)
    loader = example.ElasticDataLoader(example.Sequences(), global_batch_size=48, rank=0, world_size=1)
    while len(losses) < steps:
        for _, tokens in loader:
            optimizer.zero_grad()
            loss = example.loss_of(model(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses[len(losses) + 1] = loss.detach().item()
            if len(losses) == steps:
                break
    return model, losses


def off(model: Any, checkpoint: Path) -> float:
    """Return how far the parameters in a checkpoint are off those of ``model``."""
    saved = common().Transformer()
    load_checkpoint(checkpoint, {"model": saved})
    return max(float((a - b).detach().abs().max()) for a, b in zip(saved.parameters(), model.parameters(), strict=True))


def rows(log: Path) -> list[dict[str, Any]]:
    """Return the steps of all ranks, as far as their lines are whole: number, place in the mesh, samples, and loss."""
    lines = [line for path in sorted(log.iterdir()) for line in path.read_text().splitlines(keepends=True)]
    return [json.loads(line) for line in lines if line.endswith("\n")]


def run_example(folder: Path, layout: str, nproc: int, steps: int) -> str:
    mesh, more = LAYOUTS[layout]
    (folder / "log").mkdir(exist_ok=True)
    options = ["--standalone", f"--nproc-per-node={nproc}", f"--mesh={mesh}"]
    script = [str(FOLDER / layout.split()[0]), f"--steps={steps}", f"--checkpoint={folder}/c", f"--log={folder}/log", *more]
    done = subprocess.run(
        [sys.executable, "-m", "elastirun", *options, *script], capture_output=True, text=True, timeout=PATIENCE, cwd=folder
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.daily(10)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_example_trains_as_one_process_and_resumes_at_another_size(layout: str, tmp_path: Path) -> None:
    unit = 4 if "three" in layout else 2
    run_example(tmp_path, layout, 2 * unit, 12)
    said = run_example(tmp_path, layout, unit, 20)
    model, losses = alone(20)
    assert "step 20: loss" in said and off(model, tmp_path / "c" / "step-00000020") < 1e-6
    means: dict[int, list[float]] = {}
    for row in rows(tmp_path / "log"):
        if row["loss"] is not None:
            means.setdefault(row["step"], []).append(row["loss"])
    assert {step: sum(each) / len(each) for step, each in means.items()} == pytest.approx(losses, abs=1e-6)


@pytest.mark.daily(9)
@pytest.mark.parametrize("layout", ["tensor_parallel.py", "pipeline.py", "fsdp.py"])
def test_a_node_is_killed_and_given_back(layout: str, nodes: Cluster, tmp_path: Path) -> None:
    mesh, more = LAYOUTS[layout]
    log, free, steps = tmp_path / "log", tmp_path / "free", 100
    log.mkdir()
    arguments = [f"--steps={steps}", f"--checkpoint={tmp_path}/c", f"--log={log}", "--pause=0.1", *more]
    nodes.script.write_text(PACED.format(free=str(free), script=str(FOLDER / layout.split()[0]), arguments=arguments, folder=str(FOLDER)))
    options = (f"--mesh={mesh}", "--max-restarts=3", "--last-call=30")
    agents = nodes.agents_at_once((1, 2), *options, nnodes="1:2", nproc=2)
    until(lambda: any(row["step"] >= 12 for row in rows(log)), "steps", state=nodes.everything)
    agents[1].kill()
    nodes.says(1, "round 2: 1 node, 2 workers")
    both, one = (12, 24) if layout == "fsdp.py" else (24, 48)  # samples of a rank, with both nodes and with one
    until(lambda: any(len(row["samples"]) == one for row in rows(log)), "steps of one replica", state=nodes.everything)
    nodes.agent(3, *options, nnodes="1:2", nproc=2)
    nodes.says(1, "round 3: 2 nodes, 4 workers")
    free.touch()
    assert [nodes.ends(nodes.agents[at]) for at in (0, 2)] == [0, 0], nodes.everything()
    model, _ = alone(steps)
    assert off(model, tmp_path / "c" / f"step-{steps:08}") < 1e-5
    found = rows(log)
    assert {len(row["samples"]) for row in found} == {both, one}
    assert max(row["step"] for row in found) == steps
    for step in range(1, steps + 1):
        worlds = [
            {(*row["place"],): row["samples"] for row in found if row["step"] == step and len(row["samples"]) == n} for n in (both, one)
        ]
        seen = [once_per_replica(places, layout) for places in worlds if places]
        # A step that a loss undoes comes again in another world, with the same samples. Who was killed may not have written its line.
        everyone = max(seen, key=len)
        assert len(everyone) == 48 and all(each <= everyone for each in seen), step


def once_per_replica(places: dict[tuple[int, ...], list[int]], layout: str) -> set[int]:
    """Return the samples of a step: the same on all ranks of a replica, and each on one replica alone."""
    shares: dict[tuple[int, ...], list[int]] = {}
    for place, samples in places.items():
        assert shares.setdefault(place if layout == "fsdp.py" else place[:1], samples) == samples
    everyone = [sample for samples in shares.values() for sample in samples]
    assert len(everyone) == len({*everyone}) <= 48
    return {*everyone}
