"""The site's machine: event in, effects out (docs/spec/secure-aggregation.md, sections 3, 8 and 9).

It has no socket, no file and no clock of its own. Its most important rule: in one attempt at most one AGREE, and after
it RELEASE or ABORT, never both, each recorded before it is sent. `security.secagg.transitions` explains the states.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from lazaret.errors import KeyUnavailable, LocalProtocolError, PolicyViolation, RemoteProtocolError, ToolkitError
from security.crypto import masking
from security.identity.membership import AggregationPolicy
from security.secagg import messages, records, statements
from security.secagg.certificates import AbortCode, Vote
from security.secagg.context import ZERO_DIGEST, RoundContext
from security.secagg.effects import (
    REFUSED,
    Compact,
    Effect,
    Effects,
    Ended,
    KeepEvidence,
    Leave,
    Log,
    Send,
    SendUpload,
    in_order,
)
from security.secagg.fields import Wire
from security.secagg.layout import Vector
from security.secagg.records import AttemptOutcome
from security.secagg.site import checks, entries
from security.secagg.site.aggregation import SiteAggregation, ended
from security.secagg.site.attempt import PendingUpdate, SiteCore
from security.secagg.site.result_checks import WrongSum
from security.secagg.site.results import Intake, WrongSumEvidence
from security.secagg.transitions import SITE, SiteEvent, SiteState, step

_BEFORE_AGREE = (SiteState.ADVERTISED, SiteState.DEALT, SiteState.DISPUTING, SiteState.UPLOADED)
# Events whose handlers move the state themselves, because it depends on what they find.
_OWN_STATE = (
    SiteEvent.SUM_FRAME,
    SiteEvent.JUMP,
    SiteEvent.STATE_FRAME,
    SiteEvent.CHUNK,
    SiteEvent.ROLLBACK,
    SiteEvent.ABORT_REQUEST,
    SiteEvent.OLD_ABORT_REQUEST,
    SiteEvent.OLD_QUORUM,
    SiteEvent.ACCUSATION,
)
_STEPS = (SiteEvent.ADVERTS, SiteEvent.DELIVER, SiteEvent.SURVIVORS)
# If exactly the same message arrives again, exactly the same answer is sent again (section 3).
_ANSWERED = (SiteEvent.PLAN, *_STEPS, SiteEvent.DISCLOSURE)


class SiteMachine:
    """One site in one federation, over all its rounds."""

    def __init__(self, core: SiteCore, model: Vector, before: Vector | None = None) -> None:
        """`before` is the model that stands again if the sites vote against `model`; needed while they have not."""
        self.core = core
        self.intake = Intake(core, model, before)
        self.aggregation = SiteAggregation(core)
        self.state = SiteState.HALTED if core.journal.stopped else SiteState.IDLE
        self.deadline: int | None = None
        self._answers: dict[bytes, Effects] = {}

    # What the shell calls.

    def start(self) -> Effects:
        """After every (re)start: abort what cannot continue, and announce this site (section 9)."""
        if self.core.journal.stopped:
            return (Leave(PolicyViolation(self.core.journal.stopped, where="start")),)
        effects: list[Effect] = []
        self._check_manifest(effects)
        for memory in self.core.journal.open_attempts():
            # Keys and shares of an attempt before AGREE were in memory only.
            if memory.agreed is None:
                effects += self._abort(memory.context, AbortCode.RESTARTED)
        self._take_up()
        return *effects, *in_order(self.hello())

    def hello(self) -> messages.Hello:
        head = self.core.head
        open_ctx = self.aggregation.ctx if self.state is not SiteState.IDLE else b""
        return messages.Hello(
            site=self.core.site, open_ctx=open_ctx or ZERO_DIGEST, round=head.round, result=head.result
        )

    def load_update(self, update: PendingUpdate) -> Effects:
        """Take the encoded update of a round; after a restart, the same one again."""
        step(SITE, self.state, SiteEvent.UPDATE)
        layout, head = self.core.policy.layout, self.core.head
        if update.words.shape != (layout.words,) or update.words.dtype != layout.dtype:
            raise LocalProtocolError("an update is one vector of the layout", where="update")
        if update.round <= head.round or update.state_hash != head.state_hash:
            raise PolicyViolation("update was not trained on the newest model", where="update")
        if self.core.policy.strict and not head.certified:
            raise PolicyViolation("the newest model has no check certificate yet", where="update")
        bound = records.UpdateBound(
            round=update.round,
            state_hash=update.state_hash,
            config_hash=update.config_hash,
            digest=masking.words_root(update.words, layout.ring),
        )
        known = self.core.journal.update
        checks.check_one_update(known, bound)
        checks.check_fresh_update(self.core.journal, bound)
        self.aggregation.update = update
        return () if known == bound else (self.core.record(bound),)

    def vote(self, result: bytes, *, accept: bool) -> Effects:
        """What this site thinks of the model of a result (`AskVote`). Too late, or said before: nothing happens."""
        if self.state is not SiteState.IDLE:
            return ()
        return self.intake.vote(result, Vote.ACCEPT if accept else Vote.REFUSE)

    def admit(self, policy: AggregationPolicy) -> None:
        """Check that another policy may come into force now, and prepare for it.

        The caller then changes the mandate, and calls `renewed`. An attempt in which this site has agreed stays on
        disk, as when another plan follows: a coordinator under the newer manifest never asks for its end.
        """
        target = SITE[self.state].get(SiteEvent.MANIFEST)
        if target is None:
            raise LocalProtocolError("a manifest takes effect between attempts", where="manifest")
        checks.check_manifest_version(policy, self.core.journal.manifest)
        if self.state is not target:
            self.state, self.aggregation.attempt, self.aggregation.ctx, self._answers = target, None, b"", {}
        if policy.layout.layout_hash != self.core.policy.layout.layout_hash:
            self.aggregation.update = None  # encoded for another layout: in a sum with others it would be wrong

    def renewed(self) -> Effects:
        """Another policy has come into force: write down its manifest, if that is another one too."""
        effects: list[Effect] = []
        self._check_manifest(effects)
        return tuple(effects)

    def receive(self, message: Wire) -> Effects:
        """Take a message from the coordinator."""
        event, handler = self._route(message)
        asked = self._question(message) if event in _ANSWERED else b""
        if asked in self._answers:
            return self._answers[asked]
        if isinstance(message, messages.Survivors) and self.state is SiteState.AGREED:
            return self.aggregation.agree_again(message)
        target = step(SITE, self.state, event)
        try:
            effects = handler(message)
        except KeyUnavailable:
            raise  # no fault of the message, and an abort could not be signed either
        except ToolkitError as error:
            return self._failed(message, event, error)
        if event not in _OWN_STATE:
            self.state = self._after_boxes(event, target)
            self._wait()
        if event in _ANSWERED:
            self._answers[asked] = tuple(e for e in effects if isinstance(e, Log | Send | SendUpload))
        return effects

    def receive_untrained(self, plan: messages.Plan) -> Effects:
        """Take a plan as a site that has not trained yet; its update stays for another plan."""
        update, self.aggregation.update = self.aggregation.update, None
        try:
            return self.receive(plan)
        finally:
            self.aggregation.update = update

    def _after_boxes(self, event: SiteEvent, target: SiteState) -> SiteState:
        """Whether the upload could follow depends on what the boxes hold, or on the answers of their dealers."""
        if event is SiteEvent.DELIVER and self.aggregation.disputing:
            return step(SITE, self.state, SiteEvent.BAD_BOX)
        if event is SiteEvent.DISCLOSURE and not self.aggregation.disputing:
            return step(SITE, self.state, SiteEvent.SETTLED)
        return target

    @staticmethod
    def _question(message: Wire) -> bytes:
        """A question is the same if all of its fields are, whatever parcel it came in."""
        return hashlib.sha256(type(message).__name__.encode() + message.to_bytes()).digest()

    def reject(self, error: ToolkitError) -> Effects:
        """Something arrived that is not a message: the open attempt ends, if it still can (section 3)."""
        if self.state not in _BEFORE_AGREE:
            return ()
        step(SITE, self.state, SiteEvent.FAILURE)
        return self._abort(self._open_context(), AbortCode.FAILED_CHECK, error)

    def tick(self) -> Effects:
        """Look at the clock. Before AGREE a timeout ends the attempt, after it only `secret_ttl` does (section 9)."""
        if self.state in _BEFORE_AGREE and self.deadline is not None and self.core.clock.mono_ms() >= self.deadline:
            step(SITE, self.state, SiteEvent.DEADLINE)
            return self._abort(self._open_context(), AbortCode.TIMED_OUT)
        return self._expire() if self.state is not SiteState.HALTED else ()

    # Routing.

    def _route(self, message: Wire) -> tuple[SiteEvent, Callable[[Any], Effects]]:
        if isinstance(message, messages.AbortRequest):
            mine = self.state is not SiteState.IDLE and message.context.ctx() == self.aggregation.ctx
            return (SiteEvent.ABORT_REQUEST if mine else SiteEvent.OLD_ABORT_REQUEST), self._abort_request
        if isinstance(message, messages.Quorum):
            memory = self.core.journal.attempts.get(self.aggregation.ctx)
            mine = self.state is not SiteState.IDLE and memory is not None and memory.kx == message.kx
            return (SiteEvent.QUORUM if mine else SiteEvent.OLD_QUORUM), self.aggregation.quorum
        routes: dict[type[Wire], tuple[SiteEvent, Callable[[Any], Effects]]] = {
            messages.Plan: (SiteEvent.PLAN, self._plan),
            messages.Adverts: (SiteEvent.ADVERTS, self.aggregation.adverts),
            messages.Deliver: (SiteEvent.DELIVER, self.aggregation.deliver),
            messages.Accusation: (SiteEvent.ACCUSATION, self.aggregation.accusation),
            messages.Disclosure: (SiteEvent.DISCLOSURE, self.aggregation.disclosure),
            messages.UploadResume: (SiteEvent.RESUME, self.aggregation.resume),
            messages.Survivors: (SiteEvent.SURVIVORS, self.aggregation.survivors),
            messages.Result: (SiteEvent.RESULT, self.intake.header),
            messages.SumFrame: (SiteEvent.SUM_FRAME, self._sum_frame),
            messages.Jump: (SiteEvent.JUMP, self.intake.jump),
            messages.StateFrame: (SiteEvent.STATE_FRAME, self._state_frame),
            messages.ResultCertificate: (SiteEvent.CERTIFICATE, self.intake.certify),
            messages.TrainOrder: (SiteEvent.CERTIFICATE, self.intake.certify),
            messages.AuditOrder: (SiteEvent.AUDIT_ORDER, self.intake.order),
            messages.ChunkPiece: (SiteEvent.CHUNK, self._piece),
            messages.Rollback: (SiteEvent.ROLLBACK, self._rollback),
        }
        if type(message) not in routes:
            raise RemoteProtocolError(f"{type(message).__name__} is not for a site")
        return routes[type(message)]

    def _failed(self, message: Wire, event: SiteEvent, error: ToolkitError) -> Effects:
        """A check failed: refuse a plan, abort before AGREE, and after it change nothing."""
        if isinstance(message, messages.Plan):
            return self._refuse(message.context, error)
        if event not in _STEPS or self.aggregation.attempt is None:
            raise error
        step(SITE, self.state, SiteEvent.FAILURE)
        evidence: Effects = ()
        if isinstance(error, checks.StateRestored):
            evidence = in_order(messages.Rollback(advert=error.known))
        return (*evidence, *self._abort(self._open_context(), AbortCode.FAILED_CHECK, error))

    def _refuse(self, context: RoundContext, error: ToolkitError) -> Effects:
        ctx = context.ctx()
        entry = entries.declined(self.core.policy.method, str(error), context.round, context)
        refusal = messages.Refusal(site=self.core.site, ctx=ctx)
        return *in_order(refusal, context, entry=entry, filed=False), Ended(ctx, REFUSED, error)

    # What ends or begins an attempt.

    def _plan(self, plan: messages.Plan) -> Effects:
        effects = self.aggregation.plan(plan)
        self._answers = {}
        self.intake.end_audit()
        return effects

    def _wait(self) -> None:
        """Each step has its own timeout."""
        before = self.state in _BEFORE_AGREE
        self.deadline = self.core.clock.mono_ms() + self.core.patience_ms if before else None

    def _open_context(self) -> RoundContext:
        return self.core.journal.attempts[self.aggregation.ctx].context

    def _abort(self, context: RoundContext, code: AbortCode, error: ToolkitError | None = None) -> Effects:
        """Promise never to release in this attempt, and erase what could be released (section 8)."""
        ctx, journal = context.ctx(), self.core.journal
        checks.check_may_abort(journal, ctx)
        memory = journal.attempts.get(ctx)
        code = AbortCode(journal.aborted.get(ctx, code))
        effects: list[Effect] = []
        if ctx not in journal.aborted:
            effects.append(self.core.record(ended(context, AttemptOutcome.ABORTED, code)))
        if memory is not None and memory.agreed is not None:
            effects.append(Compact(journal.compacted(done_round=self.core.head.round, standing=self.core.standing)))
        if ctx == self.aggregation.ctx:
            self.aggregation.attempt, self.aggregation.ctx, self._answers = None, b"", {}
            self.state, self.deadline = SiteState.IDLE, None
        signature = self.core.signer.sign(statements.abort(ctx, code))
        abort = messages.Abort(site=self.core.site, ctx=ctx, code=code, signature=signature)
        return *effects, *in_order(abort, context, filed=False), Ended(ctx, code.name.lower(), error)

    def _abort_request(self, message: messages.AbortRequest) -> Effects:
        """Also for attempts this site never joined, as long as it can promise never to join them."""
        policy, context = self.core.policy, message.context
        checks.check_abort_request(policy, context, message.signature)
        if context.ctx() not in self.core.journal.attempts:  # one that it remembers may be of an older manifest
            checks.check_plan_federation(policy, context)
        checks.check_plan_self(self.core.site, context)
        checks.check_plan_window(self.core.head, self.core.journal, context)
        checks.check_plan_attempts(policy, context)
        return self._abort(context, AbortCode.REQUESTED)

    def _expire(self) -> Effects:
        """Erase every sealed answer that is older than `secret_ttl`, also those of attempts that another one has
        followed: with their shares, an old upload could still be opened (section 9)."""
        now, effects = self.core.clock.now_ms(), list[Effect]()
        for ctx, memory in list(self.core.journal.attempts.items()):
            if memory.agreed is None or now < memory.agreed.expires_ms:
                continue
            mine = ctx == self.aggregation.ctx
            target = step(SITE, self.state, SiteEvent.DEADLINE) if mine else self.state
            if memory.outcome is None:
                effects += self._abort(memory.context, AbortCode.EXPIRED)
                continue
            if mine:
                self.state, self.aggregation.ctx = target, b""
            erased = self.core.record(records.ReplyErased(ctx=ctx))
            effects += [erased, self._compact(), Ended(ctx, "expired")]
        return tuple(effects)

    def _compact(self) -> Compact:
        return Compact(self.core.journal.compacted(done_round=self.core.head.round, standing=self.core.standing))

    def _sum_frame(self, frame: messages.SumFrame) -> Effects:
        effects, complete = self.intake.frame(frame)
        if complete:
            self._moved()
        return effects

    def _state_frame(self, frame: messages.StateFrame) -> Effects:
        effects, landed = self.intake.state_frame(frame)
        if landed:
            self._moved()
        return effects

    def _moved(self) -> None:
        """There is a next model. Whatever is open is of its round or an earlier one, and is over."""
        self.state = step(SITE, self.state, SiteEvent.NEXT_MODEL)
        self.aggregation.attempt, self.aggregation.ctx, self._answers, self.deadline = None, b"", {}, None
        if self.aggregation.update is not None and self.aggregation.update.round <= self.core.head.round:
            self.aggregation.update = None

    def _piece(self, piece: messages.ChunkPiece) -> Effects:
        """A wrong chunk is evidence against the coordinator. The site halts; a warning could not pass the
        coordinator."""
        try:
            return self.intake.piece(piece)
        except WrongSum as error:
            self.state = step(SITE, self.state, SiteEvent.BAD_SUM)
            return (*self._evidence(), *self._stop(error))

    def _evidence(self) -> Effects:
        if self.intake.audit is None:
            return ()
        name = f"wrong-sum-of-round-{self.core.head.round}"
        return (KeepEvidence(name, WrongSumEvidence.of(self.intake.audit).file()),)

    def _rollback(self, message: messages.Rollback) -> Effects:
        """An advert of this site's own, shown at start-up or by a peer that refused a later one."""
        try:
            checks.check_own_advert_known(self.core.journal, self.core.policy, self.core.site, message.advert)
        except checks.StateRestored as error:
            self.state = step(SITE, self.state, SiteEvent.ROLLBACK)
            return self._stop(error)
        return ()

    def _stop(self, error: ToolkitError) -> Effects:
        self.aggregation.attempt, self._answers = None, {}
        reason = str(error).encode()[:256]
        return self.core.record(records.Stopped(reason=reason)), Leave(error)

    def _take_up(self) -> None:
        """Continue the newest attempt in which this site has agreed and whose result is not known (section 9)."""
        for memory in self.core.journal.attempts.values():
            if memory.agreed is not None and memory.outcome is not AttemptOutcome.ABORTED:
                self.aggregation.ctx = memory.context.ctx()
                released = memory.outcome is AttemptOutcome.RELEASED
                self.state = SiteState.RELEASED if released else SiteState.AGREED

    def _check_manifest(self, effects: list[Effect]) -> None:
        """A manifest is never older than one seen before, and never another of the same version."""
        policy, seen = self.core.policy, self.core.journal.manifest
        checks.check_manifest_version(policy, seen)
        if seen is None or seen.version != policy.manifest_version:
            now = records.ManifestSeen(version=policy.manifest_version, manifest_hash=policy.manifest_hash)
            effects.append(self.core.record(now))
