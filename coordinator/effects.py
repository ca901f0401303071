"""What the round engine asks its shell to do, beside the effects of the aggregation machine itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from security.secagg.certificates import CheckCertificate
from security.secagg.coordinator.rounds import RoundStart
from security.secagg.effects import Effect as ProtocolEffect
from security.secagg.effects import Persist
from security.secagg.fields import Wire
from security.secagg.messages import Result

PUBLISHED: Final = "published"  # a sum that gave a model
VOID: Final = "void"  # a sum that nobody can use; the model stays as it was


@dataclass(frozen=True, slots=True)
class Keep:
    """A record of the aggregation machine, with the round it belongs to: the engine may be in the next one already."""

    round: int
    record: Wire


@dataclass(frozen=True, slots=True)
class OpenRound:
    """A round has begun; its number is used up from here on, whatever becomes of it."""

    start: RoundStart


@dataclass(frozen=True, slots=True)
class CloseRound:
    """A round is over: `PUBLISHED`, `VOID`, or why it was lost."""

    round: int
    outcome: str


@dataclass(frozen=True, slots=True)
class KeepLink:
    """The chain has a new result. Persisted in the same transaction as the machine's own record of it."""

    result_hash: bytes
    result: Result


@dataclass(frozen=True, slots=True)
class KeepCertificate:
    """A result is covered; the certificate goes with the next plan and to every site that catches up."""

    result_hash: bytes
    check: CheckCertificate


@dataclass(frozen=True, slots=True)
class Exclude:
    """A site is left out until the consortium has cleared it, by giving it another signing certificate than this."""

    site: str
    cert: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class KeepStrikes:
    """What is held against sites that were absent: how often in a row, and how many cohorts they still sit out."""

    strikes: Mapping[str, int]
    pause: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SendState:
    """Send a whole state in frames to a site that was away for too long to replay the sums."""

    to: str
    state_hash: bytes


@dataclass(frozen=True, slots=True)
class ReplaySum:
    """Send the sum of an older result in frames, read from the spool."""

    to: str
    result_hash: bytes
    sum_root: bytes


Effect = (
    ProtocolEffect
    | Keep
    | OpenRound
    | CloseRound
    | KeepLink
    | KeepCertificate
    | Exclude
    | KeepStrikes
    | SendState
    | ReplaySum
)
Effects = tuple[Effect, ...]


def of_round(number: int, effects: Iterable[Effect]) -> Iterator[Effect]:
    """The machine's effects, with its records filed under their round."""
    for effect in effects:
        yield Keep(number, effect.record) if isinstance(effect, Persist) else effect
