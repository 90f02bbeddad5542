"""What the examples of this folder share: a small transformer, its data, and the loop with checkpoints that fit any other mesh."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.data import Dataset

from elastirun.train import Checkpointer, Drain, ElasticDataLoader, TrainState, clip_grad_norm_

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, SAMPLES = 32, 8, 32, 4, 4, 480
RATE = 0.1


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (
            make(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for make in (self.q, self.k, self.v)
        )  # the heads of this rank
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """A model whose layers have names, not places: a stage is what is left when others are deleted, and its tensors keep their names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleDict({str(at): Layer() for at in range(LAYERS)})
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "tokens"):
            x = self.tokens(x) + self.places(torch.arange(LENGTH, device=x.device))
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x

    def stage(self, number: int, count: int) -> Transformer:
        """Return stage ``number`` of ``count`` of a pipeline."""
        part = deepcopy(self)
        for at in range(LAYERS):
            if at * count // LAYERS != number:
                del part.layers[str(at)]
        if number > 0:
            del part.tokens, part.places
        if number < count - 1:
            del part.norm, part.head
        return part


def split(model: Transformer, tp: DeviceMesh) -> Transformer:
    """Divide the heads of the attention, and the rows and columns of the rest, over the ranks of ``tp``."""
    for layer in model.layers.values():
        columns, rows = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}, {name: RowwiseParallel() for name in ("out", "down")}
        parallelize_module(layer, tp, {**columns, **rows})
    return model


class Sequences(Dataset[tuple[int, Tensor]]):
    """Number sequences with a first number and a step of their own; the next one is to be found."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, (torch.arange(LENGTH + 1) * (1 + index % 7) + index) % VOCABULARY


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoint", default="runs/mesh", help="a folder that all nodes see")
    parser.add_argument("--every", type=int, default=5, help="steps from one checkpoint to the next")
    parser.add_argument("--schedule", default="Schedule1F1B", help="of the pipeline: a class of torch.distributed.pipelining.schedules")
    parser.add_argument("--log", help="a folder: each rank writes its place in the mesh, its samples and the loss of each step there")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    return parser.parse_args()


def train(
    args: argparse.Namespace, mesh: DeviceMesh, data: DeviceMesh, model: nn.Module, compute: Callable[[Tensor, Tensor], Tensor | None]
) -> nn.Module:
    """Train to the end, from the newest checkpoint on. ``data``: the dimensions over which samples are shared.

    ``compute`` takes inputs and targets, makes the gradients, and returns the mean loss, or None where another rank knows it.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    loader = ElasticDataLoader(Sequences(), global_batch_size=48, device_mesh=data)
    run = TrainState(model, optimizer, data=loader)
    checkpoints, drain = Checkpointer(args.checkpoint, every=args.every), Drain(optimizer)
    checkpoints.restore(run)
    names = mesh.mesh_dim_names or ()
    stages = mesh["pp"] if "pp" in names else None
    speaks = not any(at for name, at in zip(names, mesh.get_coordinate() or (), strict=True) if name != "pp")
    log = open(Path(args.log, f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{os.getpid()}"), "w") if args.log else None  # noqa: SIM115
    while run.step < args.steps:
        for numbers, tokens in loader:
            optimizer.zero_grad()
            loss = compute(tokens[:, :-1], tokens[:, 1:])
            clip_grad_norm_(model.parameters(), 1.0, across=stages)
            optimizer.step()
            run.step += 1
            if log is not None:
                done = {"step": run.step, "place": mesh.get_coordinate(), "samples": numbers.tolist()}
                print(json.dumps({**done, "loss": None if loss is None else loss.item()}), file=log, flush=True)
            checkpoints.save(run.step, run, now=drain.now)
            if drain.now:
                drain.leave()
            if loss is not None and run.step % 10 == 0 and speaks:
                print(f"step {run.step}: loss {loss.item():.4f}, mesh {dict(zip(names, mesh.shape, strict=True))}")
            if run.step >= args.steps:
                break
            time.sleep(args.pause)
    checkpoints.save(run.step, run, now=True)
    checkpoints.close()
    dist.destroy_process_group()
    return model
