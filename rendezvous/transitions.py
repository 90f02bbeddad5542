"""The states of a node and all transitions between them."""

from __future__ import annotations

from enum import Enum

from elastirun.rendezvous.wire.records import Status

JOINING, READY, RUNNING, DONE, DRAINING, LEFT = Status


class Trigger(str, Enum):
    """The cause of a transition."""

    NAMED = "a round names this node"
    ALL_READY = "every member has seen the round"
    ROUND_OVER = "the round is broken, replaced or closed"
    SUCCEEDED = "all workers here succeeded"
    FAILED = "a worker here failed"
    LEAVE = "this node is to leave"
    STOPPED = "all workers here are stopped"
    ENDED = "nothing is left to do"


TRANSITIONS: dict[tuple[Status, Trigger], Status] = {
    (JOINING, Trigger.NAMED): READY,
    (READY, Trigger.ALL_READY): RUNNING,
    (READY, Trigger.ROUND_OVER): JOINING,
    (READY, Trigger.LEAVE): JOINING,
    (RUNNING, Trigger.SUCCEEDED): DONE,
    (RUNNING, Trigger.FAILED): DRAINING,
    (RUNNING, Trigger.ROUND_OVER): DRAINING,
    (RUNNING, Trigger.LEAVE): DRAINING,
    (DONE, Trigger.ROUND_OVER): JOINING,
    (DONE, Trigger.LEAVE): JOINING,
    (DRAINING, Trigger.STOPPED): JOINING,
    (JOINING, Trigger.ENDED): LEFT,
}


def following(state: Status, trigger: Trigger, history: str) -> Status:
    """Return the state that follows. An impossible transition is a bug; the error says the ``history`` that led to it."""
    try:
        return TRANSITIONS[state, trigger]
    except KeyError:
        raise RuntimeError(f"impossible transition: {trigger.value!r} in state {state.value}; history: {history}") from None
