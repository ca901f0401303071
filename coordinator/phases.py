"""The phases of a run: where it can be, every way from one phase to another, and who must be there for it.

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

from collections.abc import Collection, Iterable, Mapping, Sequence
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


RETURN_SUMS: Final = 3  # after so many sums without it a site comes back, also without those who left when it did


def held_back(sums: Sequence[Collection[str]], able: Collection[str], there: Collection[str], *, c: int) -> set[str]:
    """Who is left out for now because it would come back to the cohort without others who left.

    Sites that left and come back one after the other are told apart by the differences of the sums: each return shows
    one of them. If they come back together, only their sum is shown. So one that is back early waits for the rest, or
    for c + 2 of them, for as many sums as `RETURN_SUMS` says. One that left alone has nobody to wait for.

    :param sums: who was in the newest sums of the run, newest first.
    :param able: who may be in a cohort; of these, `there` are connected.
    """
    if not sums:
        return set()
    away = {site for sites in sums[1:RETURN_SUMS] for site in sites} & set(able) - set(sums[0])
    back = away & set(there)
    return set() if back == away or len(back) >= c + 2 else away


ASK_AGAIN_MS: Final = 600_000  # a site that declined without saying until when


class Attendance:
    """Who is connected, and what each site has answered in this round.

    :ivar declined: who has said that it does not train now, and when it is asked again.
    :ivar answered: who has answered the newest ping, whose number is `ping`.
    """

    def __init__(self) -> None:
        self.online: set[str] = set()
        self.ready: set[str] = set()
        self.declined: dict[str, int] = {}
        self.answered: set[str] = set()
        self.ping = 0
        self._lasting: set[str] = set()
        self._pinged: set[str] = set()
        self._others_ready_since: int | None = None

    def new_round(self) -> None:
        """Who is connected stays so, and who has said until when it declines; all else is asked anew."""
        self.declined = {site: until for site, until in self.declined.items() if site in self._lasting}
        self.ready, self.answered = set(), set()
        self._others_ready_since = None

    def decline(self, site: str, seconds: int, now_ms: int) -> None:
        """A site does not train.

        :param seconds: when it may be asked again; 0 if that depends on the round.
        """
        self.ready.discard(site)
        self.declined[site] = now_ms + (1000 * seconds or ASK_AGAIN_MS)
        (self._lasting.add if seconds else self._lasting.discard)(site)

    def ask_again(self, now_ms: int) -> list[str]:
        """Whose time is over; they have not declined any more."""
        over = sorted(site for site, until in self.declined.items() if now_ms >= until)
        for site in over:
            del self.declined[site]
        return [site for site in over if site in self.online]

    def gone(self, site: str) -> None:
        """A stream has ended. What the site said in this round it will say again when it is back."""
        self.online.discard(site)
        self.ready.discard(site)
        self.answered.discard(site)
        self.declined.pop(site, None)

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

    @property
    def silent(self) -> set[str]:
        """Who is connected and has not answered the order; sites that came back in an aggregation have not got it."""
        return self.online - self.ready - self.declined.keys()

    @property
    def willing(self) -> set[str]:
        """Who is connected and has not declined."""
        return self.online - self.declined.keys()

    def complete(self, able: Iterable[str], now_ms: int, *, grace_ms: int) -> bool:
        """Whether nobody of those who are able to take part is left to wait for."""
        awaited = set(able) - self.ready - self.declined.keys()
        if not awaited:
            return True
        if awaited & self.online:
            self._others_ready_since = None
            return False
        # Only sites that are not connected are missing: they get a little time to come back.
        self._others_ready_since = self._others_ready_since or now_ms
        return now_ms >= self._others_ready_since + grace_ms
