"""What a coordinator works with in every attempt."""

from __future__ import annotations

from dataclasses import dataclass, field

from security.clock import Clock
from security.secagg.policy import AggregationPolicy
from security.secagg.spool import Spool
from security.secagg.statements import Signer
from security.secagg.transitions import CoordinatorState

_S = CoordinatorState
_TIMED = (_S.ADVERTISING, _S.DEALING, _S.AGREEING, _S.ABORTING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long the coordinator waits for each step, in milliseconds."""

    step_ms: int = 30_000
    upload_ms: int = 60_000
    upload_bytes_per_ms: int = 125  # one megabit a second
    release_ms: int = 600_000

    def of(self, state: CoordinatorState, vector_bytes: int) -> int | None:
        if state is _S.UPLOADING:
            return self.upload_ms + vector_bytes // self.upload_bytes_per_ms
        if state is _S.UNMASKING:
            return self.release_ms
        return self.step_ms if state in _TIMED else None


@dataclass(kw_only=True)
class CoordinatorCore:
    """Who the coordinator is and what it works with."""

    policy: AggregationPolicy
    signer: Signer
    spool: Spool
    clock: Clock
    timeouts: Timeouts = field(default_factory=Timeouts)
    workers: int = 1
