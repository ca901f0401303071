"""The phases of a run: where it can be, and every way from one phase to another.

A run is a sequence of rounds, a round a sequence of phases:

    waiting -> training -> pinging -> aggregation -> waiting for the next round -> ... -> done

Training takes hours, an aggregation takes seconds: it is held with the
sites that are ready and have just answered, so that a slow or absent site costs the others nothing but the deadline.

waiting
    The round is on disk (`OpenRound`), so that its number is never used for two things; nobody is ordered to train. A
    round in which no cohort can come about would cost every site its work and, under differential privacy, a part of
    its budget. So orders are sent only when enough sites are there that have not declined, whose certificates are valid
    now and at the deadline, and when nobody has paused the run; under a strict manifest also when the sum before it is
    checked, and voted on. What sites say and hold of the round stays.
training
    The coordinator has ordered the round: its number, the state to train from, the configuration, the result before it.
    Sites say `Ready` or `Decline`; one that connects now is sent the order. A decline ends when the site said that it
    would, and the site is sent the order then. Meanwhile the sites check the sum of the round before; no aggregation
    begins before its certificate is on disk (`Certified`). If too few sites for a cohort are left, the round waits.
pinging
    Everybody who is ready is asked whether it is there. Only `Pong` counts, and only with the number of this ping.
    Nothing new is promised, and nothing is written. Too few answers: the round waits, and goes on as soon as it can.
aggregation
    One attempt of secure aggregation, with those who answered. Its plan is on disk before a site sees it, and so is
    each thing that is shown to sites afterwards; who may say what in it is in `security/secagg/transitions.py`. An
    attempt that ends without a sum leads back to pinging, with those who are still there. A round of which no attempt
    can come any more is lost: it is closed on disk, and the next one opens with fresh updates.
done
    The last model is published, its round closed on disk. Sites still check the last sum; no order is sent any more,
    unless they vote against the last model.

A published sum closes its round and opens the next one in the same transaction: at any moment at most one round is open
on disk. `Ready`, `Decline` and `Pong` are kept in memory only. After a restart a run is in `waiting`, and sites are
sent the order again and say `Ready` again, or in `aggregation` if the open round has an attempt on disk, or
it is `done`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from lazaret.errors import LocalProtocolError


class RunPhase(StrEnum):
    WAITING = "waiting"
    TRAINING = "training"
    PINGING = "pinging"
    AGGREGATION = "aggregation"
    DONE = "done"


class PhaseChange(StrEnum):
    POSSIBLE = "possible"  # a cohort is there, and nobody has paused the run
    IMPOSSIBLE = "impossible"
    ENOUGH_READY = "enough-ready"  # all that are there are ready, or the deadline has passed with enough of them
    ANSWERED = "answered"  # the ping is over and enough have answered
    TOO_FEW = "too-few"
    ATTEMPT_ENDED = "attempt-ended"  # without a sum, yet the round goes on
    ROUND_LOST = "round-lost"
    PUBLISHED = "published"
    LAST_PUBLISHED = "last-published"
    VOTED_DOWN = "voted-down"  # the last model, and there are rounds to come again


TURNS: Final[Mapping[RunPhase, Mapping[PhaseChange, RunPhase]]] = {
    RunPhase.WAITING: {PhaseChange.POSSIBLE: RunPhase.TRAINING},
    RunPhase.TRAINING: {PhaseChange.ENOUGH_READY: RunPhase.PINGING, PhaseChange.IMPOSSIBLE: RunPhase.WAITING},
    RunPhase.PINGING: {
        PhaseChange.ANSWERED: RunPhase.AGGREGATION,
        PhaseChange.TOO_FEW: RunPhase.WAITING,
        PhaseChange.IMPOSSIBLE: RunPhase.WAITING,
        PhaseChange.ROUND_LOST: RunPhase.WAITING,
    },
    RunPhase.AGGREGATION: {
        PhaseChange.ATTEMPT_ENDED: RunPhase.PINGING,
        PhaseChange.PUBLISHED: RunPhase.WAITING,
        PhaseChange.LAST_PUBLISHED: RunPhase.DONE,
    },
    RunPhase.DONE: {PhaseChange.VOTED_DOWN: RunPhase.WAITING},
}


def follow(phase: RunPhase, turn: PhaseChange) -> RunPhase:
    """Where a turn leads. The engine asks before it moves.

    :raises LocalProtocolError: if it leads nowhere: a fault of the engine.
    """
    target = TURNS[phase].get(turn)
    if target is None:
        raise LocalProtocolError(f"{turn} is not possible while {phase}", where="round engine")
    return target


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What the manifest and the operator decide about a run. Milliseconds.

    :param least: the smallest cohort the operator wants; never below the manifest's.
    :param grace_ms: how long sites that are not connected are waited for when all others are ready.
    :param audit_ms: how long a check may stand still before the chunks of absent sites are handed on.
    """

    rounds: int
    config_hash: bytes
    train_ms: int
    least: int
    grace_ms: int = 60_000
    ping_ms: int = 3_000
    audit_ms: int = 15_000
