"""The coordinator's machine for one attempt: event in, effects out (docs/spec/secure-aggregation.md, sections 3 and 9).

Nothing here is secret: everything is public or masked until a quorum releases. What it shows (C0 to C5) is recorded
before it is sent, so that a restart never shows a second version. `security.secagg.transitions` explains the states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from lazaret.errors import RemoteProtocolError, VerificationFailed
from security.secagg import context as hashes
from security.secagg import messages, records, statements
from security.secagg.certificates import Ack, Advert, CheckCertificate, Signed
from security.secagg.coordinator.disputes import Disputes, WrongAnswer
from security.secagg.coordinator.publication import Publication, publish
from security.secagg.coordinator.unmasking import Opening
from security.secagg.coordinator.uploads import CoordinatorCore, Dealing, Equivocation, Uploads, owed
from security.secagg.effects import MISSING, SILENT, Blamed, Certified, Effects, Ended, Persist, Send
from security.secagg.fields import Wire
from security.secagg.layout import Vector
from security.secagg.published import opened_masks
from security.secagg.transitions import COORDINATOR, CoordinatorEvent, CoordinatorState, step

_S, _E = CoordinatorState, CoordinatorEvent
# Answers that count in one state only; later they are merely late, and dropped.
_WHEN = {
    _E.ADVERT: _S.ADVERTISING,
    _E.REFUSAL: _S.ADVERTISING,
    _E.SHARES: _S.DEALING,
    _E.HEADER: _S.UPLOADING,
    _E.FRAME: _S.UPLOADING,
}


class CoordinatorAttempt:
    """One attempt, from Plan to the certificate of its result or to its end."""

    def __init__(self, core: CoordinatorCore, plan: messages.Plan, model: Vector) -> None:
        self.core = core
        self.plan = plan
        self.context = plan.context
        self.model = model
        self.dealing = Dealing(core.policy, plan.context)
        self.uploads = Uploads(core.policy, core.spool)
        self.survivors: messages.Survivors | None = None
        self.agreements: dict[str, bytes] = {}
        self.quorum: messages.Quorum | None = None
        self.opening: Opening | None = None
        self.publication: Publication | None = None
        self.aborts: dict[str, messages.Abort] = {}
        self.disputes = Disputes(core, self.dealing)
        self.missing: tuple[str, ...] = ()
        self._why = ""
        self.state = _S.ADVERTISING
        self.deadline: int | None = None
        self._begun = 0

    @property
    def ctx(self) -> bytes:
        return self.dealing.ctx

    # What the shell calls.

    def start(self) -> Effects:
        self._wait()
        return self._persist(records.Planned(plan=self.plan)), *self._to_all(self.plan)

    def receive(self, site: str, message: Wire) -> Effects:
        """Take a message from `site`, as authenticated by the transport."""
        outsider = isinstance(message, messages.Hello | messages.ChunkRequest | Ack) and self.core.policy.lists(site)
        if site not in self.context.sites and not outsider:
            raise RemoteProtocolError("site is not in the cohort", where=f"site {site}")
        if getattr(message, "site", site) != site:
            raise RemoteProtocolError("message names another sender", where=f"site {site}")
        event, handler = self._route(site, message)
        step(COORDINATOR, self.state, event)
        if event in _WHEN and self.state is not _WHEN[event]:
            return ()
        try:
            return handler(message)
        except Equivocation as found:
            return (Blamed(site, f"two {found.what}"),)

    def tick(self) -> Effects:
        """Look at the clock: a step whose time is over continues without the sites that are missing.

        An accused dealer has its own time for an answer, also beyond that of the uploads.
        """
        disputed = self.disputes.deadline if self.state is _S.UPLOADING else None
        due = self.deadline if disputed is None else disputed
        return self.close_step() if due is not None and self.core.clock.mono_ms() >= due else ()

    def close_step(self) -> Effects:
        """End the current step now, with whoever is there."""
        if self.state is _S.ADVERTISING:
            return self._die("sites missing at S1", self.dealing.adverts)
        if self.state is _S.DEALING:
            return self._die("sites missing at S2", self.dealing.shares)
        if self.state is _S.UPLOADING:
            return self._close_uploads()
        if self.state is _S.AGREEING:
            return self._ask_aborts(_E.DROP)
        return self.give_up() if self.state in (_S.UNMASKING, _S.ABORTING) else ()

    def give_up(self) -> Effects:
        """Ask for ABORTs; when already asking, call the attempt lost."""
        if self.state in (_S.ADVERTISING, _S.DEALING):
            return self._die("given up", self.context.sites)
        if self.state is _S.ABORTING and len(self.aborts) >= self.context.a:
            return self._over(_E.ENOUGH_ABORTS, "aborted")
        if self.state is _S.ABORTING:
            return self._over(_E.GIVE_UP, "too few aborts and too few releases")
        return self._ask_aborts(_E.GIVE_UP)

    # For the planning of the next attempt (section 8).

    def frees(self, site: str) -> bool:
        """Whether the aborts so far let this site use its update again."""
        return self.disputes.frees(site, self.aborts, self.context.a)

    # Small steps.

    def _route(self, site: str, message: Wire) -> tuple[CoordinatorEvent, Callable[[Any], Effects]]:
        routes: dict[type[Wire], tuple[CoordinatorEvent, Callable[[Any], Effects]]] = {
            Advert: (_E.ADVERT, self._advert),
            messages.Refusal: (_E.REFUSAL, self._refusal),
            messages.Shares: (_E.SHARES, self._shares),
            messages.Accusation: (_E.ACCUSATION, self._accusation),
            messages.Disclosure: (_E.DISCLOSURE, self._disclosure),
            messages.UploadHeader: (_E.HEADER, self._header),
            messages.UploadFrame: (_E.FRAME, partial(self._frame, site)),
            messages.Agree: (_E.AGREE, self._agree),
            messages.Unmask: (_E.UNMASK, self._take_shares),
            messages.Abort: (_E.ABORT, self._abort),
            messages.Hello: (_E.HELLO, self._hello),
            messages.Rollback: (_E.ROLLBACK, self._rollback),
            messages.ChunkRequest: (_E.CHUNK_REQUEST, self._chunk_request),
            Ack: (_E.ACK, self._ack),
        }
        if type(message) not in routes:
            raise RemoteProtocolError(f"{type(message).__name__} is not for a coordinator")
        return routes[type(message)]

    def _persist(self, record: Wire) -> Persist:
        return Persist(record, self.context.round)

    def _go(self, event: CoordinatorEvent) -> None:
        self.state = step(COORDINATOR, self.state, event)
        self._wait()

    def _wait(self) -> None:
        self._begun = self.core.clock.mono_ms()
        self._extend()

    def _extend(self) -> None:
        """Give the step its whole time from now on."""
        span = self.core.timeouts.of(self.state, self.core.policy.layout.byte_length)
        self.deadline = None if span is None else self.core.clock.mono_ms() + span

    def _to_all(self, message: Wire, sites: Iterable[str] | None = None) -> Effects:
        return tuple(Send(message, to=site) for site in (self.context.sites if sites is None else sites))

    def _verify(self, site: str, statement: statements.Statement, signature: bytes) -> None:
        statements.verify(self.core.policy.entry(site), statement, signature)

    # S1 and S2.

    def _advert(self, advert: Advert) -> Effects:
        shown = self.dealing.take_advert(advert)
        if shown is None:
            return ()
        self._go(_E.ALL_ADVERTS)
        return self._persist(records.AdvertsShown(adverts=shown)), *self._to_all(shown)

    def _refusal(self, message: messages.Refusal) -> Effects:
        if message.ctx != self.ctx:
            return ()
        present = [site for site in self.context.sites if site != message.site]
        self._go(_E.REFUSAL)
        return self._ended("a site refused the plan", present)

    def _shares(self, shares: messages.Shares) -> Effects:
        ordered = self.dealing.take_shares(shares)
        if ordered is None:
            return ()
        self._go(_E.ALL_SHARES)
        delivered = tuple(Send(self.dealing.deliver_to(site), to=site) for site in self.context.sites)
        return *(self._persist(records.DealShown(shares=shares)) for shares in ordered), *delivered

    def _accusation(self, message: messages.Accusation) -> Effects:
        """A holder disputes a box: its dealer is asked, and answers with the shares (section 11).

        A holder has its boxes from the beginning of the step on. Who accuses later would keep all others waiting.
        """
        late = self.core.clock.mono_ms() >= self._begun + self.core.timeouts.step_ms
        done = message.site in self.uploads.complete or message.site in self.aborts
        return self.disputes.accusation(message, over=self.state is not _S.UPLOADING or late or done)

    def _disclosure(self, message: messages.Disclosure) -> Effects:
        try:
            effects = self.disputes.disclosure(message, over=self.state is not _S.UPLOADING)
        except WrongAnswer:
            self.missing = (message.site,)
            return Blamed(message.site, "wrong share"), *self._ask_aborts(_E.DROP)
        if effects:
            self._extend()  # a dealer that answers late must not leave its accuser too little time for the upload
        return effects

    def _rollback(self, message: messages.Rollback) -> Effects:
        """A peer has a later advert of a site than this attempt's: the site must see it and halt (section 9).

        The attempt ends here, before the peer's ABORT, so that the strike falls on the site that was set back.
        """
        shown = message.advert
        self._verify(shown.site, statements.advert(self.context, shown), shown.signature)
        mine = self.dealing.adverts.get(shown.site)
        if mine is None or mine == shown or mine.sequence > shown.sequence:
            raise VerificationFailed("advert is no evidence against its signer", where=f"site {shown.site}")
        named = Blamed(shown.site, "restored from an old copy"), Send(message, to=shown.site)
        if self.state is not _S.DEALING:
            return named
        return *named, *self._die("a site was restored from an old copy", set(self.context.sites) - {shown.site})

    # S3.

    def _header(self, header: messages.UploadHeader) -> Effects:
        site, length = header.site, self.core.policy.layout.byte_length
        self._verify(site, statements.upload(header.kx, header.deals, header.length, header.root), header.signature)
        if (header.kx, header.deals, header.length) != (self.dealing.kx, self.dealing.deals, length):
            raise VerificationFailed("upload is of another attempt or layout", where=f"site {site}")
        known = self.uploads.header(site)
        if known is not None and known != header:
            raise Equivocation(site, "uploads")
        if known is not None:
            return ()
        there = self.uploads.begin(header)
        if all(self.uploads.header(member) for member in self.context.sites):
            self.put_shares_away()
        return (Send(messages.UploadResume(kx=header.kx, next_frame=there), to=site),) if there else ()

    def _frame(self, site: str, frame: messages.UploadFrame) -> Effects:
        if site in self.uploads.complete:
            return ()  # sent again after a reconnect
        try:
            header = self.uploads.take(site, frame)
        except VerificationFailed:
            return (Blamed(site, "upload without its root"),)
        if header is None:
            return ()
        self.disputes.withdraw(site)
        return self._persist(records.UploadCounted(header=header)), *self._uploads_done()

    def _uploads_done(self) -> Effects:
        """Continue as soon as every member has uploaded or aborted."""
        waiting = [site for site in self.context.sites if site not in self.uploads.complete and site not in self.aborts]
        return () if waiting else self._close_uploads()

    def _close_uploads(self) -> Effects:
        if self.disputes.open:
            # Without the accuser a liar among the dealers would decide who is summed: it is named, and the next
            # attempt is held without it (section 11). One that has aborted cannot answer: it was away, as others are.
            self.missing = self.disputes.silent
            named = tuple(Blamed(site, SILENT) for site in self.missing if site not in self.aborts)
            return (*named, *self._ask_aborts(_E.DROP))
        self.missing = tuple(site for site in self.context.sites if site not in self.uploads.complete)
        for site in self.missing:
            self.uploads.drop(site)
        alive = len(self.uploads.complete)
        # An exact repeat may give no other set than the one it repeats.
        small = not self.core.policy.hides(tuple(self.uploads.complete))
        if alive < self.context.t or small or (self.context.repeats and alive < self.context.n):
            return self._ask_aborts(_E.DROP)
        shown = self.survivors = self.uploads.survivors(self.dealing.kx, self.context.sites)
        if len(shown.uploads) == self.context.n:
            self.put_shares_away()
        self._go(_E.ENOUGH_UPLOADS)
        return self._persist(records.SurvivorsShown(survivors=shown)), *self._to_all(shown)

    def put_shares_away(self) -> None:
        """All members have their boxes, and have announced an upload. From here on boxes are only for proofs against a
        dealer and for who has dropped out. They are on disk."""
        if (load := self.core.load_deals) is not None:
            self.dealing.put_away(partial(load, self.context.round, self.dealing.kx))

    # S4 and S5.

    def survivors_hash(self) -> bytes:
        uploads = self.survivors.uploads if self.survivors else ()
        return hashes.survivors_digest(self.dealing.kx, self.dealing.deals, [(up.site, up.root) for up in uploads])

    def _agree(self, message: messages.Agree) -> Effects:
        self._verify(message.site, statements.agree(message.kx, message.survivors), message.signature)
        if self.survivors is None or message.kx != self.dealing.kx or message.survivors != self.survivors_hash():
            raise VerificationFailed("site agrees to another set", where=f"site {message.site}")
        self.agreements[message.site] = message.signature
        if self.quorum is not None:
            return (Send(self.quorum, to=message.site),) if self.state is _S.UNMASKING else ()
        if self.state is not _S.AGREEING or len(self.agreements) < self.context.t:
            return ()
        signed = [Signed(site=s, signature=self.agreements[s]) for s in self.context.sites if s in self.agreements]
        quorum = messages.Quorum(kx=self.dealing.kx, survivors=message.survivors, agreements=tuple(signed))
        self.certify(quorum)
        self._go(_E.ENOUGH_AGREE)
        return self._persist(records.QuorumShown(quorum=quorum)), *self._to_all(quorum, list(self.agreements))

    def certify(self, quorum: messages.Quorum) -> None:
        self.quorum = quorum
        alive = tuple(up.site for up in self.survivors.uploads) if self.survivors else ()
        self.opening = Opening(self.core.policy, self.dealing, alive, quorum.survivors)

    def _take_shares(self, message: messages.Unmask) -> Effects:
        if self.opening is None:
            raise RemoteProtocolError("shares without a certificate", where=f"site {message.site}")
        if self.state not in (_S.UNMASKING, _S.ABORTING):
            return ()
        try:
            enough = self.opening.take(message)
        except VerificationFailed:
            return (Blamed(message.site, "wrong share"),)
        return self._unmask_sum() if enough else ()

    def _unmask_sum(self) -> Effects:
        if self.opening is None or self.survivors is None or self.quorum is None:
            raise RemoteProtocolError("nothing to open")
        secrets = self.opening.open()
        if secrets is None:
            blamed = tuple(Blamed(site, "fraud") for site in self.opening.cheats)
            return (*blamed, *self._over(_E.FRAUD, "a dealer's shares are wrong"))
        policy, survivors = self.core.policy, self.opening.survivors
        for part, group in zip(self.uploads.sums, policy.parts(self.context.sites), strict=True):
            masks = opened_masks(self.context, self.dealing.kx, survivors, secrets, group=group)
            part.unmask(masks, workers=self.core.workers)
        self.publication, outcome = publish(
            self.core, self.dealing, self.survivors, self.quorum, secrets, self.uploads, self.model
        )
        self.model, self.core.movements = outcome.state, outcome.movements
        self._go(_E.SUM_DONE)
        return self.publication.shown_to(self.context.sites, outcome)

    # After the result.

    def _ack(self, ack: Ack) -> Effects:
        if self.publication is None:
            raise RemoteProtocolError("acknowledgement without a result", where=f"site {ack.site}")
        known = self.publication.acks.get(ack.site)
        if self.core.policy.vote and (self.state is _S.CERTIFIED or (known is not None and known.vote != ack.vote)):
            return ()  # the vote set is closed, or this site has voted; more chunks under the same vote are taken
        covered = self.publication.take_ack(ack)
        seen = self._persist(records.AckSeen(ack=ack))
        if covered is None or self.state is _S.CERTIFIED:
            return (seen,)
        return seen, *self._covered(covered)

    def _covered(self, covered: CheckCertificate) -> Effects:
        published = self.publication
        if published is None:
            return ()
        self._go(_E.COVERED)
        return Certified(published.result_hash, covered), self.uploads.discard()

    def close_vote(self) -> Effects:
        """Sites that have not voted are waited for no longer."""
        if not self.core.policy.vote or self.publication is None or self.state is not _S.PUBLISHED:
            return ()
        covered = self.publication.close_vote()
        return () if covered is None else self._covered(covered)

    def _chunk_request(self, request: messages.ChunkRequest) -> Effects:
        if self.publication is None:
            raise RemoteProtocolError("there is no result to check", where="audit")
        return (self.publication.serve(request.site, request),)

    # Ends.

    def _abort(self, message: messages.Abort) -> Effects:
        if message.ctx != self.ctx:
            raise VerificationFailed("abort is of another attempt", where=f"site {message.site}")
        self._verify(message.site, statements.abort(message.ctx, message.code), message.signature)
        self.aborts[message.site] = message
        seen = self._persist(records.AbortSeen(abort=message))
        if self.state is _S.ADVERTISING:
            self._go(_E.ABORT)
            return seen, *self._ended("a site aborted", [s for s in self.context.sites if s != message.site])
        asked: Effects = ()
        if self.state is _S.DEALING:
            self.missing, self._why = (message.site,), "a site aborted"
            asked = self._ask_aborts(_E.ABORT)
        if self.state in (_S.DEAD, _S.LOST, _S.PUBLISHED, _S.CERTIFIED):
            return (seen,)
        if all(self.frees(site) for site in self.context.sites):
            return seen, *asked, *self._over(_E.ENOUGH_ABORTS, "aborted")
        if self.state is _S.UPLOADING:
            self.disputes.withdraw(message.site)
            self.uploads.drop(message.site)
            return seen, *self._uploads_done()
        left = self.context.n - len(self.aborts)
        hopeless = left < self.context.t and self.state in (_S.AGREEING, _S.UNMASKING)
        return (seen, *self._ask_aborts(_E.GIVE_UP)) if hopeless else (seen, *asked)

    def _ask_aborts(self, event: CoordinatorEvent) -> Effects:
        """No sum will come of this attempt; with an abort certificate the next one may use the same updates."""
        self._go(event)
        rest = [site for site in self.context.sites if site not in self.aborts]
        return self._to_all(self.abort_request(), rest)

    def abort_request(self) -> messages.AbortRequest:
        signature = self.core.signer.sign(statements.abort_request(self.ctx))
        return messages.AbortRequest(context=self.context, signature=signature)

    def _die(self, reason: str, present: Iterable[str]) -> Effects:
        """Before C2 nothing masked exists. Without C1 the attempt ends here; sites that may have dealt shares ask for a
        certificate before they do it again."""
        if self.state is _S.DEALING:
            there = set(present)
            self.missing, self._why = tuple(site for site in self.context.sites if site not in there), reason
            return self._ask_aborts(_E.DROP)
        self._go(_E.DROP)
        return self._ended(reason, present)

    def _over(self, event: CoordinatorEvent, reason: str) -> Effects:
        self._go(event)
        return (*self._ended(self._why or reason, self.context.sites), self.uploads.discard())

    def _ended(self, reason: str, present: Iterable[str]) -> Effects:
        there = set(present)
        self.missing = self.missing or tuple(site for site in self.context.sites if site not in there)
        closed = records.AttemptClosed(ctx=self.ctx, state=str(self.state), reason=reason.encode()[:64])
        strikes = tuple(Blamed(site, MISSING) for site in self.missing)
        # The others must close this attempt before they join the next one; those that agreed can wait for a repeat.
        settled = set(self.aborts) | (set(self.agreements) if self.state is _S.LOST else set())
        asked = self._to_all(self.abort_request(), [site for site in self.context.sites if site not in settled])
        return self._persist(closed), *strikes, Ended(self.ctx, reason), *asked

    # A site (re)connects.

    def ask_again(self) -> Effects:
        """Ask every member for its missing answer, as if all had just connected."""
        self._wait()
        if self.state is _S.UPLOADING and (done := self._uploads_done()):
            return done
        return tuple(effect for site in self.context.sites for effect in owed(self, site, self.ctx))

    def _hello(self, hello: messages.Hello) -> Effects:
        return owed(self, hello.site, hello.open_ctx)
