"""What a site's privacy log says of the steps of an aggregation. Rules and reasons of the hospital stay in this log."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from security.log import events as ev
from security.log.schema import MAX_COUNT
from security.secagg.certificates import CheckCertificate, Vote
from security.secagg.context import RoundContext
from security.secagg.effects import Log
from security.secagg.groups import Groups
from security.secagg.site.journal import NewestResult


def plain(text: str) -> str:
    """Text as the log takes it: one line, no controls, not too long."""
    return "".join(character if character.isprintable() else " " for character in text)[:400]


def loggable(number: int) -> int:
    """A number as an entry can hold it: what a lying coordinator makes up must not keep its refusal out of the log."""
    return min(number, MAX_COUNT)


def cohort_digest(context: RoundContext) -> str:
    """The same at every site and at the coordinator: SHA-256 over the members' ids, one to a line."""
    return hashlib.sha256("".join(f"{site}\n" for site in context.sites).encode()).hexdigest()


def invited(method: str, context: RoundContext, groups: Groups | None) -> Log:
    """The site joins an attempt."""
    event = ev.RoundInvited(
        method=method,
        attempt=context.attempt,
        context=context.ctx().hex(),
        cohort=cohort_digest(context),
        cohort_size=context.n,
        config=context.config_hash.hex(),
        groups=None if groups is None else groups.digest,
        rule="plan and policy agree",
    )
    return Log(event, context.round)


def declined(method: str, rule: str, number: int, context: RoundContext | None = None) -> Log:
    """The site does not take part: in a round, or in one attempt of it."""
    event = ev.RoundDeclined(
        method=method,
        attempt=loggable(context.attempt) if context else 0,
        context=context.ctx().hex() if context else None,
        rule=plain(rule),
    )
    return Log(event, loggable(number))


def agreed(context: RoundContext, digest: bytes, sites: Sequence[str]) -> Log:
    """The site agrees to the set of survivors."""
    event = ev.SecaggSurvivors(
        attempt=context.attempt,
        context=context.ctx().hex(),
        survivors=digest.hex(),
        count=len(sites),
        threshold=context.t,
        dropouts=tuple(site for site in context.sites if site not in sites),
    )
    return Log(event, context.round)


def unmasked(context: RoundContext, sites: Sequence[str]) -> Log:
    """The site sends its shares: of the seeds of the survivors, and of the mask keys of the others."""
    event = ev.SecaggUnmasked(
        attempt=context.attempt,
        context=context.ctx().hex(),
        self_mask=tuple(sites),
        mask_key=tuple(site for site in context.sites if site not in sites),
    )
    return Log(event, context.round)


def voted(head: NewestResult, check: CheckCertificate, *, accepted: bool) -> Log:
    """The site takes the vote set on a result."""
    event = vote_event(head.quorum, check, accepted=accepted, model=head.state_hash, before=head.trained_on)
    return Log(event, head.round)


def vote_event(quorum: int, check: CheckCertificate, *, accepted: bool, model: bytes, before: bytes) -> ev.ResultVoted:
    """The same at every site and at the coordinator."""
    accepts = sum(ack.vote == Vote.ACCEPT for ack in check.acks)
    return ev.ResultVoted(
        accepts=accepts,
        refusals=len(check.acks) - accepts,
        threshold=quorum,
        accepted=accepted,
        model=(model if accepted else before).hex(),
    )
