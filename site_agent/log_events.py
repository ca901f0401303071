"""What a site writes into its privacy log about its own steps. Rules and reasons of the hospital stay in this log."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from lazaret.errors import LocalProtocolError, RemoteProtocolError
from security.identity.manifest import Manifest
from security.identity.membership import Seat
from security.log import events as ev
from security.log.schema import MAX_COUNT
from security.secagg import effects as fx
from security.secagg import messages, records, relay
from security.secagg.certificates import Advert
from security.secagg.context import RoundContext
from security.secagg.effects import Refused
from security.secagg.fields import Wire
from security.secagg.registry import REGISTRY, Filing
from security.secagg.relay import SignedHead
from security.secagg.site.journal import Journal
from site_agent.contribution import LocalResult
from site_agent.effects import Effect, Effects, Evaluate, Forget, Leave, Note, Post, PostVector, Seal


def plain(text: str) -> str:
    """Text as the log takes it: one line, no controls, not too long."""
    return "".join(character if character.isprintable() else " " for character in text)[:400]


def cohort_digest(context: RoundContext) -> str:
    """The same at every site and at the coordinator: SHA-256 over the members' ids, one to a line."""
    return hashlib.sha256("".join(f"{site}\n" for site in context.sites).encode()).hexdigest()


def receipt(message: relay.Receipt, head: SignedHead | None, site: str, connection: int) -> Note:
    if head is None:
        raise RemoteProtocolError("a receipt comes with the checkpoint that covers it", where="receipt")
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


# ----------------------------------------
# The machine's effects in the site's own words: what is logged before a message, and under which round it is filed.

MOST_CONTEXTS = 256


class Translator:
    """Knows the contexts, survivors and upload roots that messages refer to by hash.

    :param dropouts: who was left out of the sums this site has agreed to, by context, as its log remembers.
    """

    def __init__(self, seat: Seat, journal: Journal, dropouts: Mapping[str, Collection[str]]) -> None:
        self._seat = seat
        self._contexts: dict[bytes, RoundContext] = {}
        self._survivors: dict[bytes, tuple[str, ...]] = {}
        self._roots: dict[bytes, bytes] = {}
        for memory in journal.attempts.values():
            self._remember(memory.context, memory.kx)
            gone = dropouts.get(memory.context.ctx().hex())
            if gone is not None and memory.kx is not None:
                self._survivors[memory.kx] = tuple(site for site in memory.context.sites if site not in gone)

    def heard(self, message: Wire) -> None:
        """A message of the coordinator, before the machine takes it."""
        if isinstance(message, messages.Plan | messages.AbortRequest):
            self._remember(message.context)
        if isinstance(message, messages.Survivors):
            self._survivors[message.kx] = tuple(line.site for line in message.uploads)

    def _remember(self, context: RoundContext, kx: bytes | None = None) -> None:
        self._contexts[context.ctx()] = context
        if kx is not None:
            self._contexts[kx] = context
        if len(self._contexts) > MOST_CONTEXTS:
            del self._contexts[next(iter(self._contexts))]

    def translate(self, effects: Iterable[fx.Effect], model: fx.Vector) -> Effects:
        """The machine's effects, with what the log and the outbox need put around them."""
        return tuple(translated for effect in effects for translated in self._translate(effect, model))

    def _translate(self, effect: fx.Effect, model: fx.Vector) -> Iterator[Effect]:
        match effect:
            case fx.Send(message=message):
                yield from self._send(message)
            case fx.SendUpload():
                context = self._contexts[effect.kx]
                root = self._roots[effect.kx]
                yield PostVector(upload=effect, root=root, round=context.round, cohort=context.sites)
            case fx.Persist(record=record):
                yield effect
                if isinstance(record, records.KeysSeen):
                    self._remember(self._contexts[record.ctx], record.kx)
            case fx.Advanced():
                yield effect
                yield Forget(effect.round)
                yield Seal()
                yield Evaluate(round=effect.round, state=model)
            case fx.Refused():
                yield refused(self._seat.manifest, effect, self._contexts.get(effect.ctx))
                yield effect
            case fx.Halted():
                yield Leave(effect.error, retry=False)
            case fx.LoneChange() | fx.Compact() | fx.Certified() | fx.Ended() | fx.KeepEvidence():
                yield effect
            case fx.DraftState() | fx.SaveState():
                yield effect
            case _:
                raise LocalProtocolError(f"{type(effect).__name__} is not an effect of a site")

    def _send(self, message: Wire) -> Iterator[Effect]:
        """A message of the machine, filed under its round, after the entry that says what it stands for."""
        context = self._context_of(message)
        if isinstance(message, messages.UploadHeader):
            self._roots[message.kx] = message.root
        if context is None:
            yield Post(message=message)
            return
        yield from self._stands_for(message, context)
        filed = REGISTRY[type(message)].filing is Filing.ATTEMPT
        yield Post(message=message, round=context.round if filed else None, cohort=context.sites)

    def _context_of(self, message: Wire) -> RoundContext | None:
        key = REGISTRY[type(message)].attempt_of(message)
        return None if key is None else self._contexts.get(key)

    def _stands_for(self, message: Wire, context: RoundContext) -> Iterator[Note]:
        if isinstance(message, Advert):
            yield invited(self._seat.manifest, context)
        elif isinstance(message, messages.Agree):
            members = self._survivors.get(message.kx, ())
            yield survivors(context, message.survivors, members)
        elif isinstance(message, messages.Unmask) and message.kx in self._survivors:
            yield unmasked(context, self._survivors[message.kx])
