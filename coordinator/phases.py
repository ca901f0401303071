"""The phases of a run: where it can be, every way from one phase to another, and who must be there for it.

A run is a sequence of rounds, a round a sequence of phases:

    training -> pinging -> burst -> training of the next round -> ... -> done

`burst` is the program's name for the aggregation. Training takes hours, a burst takes seconds: it is held with the
sites that are ready and have just answered, so that a slow or absent site costs the others nothing but the deadline.

training
    The coordinator has ordered a round: its number, the state to train from, the configuration, the result before it.
    Sites say `Ready` or `Decline`; one that connects now is sent the order. The round is on disk (`OpenRound`) before
    the first order is sent, so that a number is never used for two things. Meanwhile the sites check the sum of the
    round before; no burst begins before its certificate is on disk (`Certified`).
pinging
    Everybody who is ready is asked whether it is there. Only `Pong` counts, and only with the number of this ping.
    Nothing new is promised, and nothing is written. Too few answers: back to training, and the round goes on.
burst
    One attempt of secure aggregation, with those who answered. Its plan is on disk before a site sees it, and so is
    each thing that is shown to sites afterwards; who may say what in it is in `security/secagg/transitions.py`. An
    attempt that ends without a sum leads back to pinging, with those who are still there. A round of which no attempt
    can come any more is lost: it is closed on disk, and the next one opens with fresh updates.
done
    The last model is published, its round closed on disk. Sites still check the last sum; no order is sent any more.

A published sum closes its round and opens the next one in the same transaction: at any moment at most one round is open
on disk. `Ready` and `Pong` are kept in memory only. After a restart a run is in `training`, where sites are sent the
order again and say `Ready` again, or in `burst` if the open round has an attempt on disk, or it is `done`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from lazaret.errors import LocalProtocolError


class RunPhase(StrEnum):
    TRAINING = "training"
    PINGING = "pinging"
    BURST = "burst"
    DONE = "done"


class PhaseChange(StrEnum):
    ENOUGH_READY = "enough-ready"  # all that are there are ready, or the deadline has passed with enough of them
    ANSWERED = "answered"  # the ping is over and enough have answered
    TOO_FEW = "too-few"
    ATTEMPT_ENDED = "attempt-ended"  # without a sum, yet the round goes on
    ROUND_LOST = "round-lost"
    PUBLISHED = "published"
    LAST_PUBLISHED = "last-published"


TURNS: Final[Mapping[RunPhase, Mapping[PhaseChange, RunPhase]]] = {
    RunPhase.TRAINING: {PhaseChange.ENOUGH_READY: RunPhase.PINGING},
    RunPhase.PINGING: {
        PhaseChange.ANSWERED: RunPhase.BURST,
        PhaseChange.TOO_FEW: RunPhase.TRAINING,
        PhaseChange.ROUND_LOST: RunPhase.TRAINING,
    },
    RunPhase.BURST: {
        PhaseChange.ATTEMPT_ENDED: RunPhase.PINGING,
        PhaseChange.ROUND_LOST: RunPhase.TRAINING,
        PhaseChange.PUBLISHED: RunPhase.TRAINING,
        PhaseChange.LAST_PUBLISHED: RunPhase.DONE,
    },
    RunPhase.DONE: {},
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


class Attendance:
    """Who is connected, and what each site has answered in this round.

    :ivar declined: who has said that it does not train in this round.
    :ivar answered: who has answered the newest ping, whose number is `ping`.
    """

    def __init__(self) -> None:
        self.online: set[str] = set()
        self.ready: set[str] = set()
        self.declined: set[str] = set()
        self.answered: set[str] = set()
        self.ping = 0
        self._pinged: set[str] = set()
        self._others_ready_since: int | None = None

    def new_round(self) -> None:
        """Who is connected stays so; all else is asked anew."""
        self.ready, self.declined, self.answered = set(), set(), set()
        self._others_ready_since = None

    def gone(self, site: str) -> None:
        """A stream has ended. What the site said in this round it will say again when it is back."""
        self.online.discard(site)
        self.ready.discard(site)
        self.answered.discard(site)

    def next_ping(self) -> list[str]:
        """Whom to ask now; older answers count no more."""
        self.ping += 1
        self.answered, self._pinged = set(), set(self.ready)
        return sorted(self.ready)

    @property
    def all_answered(self) -> bool:
        return self.answered >= self._pinged

    @property
    def present(self) -> set[str]:
        """Who can be in an attempt that begins now."""
        return self.ready & self.answered

    def keep_connected(self) -> list[str]:
        """Too few have answered. Who did not may only be slow, and stays ready as long as it is connected.

        :returns: who is to be sent the order: sites that came back during a burst have not been asked at all.
        """
        self.ready &= self.online
        return sorted(self.online - self.ready - self.declined)

    def complete(self, able: Iterable[str], now_ms: int, *, grace_ms: int) -> bool:
        """Whether nobody of those who are able to take part is left to wait for."""
        awaited = set(able) - self.ready - self.declined
        if not awaited:
            return True
        if awaited & self.online:
            self._others_ready_since = None
            return False
        # Only sites that are not connected are missing: they get a little time to come back.
        self._others_ready_since = self._others_ready_since or now_ms
        return now_ms >= self._others_ready_since + grace_ms
