"""The phases of a live worker: what it does in the worlds of its job. Pure (docs/elastic.md)."""

from __future__ import annotations

from enum import Enum


class Phase(str, Enum):
    """The phases of a worker. Where it is in its script is another matter: any phase may come within ``save``."""

    FIXED = "it trains in a world that never changes"
    LEFT = "it takes part in no round, and waits for the agent's next one"
    MEETING = "it is in a round, and comes together with the ranks of a world"
    REHEARSING = "it makes a first step by itself, in no round"
    JOINING = "it makes the steps of the others without weight, and gets their state"
    TRAINING = "it trains"
    LATE = "it has the state of the others, and goes on in its script until it is where they are"
