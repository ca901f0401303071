"""The phases of a run, and every transition between them. The engine asks `follow` before each transition.

Training comes first and takes hours; the aggregation after it takes seconds, with the sites that are ready and have
just answered a ping. A slow or crashed site costs the others no more than the deadline.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from lazaret.errors import LocalProtocolError


class Phase(StrEnum):
    TRAINING = "training"
    PINGING = "pinging"
    BURST = "burst"
    DONE = "done"


class Turn(StrEnum):
    ENOUGH_READY = "enough-ready"  # all that are there are ready, or the deadline has passed with enough of them
    ANSWERED = "answered"  # the ping is over and enough have answered
    TOO_FEW = "too-few"
    ATTEMPT_ENDED = "attempt-ended"  # without a sum, yet the round goes on
    ROUND_LOST = "round-lost"
    PUBLISHED = "published"
    LAST_PUBLISHED = "last-published"


TURNS: Final[Mapping[Phase, Mapping[Turn, Phase]]] = {
    Phase.TRAINING: {Turn.ENOUGH_READY: Phase.PINGING},
    Phase.PINGING: {Turn.ANSWERED: Phase.BURST, Turn.TOO_FEW: Phase.TRAINING, Turn.ROUND_LOST: Phase.TRAINING},
    Phase.BURST: {
        Turn.ATTEMPT_ENDED: Phase.PINGING,
        Turn.ROUND_LOST: Phase.TRAINING,
        Turn.PUBLISHED: Phase.TRAINING,
        Turn.LAST_PUBLISHED: Phase.DONE,
    },
    Phase.DONE: {},
}


def follow(phase: Phase, turn: Turn) -> Phase:
    """Where a turn leads.

    :raises LocalProtocolError: if it leads nowhere: a fault of the engine.
    """
    target = TURNS[phase].get(turn)
    if target is None:
        raise LocalProtocolError(f"{turn} is not possible while {phase}", where="round engine")
    return target
