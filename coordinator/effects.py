"""What the round engine asks its shell to do, beside the effects of the aggregation machine itself.

There is one vocabulary. The engine passes on what an attempt asks for (`security.secagg.effects`) as it is, and adds
what only a run knows: where a round begins and ends, and what is held against sites. `Stored` lists the effects that
are records: those that stand side by side go into one transaction, which is on disk before anything behind it is
carried out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from security.identity.membership import AggregationPolicy
from security.secagg.coordinator.rounds import BlameBook, RoundStart
from security.secagg.effects import Certified, Persist, SaveState, VotedDown
from security.secagg.effects import Effect as ProtocolEffect

PUBLISHED: Final = "published"  # a sum that gave a model
MANIFEST_CHANGED: Final = "the manifest changed"  # the round was open, and belonged to the manifest before
RECOVERED: Final = "recovered"  # numbers that a lost coordinator may have used; nothing is known of these rounds
ENDED: Final = "ended by the operator"  # with the run, before its last round
VOID: Final = "void"  # a sum that nobody can use; the model stays as it was
VOTED_DOWN: Final = "voted down"  # a sum whose model the sites do not accept; the model stays as it was


@dataclass(frozen=True, slots=True)
class OpenRound:
    """A round has begun; its number is used up from here on, whatever becomes of it. Once more after a vote, which
    decides what the round follows."""

    start: RoundStart


@dataclass(frozen=True, slots=True)
class CloseRound:
    """A round is over: `PUBLISHED`, `VOID`, or why it was lost."""

    round: int
    outcome: str


@dataclass(frozen=True, slots=True)
class StoreBlame:
    """What is held against sites, as it is now.

    :ivar strikes: how often in a row a site was absent.
    :ivar pause: how many cohorts it still sits out for that.
    :ivar excluded: who is left out until the consortium has cleared it: why, and under which signing certificate. A new
        certificate is the consortium's word that the site may take part again.
    :ivar disputes: accuser and dealer of each dispute about a share box, with their signing certificates.
    :ivar silence: how many accusations in a row a dealer has not answered, and its signing certificate.
    """

    strikes: Mapping[str, int]
    pause: Mapping[str, int]
    excluded: Mapping[str, tuple[str, bytes]]
    disputes: Mapping[tuple[str, str], tuple[bytes, bytes]]
    silence: Mapping[str, tuple[int, bytes]]

    @classmethod
    def of(cls, book: BlameBook, policy: AggregationPolicy) -> StoreBlame:
        certs = {entry.site: entry.cert for entry in policy.roster}
        excluded = {site: (reason, certs[site]) for site, reason in book.excluded.items() if site in certs}
        disputes = {pair: (certs[pair[0]], certs[pair[1]]) for pair in book.accusations if certs.keys() >= set(pair)}
        silence = {site: (count, certs[site]) for site, count in book.silence.items() if site in certs}
        return cls(dict(book.strikes), dict(book.pause), excluded, disputes, silence)


@dataclass(frozen=True, slots=True)
class PauseRun:
    """The engine has paused the run: it begins nothing new until the operator resumes it, also after a restart."""

    reason: str


Effect = ProtocolEffect | OpenRound | CloseRound | StoreBlame | PauseRun
Effects = tuple[Effect, ...]
Stored = Persist | SaveState | Certified | VotedDown | OpenRound | CloseRound | StoreBlame
