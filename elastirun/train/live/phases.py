"""The phases of a live worker, and the table of what it does in each of them. Pure: ``Elastic`` performs it (docs/elastic.md).

``step(phase, event, facts)`` returns the next phase and the actions that lead there. An action may end with the next event.
"""

from __future__ import annotations

from enum import Enum, Flag, auto
from typing import NamedTuple


class Phase(str, Enum):
    """The phases of a worker. Where it is in its script is another matter: any phase may come within ``save``."""

    FIXED = "it trains in a world that never changes"
    LEFT = "it takes part in no round, and waits for the agent's next one"
    MEETING = "it is in a round, and comes together with the ranks of a world"
    REHEARSING = "it makes a first step by itself, in no round"
    JOINING = "it makes the steps of the others without weight, and gets their state"
    TRAINING = "it trains"
    LATE = "it has the state of the others, and goes on in its script until it is where they are"


class PhaseEvent(Enum):
    """The causes of a transition."""

    STARTS = "the model of a worker with an agent is made"
    ROUND_BEGINS = "the agent has started a round"
    WORLD_FOUND = "the ranks that begin the round are known"
    TAKEN_IN = "the ranks that train have written a world with this new one in it, and all of its ranks have come"
    AGREED = "the ranks of a world have agreed on the state"
    STEP_ENDS = "the script has come back with its batch, and the save that was due is made"
    ALL_WHOLE = "all ranks of the world that this one has switched to have the state"
    COMES_BACK = "the script comes to a loop or to save, after it was in neither"
    LOOP_BEGINS = "the loop is about to load its first batch"
    SAVES = "the last step is to be published"
    PEERS_LOST = "a wait for peers has failed, and the agent ends the round"


class Fact(Flag):
    """A fact that a worker knows when an event comes."""

    IN_WORLD = auto()  # it is one of the ranks that begin the round: it has the newest state, or nobody has one
    PREPARED = auto()  # it has rehearsed, or has an older state
    NEW = auto()  # no rank had a state
    BEHIND = auto()  # another rank has come further in the script
    AHEAD = auto()  # another rank has not come as far in the script, and none has come further
    ROUND_OVER = auto()  # a reduction has failed, or the agent asks the worker to leave its round
    COUNTS = auto()  # the step has its gradients
    EPOCH_ENDS = auto()  # no step of the epoch is left
    ALONE = auto()  # the world has no other rank


# ``Elastic`` does each of these in the method of that name.
PhaseAction = Enum(
    "PhaseAction",
    "WAIT_FOR_ROUND FIND_WORLD ENTER_WORLD MAKE_GROUPS WAIT_UNTIL_TAKEN_IN JOIN BEGIN_REHEARSAL END_REHEARSAL BEGIN BEGIN_ANEW "
    "LOOK_FOR_OTHERS CHANGE_WORLD SHARE_DATA BE_LATE PUT_BACK MEET_AGAIN PUBLISH END_IF_OVER LEAVE",
)


class Row(NamedTuple):
    """One transition. It holds if all of ``given`` are facts, and no row before it for the same phase and event holds."""

    phase: Phase
    event: PhaseEvent
    given: Fact
    then: Phase
    actions: tuple[PhaseAction, ...] = ()


Following = tuple[PhaseEvent, Fact]  # the event with which an action ends
NONE = Fact(0)
FIXED, LEFT, MEETING, REHEARSING, JOINING, TRAINING, LATE = Phase
GOES = (PhaseAction.LEAVE, PhaseAction.WAIT_FOR_ROUND)
# Events of the script, which may come in any phase. Where the table has no row for one, nothing follows.
OF_SCRIPT = (PhaseEvent.STEP_ENDS, PhaseEvent.COMES_BACK, PhaseEvent.LOOP_BEGINS, PhaseEvent.SAVES)
ROWS = (
    # A world that never changes: alone, of another launcher, or of another backend. An error there is nobody's loss.
    Row(FIXED, PhaseEvent.ROUND_BEGINS, NONE, FIXED, (PhaseAction.MAKE_GROUPS,)),
    Row(FIXED, PhaseEvent.AGREED, NONE, FIXED, (PhaseAction.BEGIN_ANEW,)),
    Row(FIXED, PhaseEvent.SAVES, NONE, FIXED, (PhaseAction.PUBLISH,)),
    # Between two rounds the agent alone says what comes.
    Row(LEFT, PhaseEvent.STARTS, NONE, LEFT, (PhaseAction.WAIT_FOR_ROUND,)),
    Row(LEFT, PhaseEvent.ROUND_BEGINS, NONE, MEETING, (PhaseAction.FIND_WORLD,)),
    # Ranks with a state train on at once. Another one has to be ready before it is taken in, so as to cost them milliseconds only. An older
    # state is kept until then: it may be the newest one that is left.
    Row(MEETING, PhaseEvent.WORLD_FOUND, Fact.IN_WORLD, MEETING, (PhaseAction.ENTER_WORLD, PhaseAction.MAKE_GROUPS)),
    Row(MEETING, PhaseEvent.WORLD_FOUND, Fact.PREPARED, MEETING, (PhaseAction.WAIT_UNTIL_TAKEN_IN,)),
    Row(MEETING, PhaseEvent.WORLD_FOUND, NONE, REHEARSING, (PhaseAction.BEGIN_REHEARSAL,)),
    Row(MEETING, PhaseEvent.TAKEN_IN, NONE, JOINING, (PhaseAction.JOIN,)),
    # The last reduction of an epoch may fail on some ranks only. The others wait for these, and all meet in another world.
    Row(MEETING, PhaseEvent.AGREED, Fact.BEHIND, LATE, (PhaseAction.BE_LATE,)),
    Row(MEETING, PhaseEvent.AGREED, Fact.AHEAD, MEETING, (PhaseAction.MEET_AGAIN, PhaseAction.MAKE_GROUPS)),
    Row(MEETING, PhaseEvent.AGREED, Fact.NEW, TRAINING, (PhaseAction.BEGIN_ANEW, PhaseAction.LOOK_FOR_OTHERS)),
    Row(MEETING, PhaseEvent.AGREED, NONE, TRAINING, (PhaseAction.BEGIN, PhaseAction.LOOK_FOR_OTHERS)),
    Row(MEETING, PhaseEvent.PEERS_LOST, NONE, LEFT, GOES),
    # A worker that rehearses is in no round, so nobody waits for it, and it loses no peers. What it does is undone. It has nothing to save.
    Row(REHEARSING, PhaseEvent.STEP_ENDS, NONE, LEFT, (PhaseAction.END_REHEARSAL, PhaseAction.WAIT_FOR_ROUND)),
    # A worker with a part of the state ends well if training ends just then: the others need it no more.
    Row(JOINING, PhaseEvent.STEP_ENDS, Fact.ROUND_OVER, LEFT, (PhaseAction.END_IF_OVER, *GOES)),
    Row(JOINING, PhaseEvent.STEP_ENDS, NONE, JOINING, (PhaseAction.CHANGE_WORLD,)),
    Row(JOINING, PhaseEvent.ALL_WHOLE, NONE, TRAINING, (PhaseAction.SHARE_DATA, PhaseAction.BEGIN, PhaseAction.LOOK_FOR_OTHERS)),
    Row(JOINING, PhaseEvent.LOOP_BEGINS, Fact.ROUND_OVER, LEFT, GOES),
    Row(JOINING, PhaseEvent.PEERS_LOST, NONE, LEFT, GOES),
    # After the last step of an epoch the others do what comes between two epochs, in this world: no rank must do it alone in the next one.
    Row(TRAINING, PhaseEvent.STEP_ENDS, Fact.ROUND_OVER | Fact.ALONE, LEFT, GOES),
    Row(TRAINING, PhaseEvent.STEP_ENDS, Fact.ROUND_OVER | Fact.COUNTS | Fact.EPOCH_ENDS, TRAINING),
    Row(TRAINING, PhaseEvent.STEP_ENDS, Fact.ROUND_OVER, LEFT, GOES),
    Row(TRAINING, PhaseEvent.STEP_ENDS, NONE, TRAINING, (PhaseAction.CHANGE_WORLD,)),
    Row(TRAINING, PhaseEvent.ALL_WHOLE, NONE, TRAINING, (PhaseAction.SHARE_DATA, PhaseAction.BEGIN, PhaseAction.LOOK_FOR_OTHERS)),
    Row(TRAINING, PhaseEvent.LOOP_BEGINS, Fact.ROUND_OVER, LEFT, GOES),
    Row(TRAINING, PhaseEvent.SAVES, NONE, TRAINING, (PhaseAction.PUBLISH,)),
    Row(TRAINING, PhaseEvent.PEERS_LOST, NONE, LEFT, GOES),
    # A late rank meets the others where its script comes to the next loop or save. A loop in which it has become late has no batch, as its
    # epoch is over, and a save has nothing to publish: the others have done both. So there is no row for these.
    Row(LATE, PhaseEvent.COMES_BACK, NONE, MEETING, (PhaseAction.PUT_BACK, PhaseAction.MEET_AGAIN, PhaseAction.MAKE_GROUPS)),
)


def can(phase: Phase, event: PhaseEvent) -> bool:
    """Return whether ``event`` may come in ``phase``."""
    return any((row.phase, row.event) == (phase, event) for row in ROWS)


def step(phase: Phase, event: PhaseEvent, facts: Fact = NONE) -> tuple[Phase, tuple[PhaseAction, ...]]:
    """Return the phase that follows, and what to do in it, in this order. An event that cannot come is a bug, and raises RuntimeError."""
    for row in ROWS:
        if (row.phase, row.event) == (phase, event) and row.given in facts:
            return row.then, row.actions
    if event in OF_SCRIPT:
        return phase, ()
    raise RuntimeError(f"impossible event of a live worker: {event.name} in phase {phase.name}; a bug in elastirun, please report it")
