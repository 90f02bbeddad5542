"""The settings of a job, and what follows from them: which nodes agree with it, and how long rounds wait after failures and losses."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from elastirun.mesh import Mesh
from elastirun.rendezvous.timing import Timing
from elastirun.rendezvous.wire.records import Member, NodeRow, RoundRecord, Verdict

PROGRESS = 30.0  # seconds; a round that ran longer has made progress, so the same failure after it is not a repeated one
QUICK = 10.0  # seconds; rounds that fail sooner may do so again and again, so the next one starts after a pause
EARLY = 60.0  # seconds; rounds that lose a node sooner may do so again and again, see docs/decisions/0011
FREE_LOSSES = 2  # early losses in a row that delay no newcomer
SHORTEST_HOLD, LONGEST_HOLD = 10.0, 300.0  # seconds that newcomers wait: Kubernetes' times for a crashing container, see ``hold``


@dataclass(frozen=True)
class Rules(Timing):
    """The conditions of a job for its rounds, and the durations of ``Timing``."""

    min_nodes: int
    max_nodes: int
    max_restarts: int = 0
    restart_window: float = 0.0  # failures before a round that ran for so long are forgiven; 0: none is ever forgiven
    fail_fast: bool = False  # the same failure twice with no progress between is final
    fixed_ranks: bool = False  # a node's rank is its ``node_rank`` and nothing else
    private: bool = False  # no other agent can reach the store
    lasting: bool = False  # the store outlives its jobs
    hosted: bool = False  # one of the job's agents should serve the store
    store_succession: str = "off"  # or "proof", "majority": when the store moves, see docs/decisions/0020
    mesh_text: str = ""  # of the workers, as in dp=auto,pp=2,tp=4; empty: any number of them forms a round
    node_unit: int = 1  # where it is not 1, it and the number of workers of each node are the mesh

    @cached_property
    def settings(self) -> tuple[str, ...]:
        """The options that every node of a job must be given alike, because the node that writes the record decides by its own."""
        return (
            f"--nnodes={self.min_nodes}:{self.max_nodes}",
            f"--rdzv-backend={'static' if self.fixed_ranks else 'etcd' if self.lasting else 'c10d'}",
            f"--max-restarts={self.max_restarts}",
            f"--restart-window={self.restart_window:g}",
            f"--set restart-pause={self.restart_pause:g}",
            f"--expire={self.expire:g}",  # a node that is lost must have stopped by its own clock before the others replace it
            f"--store-grace={self.store_grace:g}",
            "--fail-fast" if self.fail_fast else "no --fail-fast",
            f"--store-succession={self.store_succession}",
            self._mesh_setting,
        )

    @property
    def _mesh_setting(self) -> str:
        if self.node_unit > 1 and self.mesh is not None:
            return f"--node-unit={self.node_unit} with --nproc-per-node={self.mesh.inner}"
        return f"--mesh={self.mesh_text}" if self.mesh_text else "no --mesh"

    @cached_property
    def mesh(self) -> Mesh | None:
        """The mesh that the workers of each round form; None: there is none."""
        return Mesh.parse(self.mesh_text) if self.mesh_text else None

    @property
    def succession(self) -> bool:
        """Whether another node's store takes over when the host of the store has died."""
        return self.store_succession != "off"

    @property
    def majority(self) -> bool:
        """Whether it does so, too, when the host has fallen silent, if more than half of the members are there."""
        return self.store_succession == "majority"


def disagreement(rules: Rules, record: RoundRecord) -> str:
    """Return in words how this node's settings differ from the job's; empty when they do not."""
    if rules.settings == record.settings:
        return ""
    pairs = [pair for pair in zip(rules.settings, record.settings, strict=False) if pair[0] != pair[1]]
    ours, theirs = (", ".join(pair[i] for pair in pairs) for i in (0, 1))
    again = f", or try again in {rules.expire:g} s if that job was just killed" if rules.lasting else ""
    return f"this node was started with {ours}, the job runs with {theirs}; start all nodes with the same{again}" if pairs else ""


def untrue(rules: Rules, record: RoundRecord, row: NodeRow) -> str:
    """Return in words what no honest node of this job would have written; empty when there is nothing. ``row``: this node's own."""
    most = rules.max_nodes
    if len(record.members) > most and not disagreement(rules, record):
        return f"it names {len(record.members)} nodes, and --nnodes allows {most}"
    if rules.mesh and record.members and not rules.mesh.is_formed_by([m.slots for m in record.members]) and not disagreement(rules, record):
        return f"it has {record.world_size} workers on {len(record.members)} nodes, which do not fit the mesh {rules.mesh}"
    closed = record.closed
    if closed and closed.verdict is Verdict.SUCCEEDED and record.index(row.id) is not None and row.succeeded != record.round:
        return f"it says that all workers of round {record.round} succeeded, but those of this node have not"
    return ""


def most_nodes(rules: Rules, record: RoundRecord | None) -> int:
    """Return the most nodes that a round after ``record`` is to have: those that ``elastirun scale`` wants, within --nnodes."""
    wanted = record.wanted if record is not None else 0
    return min(rules.max_nodes, max(rules.min_nodes, wanted)) if wanted else rules.max_nodes


def another_store(record: RoundRecord, found: RoundRecord | None) -> str:
    """Return in words why ``found`` does not continue this job's ``record``; empty when it does."""
    if found is None:
        return "the rendezvous store lost this job: it began anew, or its keys were deleted"
    return "" if found.store_id == record.store_id else "the rendezvous store was replaced by another one; its rounds are not ours"


def holder(rules: Rules, record: RoundRecord, row: NodeRow) -> Member | None:
    """Return the member that has the fixed place of ``row`` in a round that runs without ``row``."""
    rank = row.node_rank
    return record.members[rank] if rules.fixed_ranks and rank is not None and rank < len(record.members) else None


def hold(record: RoundRecord) -> float:
    """Return the seconds that newcomers wait beside a new round: 0, and 10, 20, 40, ... from the third early loss in a row.

    A node that is started, killed and started again, over and over, would otherwise end each round before it makes progress.
    The times are those after which Kubernetes starts a crashing container again. See docs/decisions/0011.
    """
    if record.losses <= FREE_LOSSES:
        return 0.0
    return min(LONGEST_HOLD, SHORTEST_HOLD * 2.0 ** min(record.losses - FREE_LOSSES - 1, 16))


def why_held(record: RoundRecord) -> str:
    """Return in words why newcomers have to wait."""
    return f"{record.losses} rounds in a row lost a node within {EARLY:g} s of their start"


def keeps_state(rows: Iterable[NodeRow], round: int) -> bool:
    """Return whether workers of the nodes of ``rows`` have kept their state at the end of ``round`` (docs/elastic.md)."""
    return any(row.kept == round for row in rows)


def pause_before(rules: Rules, record: RoundRecord) -> float:
    """Return the seconds until the round after a failed one: 0 for the first restart, then 1, 2, 4, ..., each give or take a quarter.

    Where workers keep their state, that round starts at once, and only workers in place of failed ones wait.
    The jitter is the same for all nodes of the job. Without it, many jobs that lost the same file server would come back together.
    """
    if record.quick < 2:
        return 0.0
    jitter = 0.75 + zlib.crc32(record.fence.encode()) / 2**33
    return min(rules.restart_pause, 2.0 ** min(record.quick - 2, 16)) * jitter
