"""Saves and restores by real processes: what comes back is what was saved, at any world size, whatever happened to the files."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from elastirun.errors import CheckpointError, TrainError
from elastirun.train import Checkpointer, DistributedDataParallel, PerRank, TrainState, load_checkpoint
from elastirun.train.checkpoints import missing_ranks as waiting
from elastirun.train.checkpoints.publishing import Publisher
from elastirun.train.groups import connections as group_connections
from tests.support.worlds import Died, run


def make_run(seed: int = 0, width: int = 64) -> TrainState:
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    return TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), note={"of": ("us", 1.5)})


def train(state: TrainState, steps: int = 1) -> None:
    width = next(state["model"].parameters()).shape[1]
    for _ in range(steps):
        batch = torch.full((2, width), state.step / 10)
        state["optimizer"].zero_grad()
        state["model"](batch).square().sum().backward()
        state["optimizer"].step()
        state.step += 1


def content(state: TrainState) -> list[Any]:
    model = getattr(state["model"], "module", state["model"])
    moments = [value.clone() for entry in state["optimizer"].state.values() for value in entry.values()]
    return [*(param.detach().clone() for param in model.parameters()), *moments, state.step]


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in zip(a, b, strict=True))


# -- one process --------------------------------------------------------------------------------------------------------------


def test_what_is_restored_is_what_was_saved(tmp_path: Path) -> None:
    state = make_run()
    train(state, 3)
    saved = content(state)
    with_rng = torch.get_rng_state()
    checkpoints = Checkpointer(tmp_path / "c")
    assert checkpoints.restore(state) is None
    assert checkpoints.save(state.step, state)
    train(state)  # the state may change at once
    checkpoints.wait()
    checkpoints.close()
    fresh, again = make_run(seed=1), Checkpointer(tmp_path / "c")
    fresh["note"] = None
    torch.manual_seed(5)
    assert again.restore(fresh) == 3 == fresh.step
    assert same(content(fresh), saved) and fresh["note"] == {"of": ("us", 1.5)} and torch.equal(torch.get_rng_state(), with_rng)
    train(fresh)
    assert same(content(fresh), content(state))
    again.close()


def test_only_the_steps_that_are_due_are_saved_and_old_checkpoints_go(tmp_path: Path) -> None:
    state, checkpoints = make_run(), Checkpointer(tmp_path, keep=2, every=2)
    saved = []
    for _ in range(9):
        train(state)
        saved.append(checkpoints.save(state.step, state))
    checkpoints.close()
    assert saved == [False, True] * 4 + [False]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000006", "step-00000008"]
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith(("step-", ".staging-"))} <= {".lock"}
    again = Checkpointer(tmp_path)
    assert again.restore(make_run(), step=6) == 6
    with pytest.raises(CheckpointError, match="no checkpoint of step 4"):
        again.restore(make_run(), step=4)
    again.close()


def test_after_going_back_newer_work_counts_and_not_the_higher_step(tmp_path: Path) -> None:
    state, checkpoints = make_run(), Checkpointer(tmp_path, keep=9)
    for _ in range(4):
        train(state)
        checkpoints.save(state.step, state)
    checkpoints.close()
    back = Checkpointer(tmp_path, keep=9)
    assert back.restore(state, step=2) == 2
    train(state)
    saved = content(state)
    back.save(state.step, state)
    back.close()
    again = Checkpointer(tmp_path)
    assert again.restore(state) == 3 and same(content(state), saved)
    again.close()


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing", "no record"])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_taken(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    state, checkpoints = make_run(), Checkpointer(tmp_path)
    train(state)
    saved = content(state)
    checkpoints.save(1, state)
    train(state)
    checkpoints.save(2, state)
    checkpoints.close()
    victim = max((tmp_path / "step-00000002").glob("__*"))
    if damage == "flipped":
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
    elif damage == "truncated":
        os.truncate(victim, victim.stat().st_size // 2)
    elif damage == "missing":
        victim.unlink()
    else:
        (tmp_path / "step-00000002" / "commit.json").write_text("{")
    again = Checkpointer(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert again.restore(state) == 1
    assert same(content(state), saved)
    assert len(caplog.messages) == 1 and "step-00000002" in caplog.messages[0]
    assert (tmp_path / "damaged-step-00000002").is_dir()
    again.close()


def test_a_state_that_grows_gets_room(tmp_path: Path) -> None:
    state, checkpoints = make_run(), Checkpointer(tmp_path)
    checkpoints.save(1, state)  # the optimizer has no state yet
    train(state)
    state["more"] = torch.arange(1e6)
    checkpoints.save(2, state)
    state["note"] = "x" * 500_000
    checkpoints.save(3, state)
    checkpoints.wait()
    fresh = make_run(seed=1)
    fresh["more"] = torch.zeros(1_000_000)
    assert checkpoints.restore(fresh) == 3
    assert torch.equal(fresh["more"], state["more"]) and fresh["note"] == state["note"] and same(content(fresh), content(state))
    checkpoints.close()


def test_a_directory_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    checkpoints = Checkpointer(tmp_path / "file" / "c")
    with pytest.raises(CheckpointError, match="cannot be used for checkpoints: Not a directory"):
        checkpoints.restore(make_run())
    checkpoints.close()


def test_when_a_write_fails_training_goes_on_and_the_next_save_is_published(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state, checkpoints = make_run(), Checkpointer(tmp_path / "c")
    train(state)
    checkpoints.restore(state)
    (staging,) = (tmp_path / "c").glob(".staging-*")
    (staging / "step-00000001" / "values.json").mkdir(parents=True)  # in the way
    with caplog.at_level(logging.WARNING):
        checkpoints.save(1, state)
        with pytest.raises(CheckpointError, match="step 1 was not published"):
            checkpoints.wait()
    assert any("step 1 was not published" in message for message in caplog.messages)
    assert list(staging.iterdir()) == []
    for step in (1, 2, 2):  # the same step again, because it failed; a step that did not is not saved twice
        checkpoints.save(step, state)
        checkpoints.wait()
        assert checkpoints.stats()["published"] == step
    assert checkpoints.stats()["saves"] == 3
    checkpoints.close()


@pytest.mark.parametrize("handled", [False, True])
def test_the_end_of_a_script_whose_last_checkpoint_cannot_be_written_is_an_error(tmp_path: Path, handled: bool) -> None:
    """As on a full disk. An exception that the script is handling is not hidden by that."""
    state, checkpoints = make_run(), Checkpointer(tmp_path / "c")
    train(state)
    checkpoints.restore(state)
    (staging,) = (tmp_path / "c").glob(".staging-*")
    (staging / "step-00000001" / "values.json").mkdir(parents=True)  # in the way
    checkpoints.save(1, state, now=True)
    error, text = (ValueError, "the script's own") if handled else (CheckpointError, "step 1 was not published: ")
    with pytest.raises(error, match=text):
        try:
            if handled:
                raise ValueError("the script's own")
        finally:
            checkpoints.close()
    checkpoints.close()


def test_a_run_with_nothing_left_to_do_publishes_nothing(tmp_path: Path) -> None:
    state: dict[str, Any] = {"lr": 1.0}
    for step in (5, 5):  # the second run saves at its end, as the first one did
        checkpoints = Checkpointer(tmp_path)
        checkpoints.restore(state)
        assert checkpoints.save(step, state, now=True)
        checkpoints.close()
    assert [path.name.partition(".")[0] for path in tmp_path.glob("step-*")] == ["step-00000005"]
    checkpoints = Checkpointer(tmp_path)
    checkpoints.restore(state, 5)  # who names a step goes back to it: it is saved as the newest
    checkpoints.save(5, state, now=True)
    checkpoints.close()
    assert len([*tmp_path.glob("step-*")]) == 2


@pytest.mark.parametrize("wrong", [{"keep": 0}, {"every": 0}, {"every": 1.5}, {"memory_every": -1}])
def test_wrong_arguments_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(TrainError, match=f"{next(iter(wrong))} must be a whole number"):
        Checkpointer(tmp_path, **wrong)


def test_memory_of_one_process_is_no_directory(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"memory://runs/1 is the memory of one process: no other rank, and no writer, can use it"):
        Checkpointer("memory://runs/1")


@pytest.mark.parametrize("state", [None, [], 3])
def test_what_is_no_dict_cannot_be_restored(tmp_path: Path, state: Any) -> None:
    expected = f"restored into a dict like the one that was saved, not into {type(state).__name__}"
    checkpoints = Checkpointer(tmp_path)
    with pytest.raises(CheckpointError, match=expected):
        checkpoints.restore(state)
    with pytest.raises(CheckpointError, match=expected):
        load_checkpoint(tmp_path, state)
    checkpoints.close()


@pytest.mark.parametrize("step", [-1, 1.5, "3", True, 2**70])
def test_a_step_is_a_whole_number(tmp_path: Path, step: Any) -> None:
    with pytest.raises(TrainError, match="step must be a whole number"):
        Checkpointer(tmp_path / "c").save(step, {})
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("jagged", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_named_also_in_a_later_save(tmp_path: Path, jagged: bool) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged if jagged else torch.strided)
    checkpoints = Checkpointer(tmp_path)
    for step, value in enumerate((nested, torch.ones(2), nested)):
        if value is nested:
            with pytest.raises(CheckpointError, match=r"a\.b: a checkpoint cannot hold a nested tensor; save the list that its unbind"):
                checkpoints.save(step, {"a": {"b": value}})
        else:
            checkpoints.save(step, {"a": {"b": value}})
            checkpoints.wait()
    checkpoints.close()


def test_plain_values_have_a_limit(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path)
    with pytest.raises(CheckpointError, match="put large data into tensors"):
        checkpoints.save(1, {"text": "x" * (17 << 20)})
    checkpoints.close()


def test_where_all_are_damaged_nothing_begins_anew_by_itself(tmp_path: Path) -> None:
    state, checkpoints = make_run(), Checkpointer(tmp_path)
    checkpoints.save(1, state)
    checkpoints.close()
    next((tmp_path / "step-00000001").glob("__*")).write_bytes(b"")
    for _ in range(2):  # also when it is tried again
        again = Checkpointer(tmp_path)
        with pytest.raises(CheckpointError, match="only damaged checkpoints .damaged-step-00000001.: delete these"):
            again.restore(state)
        again.close()
    (tmp_path / "damaged-step-00000001").rename(tmp_path / "elsewhere")
    again = Checkpointer(tmp_path)
    assert again.restore(state) is None
    again.close()


def test_a_fork_leaves_the_writer_alone_and_a_closed_checkpointer_is_over(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(1, {"x": torch.ones(3)})
    checkpoints.wait()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            checkpoints.save(2, {})
        except TrainError:
            checkpoints.close()
            code = 0
        os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    checkpoints.save(3, {"x": torch.ones(3)})
    checkpoints.wait()
    checkpoints.close()
    assert checkpoints.stats()["published"] == 3
    with pytest.raises(TrainError, match="was closed"):
        checkpoints.save(4, {})


def test_a_value_per_rank_in_a_list_is_refused_at_once(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path)
    with pytest.raises(CheckpointError, match="v.1: a PerRank has to be an entry of a dict, not of a list"):
        checkpoints.save(1, {"v": [3, PerRank(3)]})
    checkpoints.close()


# -- several ranks ------------------------------------------------------------------------------------------------------------


def save_some(rank: int, world: int, folder: str, last: int) -> list[Any]:
    state, checkpoints = make_run(), Checkpointer(folder, keep=2)
    checkpoints.restore(state)
    while state.step < last:
        train(state)
        checkpoints.save(state.step, state)
    checkpoints.wait()
    found = [tensor.tolist() if isinstance(tensor, Tensor) else tensor for tensor in content(state)]
    checkpoints.close()
    return found


def test_a_run_goes_on_at_other_world_sizes(tmp_path: Path) -> None:
    for number, world in enumerate((2, 1, 3, 2), start=1):
        found = run(world, save_some, str(tmp_path), 3 * number)
        assert all(theirs == found[0] for theirs in found) and found[0][-1] == 3 * number
    undisturbed = run(1, save_some, str(tmp_path / "other"), 12)[0]
    assert len(undisturbed) == len(found[0])
    assert all(torch.allclose(torch.tensor(a), torch.tensor(b), atol=1e-5) for a, b in zip(undisturbed, found[0], strict=True))


def die_before_the_save(rank: int, world: int, folder: str) -> list[str]:
    state, checkpoints = make_run(), Checkpointer(folder)
    train(state)
    checkpoints.save(1, state)
    checkpoints.wait()
    train(state)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        checkpoints.save(2, state)
        checkpoints.wait(timeout=2.0)
    except (CheckpointError, RuntimeError):
        pass
    return sorted(path.name for path in Path(folder).glob("step-*"))


def test_without_one_rank_nothing_is_published(tmp_path: Path) -> None:
    names, died = run(2, die_before_the_save, str(tmp_path), died=True)
    assert names == ["step-00000001"] and isinstance(died, Died)


def own_numbers(rank: int, world: int, folder: str, save: bool) -> float:
    torch.manual_seed(rank)
    state, checkpoints = make_run(), Checkpointer(folder)
    torch.manual_seed(rank)
    if save:
        checkpoints.save(1, state)
        checkpoints.wait()
    else:
        torch.manual_seed(99)
        assert checkpoints.restore(state) == 1
    checkpoints.close()
    return float(torch.rand(()))


def test_each_rank_gets_its_own_random_numbers_back(tmp_path: Path) -> None:
    before = run(2, own_numbers, str(tmp_path), True)
    assert run(2, own_numbers, str(tmp_path), False) == before
    assert run(3, own_numbers, str(tmp_path), False)[:2] == before


# -- what others read and write -----------------------------------------------------------------------------------------------


ALONE = "ignore:torch.distributed is (disabled|unavailable)"


@pytest.mark.filterwarnings(ALONE)
def test_distributed_checkpoint_reads_a_published_checkpoint(tmp_path: Path) -> None:
    state, checkpoints = make_run(), Checkpointer(tmp_path)
    train(state, 2)
    checkpoints.save(2, state)
    checkpoints.close()
    into = {"model": {name: torch.zeros_like(tensor) for name, tensor in state["model"].state_dict().items()}, "step": 0}
    dcp.load(into, checkpoint_id=tmp_path / "step-00000002")
    assert into["step"] == 2 and all(torch.equal(into["model"][name], tensor) for name, tensor in state["model"].state_dict().items())


@pytest.mark.filterwarnings(ALONE)
@pytest.mark.parametrize("how", ["distributed checkpoint", "one file", "the model alone", "ours"])
def test_checkpoints_of_others_are_loaded(tmp_path: Path, how: str) -> None:
    state = make_run()
    train(state, 2)
    parts = {"model": state["model"].state_dict(), "optimizer": state["optimizer"].state_dict(), "step": 2}
    path = tmp_path / "saved"
    if how == "distributed checkpoint":
        dcp.save({"model": parts["model"], "step": 2}, checkpoint_id=path)
    elif how == "ours":
        checkpoints = Checkpointer(path)
        checkpoints.save(2, state)
        checkpoints.close()
        path /= "step-00000002"
    else:
        torch.save(parts if how == "one file" else parts["model"], path)
    fresh = make_run(seed=1)
    load_checkpoint(path, fresh)
    assert all(map(torch.equal, fresh["model"].parameters(), state["model"].parameters()))
    if how in ("one file", "ours"):
        assert same(content(fresh), content(state))


# -- ranks that do not agree --------------------------------------------------------------------------------------------------


def save_a_number(rank: int, world: int, folder: str) -> int:
    """A state so small that there is nothing to write for the second rank."""
    checkpoints = Checkpointer(folder)
    for step in range(8):
        checkpoints.save(step, {"x": torch.ones(3)})
        checkpoints.wait()
    checkpoints.close()
    return checkpoints.stats()["published"] if rank == 0 else 7


def test_a_rank_may_have_nothing_to_write(tmp_path: Path) -> None:
    assert run(2, save_a_number, str(tmp_path)) == [7, 7]


def disagree(rank: int, world: int, folder: str) -> list[str]:
    checkpoints, found = Checkpointer(folder), []
    for step, state in ((1 + rank, {"x": torch.ones(3)}), (3, {"x": torch.ones(3), "y": object() if rank else 0})):
        try:
            checkpoints.save(step, state)
        except CheckpointError as error:
            found.append(str(error))
    checkpoints.save(4, {"x": torch.ones(3)})
    checkpoints.wait()
    checkpoints.close()
    return found


def test_what_the_state_has_no_place_for_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(1, {"model": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False)), "old": 3})
    checkpoints.wait()
    with caplog.at_level(logging.WARNING):
        assert checkpoints.restore({"model": nn.Sequential(nn.Linear(2, 2))}) == 1
    checkpoints.close()
    assert caplog.messages == ["the checkpoint of step 1 has what the state has no place for: model.1.weight, old"]


def test_ranks_that_cannot_save_together_all_say_so_and_go_on(tmp_path: Path) -> None:
    first, second = run(2, disagree, str(tmp_path))
    assert first == ["the ranks save different steps: [1, 2]", "rank 1 cannot save its state; it says why"]
    assert second[0] == first[0] and "y: a checkpoint cannot hold builtins.object" in second[1]
    assert (tmp_path / "step-00000004").is_dir()


def made_too_early(rank: int, world: int, folder: str) -> str:
    checkpoints = Checkpointer(folder, group=None)
    checkpoints._ranks.made_alone = True
    try:
        checkpoints.save(1, {})
    except TrainError as error:
        return str(error)
    return ""


def test_a_checkpointer_that_was_made_before_the_process_group_is_refused(tmp_path: Path) -> None:
    assert all("after torch.distributed.init_process_group()" in text for text in run(2, made_too_early, str(tmp_path)))


def save_without_close(folder: str, step: int) -> None:
    checkpoints = Checkpointer(folder)
    checkpoints.save(step, {"x": torch.full((3,), float(step))})


def drop_and_restore(rank: int, world: int, folder: str) -> list[Any]:
    """Go on with what a function has saved that did not close its Checkpointer."""
    found = []
    for step in (1, 2):
        save_without_close(folder, step)
        state, checkpoints = {"x": torch.zeros(3)}, Checkpointer(folder)
        found += [checkpoints.restore(state), state["x"].tolist()]
        del checkpoints
    return found


def test_ranks_restore_what_they_saved_and_did_not_close(tmp_path: Path) -> None:
    assert run(2, drop_and_restore, str(tmp_path)) == [[1, [1.0] * 3, 2, [2.0] * 3]] * 2


def test_a_wait_for_the_writer_ends_with_the_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both images are in use, and the disk is slow. A worker that stood there could not be parked."""
    checkpoints, slow = Checkpointer(str(tmp_path)), threading.Event()
    write = Publisher._write
    monkeypatch.setattr(Publisher, "_write", lambda self, save: (slow.wait(5.0), write(self, save))[1])
    for step in (1, 2):
        checkpoints.save(step, {"x": torch.ones(3)})
    monkeypatch.setattr(group_connections.GroupConnections, "is_cut", True)
    with pytest.raises(RuntimeError, match="while a checkpoint is being written"):
        checkpoints.save(3, {"x": torch.ones(3)})
    slow.set()
    checkpoints.close()


def come_late(rank: int, world: int, folder: str) -> tuple[list[str], list[int]]:
    """Save on three ranks, of which the second comes when another one has written a line about it."""
    waiting.LOOK, waiting.REPORT = 0.02, 2.0 if rank == 0 else 0.1  # the third one would write it long before the first does
    checkpoints = Checkpointer(folder)
    checkpoints.save(1, {"x": torch.ones(3)})
    board, mine, lines = checkpoints._ranks.board, checkpoints._ranks._waiting, list[str]()
    assert mine is not None

    def emit(record: logging.LogRecord) -> None:
        lines.append(record.getMessage())
        board.set("told", "")

    handler = logging.Handler()
    handler.emit = emit  # type: ignore[method-assign]
    logging.getLogger("elastirun.checkpoints").addHandler(handler)
    if rank == 2:
        board.get(mine._key(mine.exchanges + 1, 0))  # rank 0 waits
    elif rank == 1:
        board.get("told")
    checkpoints.save(2, {"x": torch.ones(3)})
    checkpoints.close()
    mine._thread.join(30)
    return lines, [number for number in range(1, 99) if board.check([f"waiting/{number}/{rank}"])]


def test_who_is_missing_is_named_once_and_no_note_remains(tmp_path: Path) -> None:
    found = run(3, come_late, str(tmp_path))
    assert [len(lines) for lines, _ in found] == [1, 0, 0]
    assert found[0][0][0].startswith("save of step 2: rank 0 has waited for rank 1 for ")
    assert [notes for _, notes in found] == [[], [], []]
