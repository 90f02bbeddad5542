"""Process groups: the user's, and one of the same ranks for the module alone. See docs/decisions/0012.

gloo waits for the connections of a new group for as long as for a collective: half an hour, in which nothing ends the wait for a peer that
has just died. Where all ranks are known to have come (``connects_within``), it is given seconds for that.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from elastirun.train.arguments import shown
from elastirun.train.errors import TrainError, WrongUse
from elastirun.train.groups.collectives import backends_of, broadcast, gather
from elastirun.train.groups.rank_prefix import one_prefix
from elastirun.train.mesh import verify_mesh, verify_no_mesh

OWN = {"gloo", "nccl"}  # backends for which ``make_own_group`` makes a group

ALONE = 2  # references to what only a list has, while ``sys.getrefcount`` looks at it
GLOO_WAITS = 5  # times its timeout gloo waits for a connection (its tcp/pair.cc), but once for a peer's address in the store

CPU = torch.device("cpu")
JOIN = 5.0  # seconds for aborts at the end of the process

_retired: list[dist.ProcessGroup] = []  # groups over NCCL that are replaced, and that other ranks may still use
_aborting: list[dist.ProcessGroup] = []  # those whose abort was begun
_threads: list[threading.Thread] = []  # of the aborts
_drops: list[tuple[threading.Thread, threading.Lock]] = []  # threads of ``end_beside``; each holds its lock while a group ends
_connect_limit: timedelta | None = None  # for the connections of gloo's groups; None: the timeout of the group


@contextmanager
def connects_within(limit: timedelta) -> Iterator[None]:
    """Let groups of gloo that are made meanwhile fail with torch's RuntimeError if their connections are not there within ``limit``."""
    global _connect_limit
    _connect_limit = limit
    try:
        yield
    finally:
        _connect_limit = None


def connect_limit(timeout: timedelta) -> timedelta:
    """Return the timeout with which a group is to be made that has ``timeout`` from then on; see ``connected``."""
    return timeout if _connect_limit is None else min(timeout, _connect_limit / GLOO_WAITS)


def connected(backends: Iterable[Any], timeout: timedelta) -> None:
    """Give ``backends`` that were made within ``connect_limit`` their own timeout."""
    if _connect_limit is not None:
        for backend in backends:
            backend._set_default_timeout(timeout)


def _backends(group: dist.ProcessGroup) -> list[Any]:
    return [group._get_backend(torch.device(device)) for device in backends_of(c10d._world.pg_map[group][0])]


def _has_nccl(group: dist.ProcessGroup) -> bool:
    """Return whether NCCL is the backend, or that for GPUs. Of a group that has ended meanwhile: False."""
    told = c10d._world.pg_map.get(group)
    return told is not None and "nccl" in backends_of(told[0]).values()


def init_default_group(backend: str, store: Any, rank: int, world_size: int, timeout: timedelta | None) -> None:
    """Make the default group. ``timeout``: for a collective; None: torch's default."""
    timeout = timeout or c10d.default_pg_timeout
    with one_prefix():
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=connect_limit(timeout))
    assert dist.group.WORLD is not None
    connected(_backends(dist.group.WORLD), timeout)
    store.set_timeout(timeout)


def make_default_group(backend: str, store: Any, rank: int, world_size: int, timeout: timedelta | None, name: str) -> dist.ProcessGroup:
    """Return a group that can take the place of the default group (``replace_groups``). May be called in any thread.

    ``name``: another one for each group of this process. The ranks that are in the present default group must have the same rank here.
    """
    timeout = timeout or c10d.default_pg_timeout
    made = _make_group(backend, store, rank, list(range(world_size)), timeout, name, is_default=True)
    store.set_timeout(timeout)
    return made


def _make_group(
    backend: str, store: Any, rank: int, members: Sequence[int], timeout: timedelta, name: str, is_default: bool = False
) -> dist.ProcessGroup:
    """Return a group of ``members``, ranks of the default group. ``is_default``: it is to take the place of that."""
    own, description = ([], "default_pg") if is_default else (list(members), None)
    limit, theirs = connect_limit(timeout), c10d.Backend(backend)
    made: dist.ProcessGroup = c10d._new_process_group_helper(
        len(members), rank, own, theirs, store, cast(Any, name), timeout=limit, group_desc=description
    )[0]
    connected(_backends(made), timeout)
    c10d._world.pg_group_ranks[made] = {member: rank for rank, member in enumerate(members)}
    return made


def replace_groups(default: dist.ProcessGroup, *others: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    """Make ``default`` the default group; all groups but this one and ``others`` end. Return these: to drop them takes a while."""
    c10d._update_default_pg(default)
    old = [group for group in list(c10d._world.pg_map) if group is not default and group not in others]
    for group in old:
        if _has_nccl(group):
            _retired.append(group)
            _forget(group)
        else:
            dist.destroy_process_group(group)
    c10d._world.group_count = 0  # names are made of it, the same ones on a new rank
    return old


def leave_groups() -> list[dist.ProcessGroup]:
    """End all groups, without waiting for anybody. Return them: to drop them takes a while."""
    groups = list(c10d._world.pg_map)
    if any(map(_has_nccl, groups)):
        abort_groups()
        c10d._update_default_pg(None)
        for group in groups:
            _forget(group)
        c10d._world.group_count = 0
    elif dist.is_initialized():
        dist.destroy_process_group()
    _aborting.clear()
    _retired.clear()
    return groups


def end_retired() -> None:
    """End the groups over NCCL that ``replace_groups`` has replaced: no rank uses them any more."""
    _abort(_retired)
    _aborting[:] = [group for group in _aborting if group not in _retired]
    _retired.clear()


def abort_groups() -> None:
    """Let the kernels of all groups over NCCL end. May be called in any thread, again and again."""
    _abort([group for group in [*c10d._world.pg_map, *_retired] if group in _retired or _has_nccl(group)])


def _abort(groups: Sequence[dist.ProcessGroup]) -> None:
    """Abort ``groups`` in threads, once: the call takes torch half a second, the kernels end within milliseconds."""
    for group in [group for group in groups if group not in _aborting]:
        _aborting.append(group)
        abort = group._get_backend(torch.device("cuda")).abort
        thread = threading.Thread(target=abort, name="elastirun aborts a group", daemon=True)
        _threads.append(thread)
        thread.start()
    _threads[:] = [thread for thread in _threads if thread.is_alive()]


@atexit.register
def _join_threads() -> None:
    """Wait for threads that are inside torch: one that comes back when the interpreter ends would end the process with SIGABRT."""
    end = time.monotonic() + JOIN
    for thread in list(_threads):
        thread.join(max(0.0, end - time.monotonic()))
    for thread, lock in list(_drops):
        if thread.is_alive():
            lock.acquire(timeout=max(0.0, end - time.monotonic()))  # for ever: the thread ends no other group


def _forget(group: dist.ProcessGroup) -> None:
    """Take ``group`` out of torch's tables. ``destroy_process_group`` would wait for peers that may be gone."""
    world = c10d._world
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_coalesce_state):
        table.pop(group, None)
    world.pg_to_tag.pop(group, None)
    for tagged in world.tags_to_pg.values():
        if group in tagged:
            tagged.remove(group)
    c10d._unregister_process_group(group.group_name)  # type: ignore[attr-defined]


def end_beside(groups: list[Any]) -> None:
    """Let go of process groups in a thread. The end of one of gloo waits for its threads, which may take until the timeout of the group.

    A group ends when nobody but the list has it any more, so never in the thread of somebody who drops it, such as with a traceback.
    """
    lock = threading.Lock()
    thread = threading.Thread(target=_end, args=(groups, lock), name="elastirun ends groups", daemon=True)
    _drops[:] = [*((other, held) for other, held in _drops if other.is_alive()), (thread, lock)]
    thread.start()


def _end(groups: list[Any], lock: threading.Lock) -> None:
    nap = 0.001
    while groups:
        if sys.getrefcount(groups[-1]) <= ALONE:
            with lock:
                groups.pop()
        else:
            time.sleep(nap)
            nap = min(2 * nap, 1.0)


def find_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return ``group``, or the default one. Raises TrainError if there is none, or if this process is not a member."""
    if not dist.is_available() or (group is None and not dist.is_initialized()):
        raise TrainError("there is no process group: call torch.distributed.init_process_group() before, or give process_group=")
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup | int):  # an int marks a rank outside of the group
        raise WrongUse(f"process_group must be one of torch.distributed, as new_group() returns, not {shown(found)}")
    if not isinstance(found, dist.ProcessGroup) or dist.get_rank(found) < 0:
        raise TrainError("this process is not a member of the process group that was given")
    return found


def make_own_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Return a group of the same ranks for the caller alone; every rank of ``group`` calls it at the same point.

    Collectives of others in ``group`` are then not in the way, in whatever order they run. ``torch.distributed.new_group`` does not do:
    either it needs all ranks of the world, or it makes the group's name from the number of groups of a rank, which may differ between
    ranks. With another backend than gloo or NCCL, the result is ``group`` itself.
    """
    backend = c10d._world.pg_map[group][0]
    if dist.get_world_size(group) == 1 or not set(backends_of(backend).values()) <= OWN:
        return group
    [number] = broadcast([time.time_ns()], group, device)
    members = dist.get_process_group_ranks(group)
    timeout = getattr(getattr(group._get_backend(device), "options", None), "_timeout", c10d.default_pg_timeout)
    store = c10d._get_process_group_store(group)
    return _make_group(backend, store, dist.get_rank(group), members, timeout, f"elastirun {number}")


def make_gloo_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group over gloo of the same ranks for the caller alone; every rank of ``group`` calls it at the same point."""
    timeout = limit = c10d.default_pg_timeout
    if _connect_limit is not None and "cpu" in backends_of(c10d._world.pg_map[group][0]):
        gather([0], group, CPU)  # until all have come: the loss of a peer, or a cut, ends this wait, and not that of ``new_group``
        limit = connect_limit(timeout)
    members, apart = dist.get_process_group_ranks(group), group is not dist.group.WORLD
    made: dist.ProcessGroup = dist.new_group(members, limit, "gloo", use_local_synchronization=apart)
    connected(_backends(made), timeout)
    return made


def end_own_group(made: dist.ProcessGroup, group: dist.ProcessGroup) -> None:
    """End the group that ``make_own_group`` has made of ``group``, unless the program has ended all groups already.

    A rank need not wait for the others to call it. NCCL's groups could wait for them there, so they are aborted.
    """
    if made is not group and made in c10d._world.pg_map:
        end = c10d._abort_process_group if dist.get_backend(made) == "nccl" else dist.destroy_process_group
        end(made)


def group_of(group: dist.ProcessGroup | None, mesh: Any) -> dist.ProcessGroup | None:
    """Return the group of ``device_mesh=``, or the one of ``process_group=``; None, the default group, not in a job with a mesh."""
    if mesh is None:
        if group is None:
            verify_no_mesh('device_mesh=build_mesh()["dp"], or process_group=torch.distributed.group.WORLD')
        return group
    if group is not None:
        raise WrongUse("Cannot specify both process_group and device_mesh arguments. Give one of them")
    verify_mesh(mesh)
    if mesh.ndim != 1:
        raise WrongUse(f"Only 1D device mesh is supported, but got {mesh}: give one of its dimensions by name, as in mesh['data']")
    found: dist.ProcessGroup = mesh.get_group(mesh_dim=0)
    return found
