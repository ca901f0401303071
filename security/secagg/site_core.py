"""What the parts of a site's machine share: who it is, what it may do, what it remembers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from security.clock import Clock
from security.prg import Words
from security.rng import Randomness
from security.secagg.attempt import Heads
from security.secagg.effects import Persist
from security.secagg.journal import Head, Journal
from security.secagg.policy import AggregationPolicy
from security.secagg.statements import Signer
from security.secagg.wire import Wire
from security.secrets import Secret

HOUR_MS = 3600 * 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingUpdate:
    """A site's encoded update of one round: made once, the same in every attempt."""

    round: int
    state_hash: bytes
    config_hash: bytes
    words: Words = field(repr=False)


@dataclass(kw_only=True)
class SiteCore:
    """A site's identity, policy and memory.

    :param storage_key: seals the answer that must survive a restart between AGREE and RELEASE.
    :param heads: the newest heads of the privacy log and ledger, asked for at every advert.
    :param patience_ms: how long to wait for each of the coordinator's steps before AGREE.
    """

    policy: AggregationPolicy
    signer: Signer
    journal: Journal
    storage_key: Secret
    randomness: Randomness
    clock: Clock
    heads: Callable[[], Heads] = Heads
    patience_ms: int = HOUR_MS
    workers: int = 1

    @property
    def site(self) -> str:
        return self.signer.site

    @property
    def head(self) -> Head:
        return self.journal.head(self.policy)

    def record(self, record: Wire) -> Persist:
        """Remember something now and ask for it to be written before whatever comes next is done."""
        self.journal.apply(record)
        return Persist(record)
