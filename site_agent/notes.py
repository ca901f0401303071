"""What a site writes into its privacy log about its own steps. Rules and reasons of the hospital stay in this log."""

from __future__ import annotations

import hashlib
from typing import Any

from security import relay
from security.audit import events as ev
from security.audit.kinds import MAX_COUNT
from security.consortium.manifest import Manifest
from security.errors import RemoteProtocolError
from security.relay import SignedHead
from security.secagg.context import RoundContext
from security.secagg.effects import Refused
from site_agent.contribution import LocalResult
from site_agent.effects import Note


def plain(text: str) -> str:
    """Text as the log takes it: one line, no controls, not too long."""
    return "".join(character if character.isprintable() else " " for character in text)[:400]


def cohort_digest(context: RoundContext) -> str:
    """The same at every site and at the coordinator: SHA-256 over the members' ids, one to a line."""
    return hashlib.sha256("".join(f"{site}\n" for site in context.sites).encode()).hexdigest()


def receipt(message: relay.Receipt, head: SignedHead | None, site: str, connection: int) -> Note:
    if head is None:
        raise RemoteProtocolError("a receipt comes with the head it is under", where="receipt")
    event = ev.Receipt(
        msg_id=relay.message_id(site, connection, message.sequence, from_site=True),
        head_size=head.size,
        head_root=head.root.hex(),
        ingress=message.entry,
        proof=hashlib.sha256(b"".join(message.path)).hexdigest() if message.path else None,
    )
    return Note(event=event)


def model_received(manifest: Manifest, number: int, state_hash: bytes, sender: str) -> Note:
    layout = manifest.aggregation.layout
    event = ev.ModelReceived(
        model=state_hash.hex(), bytes=4 * layout.state_words, layout=layout.layout_hash.hex(), sender=sender
    )
    return Note(event=event, round=number)


def train_done(manifest: Manifest, number: int, result: LocalResult) -> Note:
    artefacts: tuple[dict[str, Any], ...] = tuple(
        {"disposition": "local-only", "elements": elements, "hmac": keyed.hex(), "kind": kind}
        for kind, elements, keyed in result.artefacts
    )
    event = ev.TrainDone(
        method=manifest.training.method, steps=result.steps, wall_ms=result.wall_ms, artefacts=artefacts
    )
    return Note(event=event, round=number)


def loggable(number: int) -> int:
    """A number as an entry can hold it: what a lying coordinator makes up must not keep its refusal out of the log."""
    return min(number, MAX_COUNT)


def declined(manifest: Manifest, rule: str, number: int, context: RoundContext | None = None) -> Note:
    event = ev.RoundDeclined(
        method=manifest.training.method,
        attempt=loggable(context.attempt) if context else 0,
        context=context.ctx().hex() if context else None,
        rule=plain(rule),
    )
    return Note(event=event, round=loggable(number))


def refused(manifest: Manifest, effect: Refused, context: RoundContext | None) -> Note:
    event = ev.RoundDeclined(
        method=manifest.training.method,
        attempt=loggable(context.attempt) if context else 0,
        context=effect.ctx.hex(),
        rule=plain(str(effect.error)),
    )
    return Note(event=event, round=loggable(context.round) if context else None)


def invited(manifest: Manifest, context: RoundContext) -> Note:
    event = ev.RoundInvited(
        method=manifest.training.method,
        attempt=context.attempt,
        context=context.ctx().hex(),
        cohort=cohort_digest(context),
        cohort_size=context.n,
        rule="plan and policy agree",
    )
    return Note(event=event, round=context.round)


def survivors(context: RoundContext, digest: bytes, sites: tuple[str, ...]) -> Note:
    event = ev.SecaggSurvivors(
        attempt=context.attempt,
        context=context.ctx().hex(),
        survivors=digest.hex(),
        count=len(sites),
        threshold=context.t,
        dropouts=tuple(site for site in context.sites if site not in sites),
    )
    return Note(event=event, round=context.round)


def unmasked(context: RoundContext, sites: tuple[str, ...]) -> Note:
    event = ev.SecaggUnmasked(
        attempt=context.attempt,
        context=context.ctx().hex(),
        self_mask=sites,
        mask_key=tuple(site for site in context.sites if site not in sites),
    )
    return Note(event=event, round=context.round)
