"""The states of a node: one enum, and one table of its words. Used by events, /status, /metrics, status, account and report. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class NodeState(str, Enum):
    """A state of a node. The values stand in the event ``state``, in /status, /metrics and ``elastirun status``."""

    RUNNING = "running"
    REPEATED = "repeated"
    SAVING = "saving"
    STOPPING = "stopping"
    RESTARTING = "restarting"
    STARTING = "starting"
    JOINING = "joining"
    SITTING_OUT = "sitting_out"
    FINISHING = "finishing"
    # States that only other nodes can know.
    SPARE = "spare"
    LEFT = "left"
    LOST = "lost"
    ABSENT = "absent"
    UNKNOWN = "unknown"
    HANGING = "hanging"  # known only afterwards

    __str__ = str.__str__  # the value, also in f-strings


@dataclass(frozen=True)
class Words:
    """One row of the table. ``spent`` and ``color`` are empty for a state that an agent cannot be in by its own account."""

    title: str  # for people, in the account and the report
    means: str  # a sentence about the node
    spent: str = ""  # the key in ``account.seconds``, and the label ``on`` of elastirun_spent_seconds
    color: str = ""  # in the report; of Okabe and Ito, which also people tell apart who see few colors


WORDS = {
    NodeState.RUNNING: Words("training", "Its workers train.", "training", "#009e73"),
    NodeState.REPEATED: Words("steps done again", "Its workers repeat steps of an earlier round.", "repeated", "#cc79a7"),
    NodeState.SAVING: Words("saving", "A save of a checkpoint holds the training up.", "saving", "#56b4e9"),
    NodeState.STOPPING: Words("stopping", "The round is over, and its workers still run.", "restarting", "#e69f00"),
    NodeState.RESTARTING: Words("restarting", "The next workers have not been started.", "restarting", "#d55e00"),
    NodeState.STARTING: Words("starting", "The agent starts, or workers before their first step.", "starting", "#f0e442"),
    NodeState.JOINING: Words("waiting for nodes", "It waits for the store or for nodes.", "waiting", "#cccccc"),
    NodeState.SITTING_OUT: Words("sitting out", "It takes no part, for its strikes.", "sitting_out", "#0072b2"),
    NodeState.FINISHING: Words("finishing", "Its workers have succeeded, or its part is over.", "finishing", "#999999"),
    NodeState.SPARE: Words("spare", "It waits beside a full round."),
    NodeState.LEFT: Words("left", "It has said that it is gone."),
    NodeState.LOST: Words("lost", "It was found silent or dead."),
    NodeState.ABSENT: Words("absent", "It is a member of the round without a row."),
    NodeState.HANGING: Words("hang", "Its workers make no steps, and their round is not over.", color="#7a3fa6"),
    NodeState.UNKNOWN: Words("not accounted", "No event tells.", color="#a8d8c8"),
}
SPENT = tuple(dict.fromkeys(words.spent for words in WORDS.values() if words.spent))
