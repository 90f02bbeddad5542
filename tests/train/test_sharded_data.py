"""Data by shard: each sample once per epoch, through resizes, kills and other numbers of loading workers; Hugging Face's interfaces."""

from __future__ import annotations

import json
import multiprocessing
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, get_worker_info

from elastirun.train import DistributedDataParallel, ElasticDataLoader, ElasticShards, TrainError
from elastirun.train.data.shard_order import Progress, Rest
from tests.support.worlds import run

# -- the arithmetic -----------------------------------------------------------------------------------------------------


def advance(rng: random.Random, rest: Rest, lengths: list[int], before: list[Progress]) -> tuple[list[Progress], list[tuple[int, int]]]:
    """Let each stream read for a while; return their progress, and what they have read: (place, sample)."""
    after, seen = [], []
    for stream, progress in enumerate(before):
        wanted = rng.choice([0, 1, 3, 10, 1000])
        samples = [
            (Progress(number, at + 1), (place, at))
            for number, place, done in rest.part(stream, len(before), progress)
            for at in range(done, lengths[place])
        ]
        seen += [sample for _, sample in samples[:wanted]]
        after.append(samples[:wanted][-1][0] if samples[:wanted] else progress)
    return after, seen


@pytest.mark.parametrize(("seed", "most"), [*((seed, 64) for seed in range(40)), *((seed, 4) for seed in range(40, 60))])
def test_each_sample_once_whatever_becomes_of_the_world(seed: int, most: int) -> None:
    """Worlds of up to 64 ranks with up to three loading workers are killed at any moment, and resized: what was not saved is done again."""
    rng = random.Random(seed)
    lengths = [rng.choice([0, 1, 2, 5, 30]) for _ in range(rng.randint(0, 60))]
    every = Counter((place, at) for place, length in enumerate(lengths) for at in range(length))
    rest = saved = Rest(len(lengths))
    done = Counter[tuple[int, int]]()
    for _ in range(1000):
        streams = rng.randint(1, most) * rng.randint(1, 3)
        progress, pending = [Progress()] * streams, Counter[tuple[int, int]]()
        for _ in range(rng.randint(1, 6)):
            progress, seen = advance(rng, rest, lengths, progress)
            pending.update(seen)
            if rng.random() < 0.5:
                saved = rest.after(progress)
                ahead = max(one.shards for one in progress) - min(one.shards for one in progress)
                assert len(saved.open) <= len(rest.open) + streams * (ahead + 1)
                done, pending = done + pending, Counter()
        rest = saved
        if done == every:
            break
    assert done == every


def test_what_is_left_is_little_when_streams_are_alike() -> None:
    rest = Rest(1_000_000).after([Progress(1000, 5)] * 64)
    assert rest == Rest(1_000_000, 64 * 1001, tuple((64_000 + stream, 5) for stream in range(64)))
    assert rest.after([Progress(1)] * 64) == Rest(1_000_000, 64 * 1001) and len(Rest(3, 3)) == 0


# -- real loaders and ranks ---------------------------------------------------------------------------------------------


class Samples(IterableDataset[int]):
    """A shard like Hugging Face's IterableDataset: it takes a worker's part of itself, and skips."""

    def __init__(self, shard: int, begin: int = 0) -> None:
        self.shard, self.begin = shard, begin

    def skip(self, n: int) -> Samples:
        return Samples(self.shard, self.begin + n)

    def __iter__(self) -> Iterator[int]:
        if (info := get_worker_info()) is not None and info.id > 0:
            return iter(())
        return iter(range(100 * self.shard + self.begin, 100 * self.shard + LENGTHS[self.shard]))


def plain(shard: int) -> list[int]:
    return list(range(100 * shard, 100 * shard + LENGTHS[shard]))


LENGTHS = [7, 0, 12, 3, 1, 9, 4, 4, 10, 2, 6]
ALL = sorted(sample for shard in range(len(LENGTHS)) for sample in plain(shard))


def train(rank: int, world: int, path: str, halt: int, workers: int, read: Any) -> tuple[list[int], int, dict[str, Any]]:
    """Return the samples of this rank in ``halt`` steps at most, the epoch, and the state."""
    multiprocessing.process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have loading workers
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    start = {"multiprocessing_context": "fork"} if workers else {}  # its fork server would import torch again
    data = ElasticShards(range(len(LENGTHS)), read, 2 * world + 1, seed=3, num_workers=workers, **start)
    if Path(path).is_file():
        data.load_state_dict(json.loads(Path(path).read_text()))
    seen: list[int] = []
    for number, step in enumerate(data.steps(ddp), 1):
        ddp.zero_grad()
        mine: list[int] = []
        for batch in step:
            mine += batch.tolist()
            ddp(batch.float().unsqueeze(1)).mean().backward()
        assert len(mine) == step.samples <= 3
        total = torch.tensor([sum(mine), len(mine)], dtype=torch.float32)
        torch.distributed.all_reduce(total)
        assert ddp.module.weight.grad.item() == pytest.approx((total[0] / total[1]).item(), rel=1e-6)
        seen += mine
        if number == halt:
            break
    state = data.state_dict()
    if rank == 0:
        Path(path).write_text(json.dumps(state))
    return seen, data.epoch, state


@pytest.mark.parametrize(("workers", "read"), [((0, 0, 0), plain), ((2, 1, 2), Samples)])
def test_each_sample_once_on_real_ranks_with_loading_workers(tmp_path: Path, workers: tuple[int, ...], read: Any) -> None:
    """1, 3, then 2 ranks; the state is the same on every rank, and the next epoch begins by itself."""
    path, seen = str(tmp_path / "state.json"), list[int]()
    for world, halt, loading in zip((1, 3, 2), (4, 3, 0), workers, strict=True):
        found = run(world, train, path, halt, loading, read)
        assert len({json.dumps(state) for _, _, state in found}) == 1
        seen += [sample for part, _, _ in found for sample in part]
    assert sorted(seen) == ALL
    assert [(epoch, state["open"], state["next"]) for _, epoch, state in found] == [(1, [], 0)] * 2
    assert sorted(sample for part, _, _ in run(2, train, path, 0, 0, read) for sample in part) == ALL


def test_an_evaluation_leaves_the_position_as_it_is() -> None:
    data = ElasticShards(range(len(LENGTHS)), plain, 5, shuffle=False)
    assert [sample for batch in data for sample in batch.tolist()] == ALL
    assert data.state_dict()["next"] == 0 and data.epoch == 0


def test_the_order_of_shards_changes_with_the_epoch() -> None:
    data = ElasticShards(range(len(LENGTHS)), plain, 5)
    orders = []
    for data.epoch in (0, 1, 0):
        orders.append([sample for batch in data for sample in batch.tolist()])
    assert orders[0] == orders[2] != orders[1] and sorted(orders[0]) == sorted(orders[1]) == ALL


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: ElasticShards([1], plain, 0), "global_batch_size must be a whole number, 1 or more, not 0"),
        (lambda: ElasticShards([1], plain, 1, persistent_workers=True), "persistent_workers is not an argument"),
        (lambda: next(ElasticShards([1], plain, 1).steps(nn.Linear(1, 1))), "not torch's Linear"),  # type: ignore[arg-type]
        (lambda: ElasticShards([1], plain, 1).load_state_dict({}), "not the state of ElasticShards"),
        (lambda: ElasticShards([1], plain, 1).load_state_dict(ElasticShards([2], plain, 1).state_dict()), "of 1 other shards"),
        (lambda: ElasticShards([1], plain, 1).load_state_dict(ElasticShards([1, 2], plain, 1).state_dict()), "of 2 other shards"),
        (
            lambda: ElasticShards([1], plain, 1).load_state_dict({**ElasticShards([1], plain, 1).state_dict(), "open": [[0, 1]]}),
            "out of range",
        ),
    ],
)
def test_wrong_use_is_one_clear_error(wrong: Any, said: str) -> None:
    with pytest.raises(TrainError, match=said):
        wrong()


# -- Hugging Face's map-style datasets ----------------------------------------------------------------------------------


class Rows:
    """The interface of datasets.Dataset: rows are dicts, and a batch of rows is read at once."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, key: int) -> dict[str, Any]:
        return {"x": torch.full((2,), key), "name": f"row {key}"}

    def __getitems__(self, keys: list[int]) -> list[dict[str, Any]]:
        self.calls.append(keys)
        return [self[key] for key in keys]


@pytest.mark.parametrize("keyed", [False, True])
def test_a_dataset_of_hugging_face_works_as_it_is(keyed: bool) -> None:
    rows: Any = Rows()
    loader = ElasticDataLoader(rows, 4, rank=1, world_size=2, keyed_rng=keyed)
    batches: list[dict[str, Tensor]] = list(loader)
    assert [batch["x"].shape for batch in batches] == [(2, 2), (2, 2), (1, 2)]
    assert batches[0]["name"] == [f"row {int(x)}" for x in batches[0]["x"][:, 0]]
    assert [len(keys) for keys in rows.calls] == ([] if keyed else [2, 2, 1])
