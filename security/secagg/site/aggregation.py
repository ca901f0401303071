"""A site's part in one attempt, from Plan to Unmask (docs/spec/secure-aggregation.md, sections 3, 8 and 9).

Each method takes one message of the coordinator, makes every check, and only then records and answers: the record
comes before the message in the list of effects. What follows from a failed check is decided in `machine`.
"""

from __future__ import annotations

from lazaret.errors import LocalProtocolError, PolicyViolation, RemoteProtocolError, VerificationFailed
from security.crypto import aead
from security.secagg import certificate_checks, messages, records, statements
from security.secagg import context as hashes
from security.secagg.effects import Effects, SendUpload, in_order
from security.secagg.records import AttemptOutcome
from security.secagg.site import checks, differences, entries
from security.secagg.site import earlier as attempts_before
from security.secagg.site.attempt import OpenAttempt, PendingUpdate, SiteCore, unmask_message


class SiteAggregation:
    """The open attempt: in memory before AGREE, and from then on in the journal alone."""

    def __init__(self, core: SiteCore) -> None:
        self.core = core
        self.ctx = b""
        self.attempt: OpenAttempt | None = None
        self.update: PendingUpdate | None = None

    def _open(self) -> OpenAttempt:
        if self.attempt is None:
            raise LocalProtocolError("no attempt is open")
        return self.attempt

    def _check_kx(self, kx: bytes) -> None:
        if kx != self._open().kx:
            raise VerificationFailed("message is under other keys than this site saw")

    def plan(self, plan: messages.Plan) -> Effects:
        core, context = self.core, plan.context
        settled = [core.record(end) for end in self._check_plan(plan)]
        head = core.head
        certified = () if head.certified else (core.record(records.ResultCertified(result=head.result)),)
        attempt = OpenAttempt.begin(
            core.signer,
            context,
            sequence=core.journal.sequence + 1,
            heads=core.heads(),
            randomness=core.randomness,
        )
        joined = core.record(records.Joined(context=context, advert=attempt.advert))
        self.attempt, self.ctx = attempt, attempt.ctx
        invited = entries.invited(core.policy.method, context, core.policy.groups)
        return *settled, *certified, *in_order(attempt.advert, context, record=joined, entry=invited)

    def _check_plan(self, plan: messages.Plan) -> tuple[records.AttemptSettled, ...]:
        """Returns what became of earlier attempts on this model, as the plan shows."""
        policy, journal, head, context = self.core.policy, self.core.journal, self.core.head, plan.context
        # Who sends it and for whom, before what it asks for: a refusal must not depend on a forged context.
        checks.check_plan_signature(policy, plan)
        checks.check_plan_federation(policy, context)
        checks.check_plan_layout(policy, context)
        checks.check_plan_members(policy, context)
        checks.check_plan_self(self.core.site, context)
        checks.check_plan_thresholds(policy, context)
        checks.check_plan_single_history(policy, context)
        checks.check_groups(policy, context.sites)
        checks.check_plan_fresh(policy, self.core.clock.now_ms())
        checks.check_plan_window(head, journal, context)
        checks.check_plan_attempts(policy, context)
        checks.check_plan_high_water(head, journal, context)
        checks.check_plan_history(head, context)
        bound = journal.update
        if self.update is None or bound is None:
            raise PolicyViolation("this site has no update to send", where="plan")
        checks.check_plan_update(bound, context)
        checks.check_plan_state(head, bound, context)
        checks.check_plan_config(policy, bound, context)
        checks.check_plan_certificate(policy, head, plan)
        checks.check_plan_updates_on_state(policy, journal, bound)
        earlier = journal.of_round(context.round)
        checks.check_plan_manifest_of_round(earlier, context)
        checks.check_plan_reuse(policy, earlier, plan)
        attempts_before.check_plan_repeats_ours(earlier, context)
        settled = attempts_before.check_earlier_attempts(policy, journal, plan)
        attempts_before.check_sums_listed(policy, journal, context, settled)
        return settled

    def adverts(self, message: messages.Adverts) -> Effects:
        attempt, policy = self._open(), self.core.policy
        checks.check_adverts_context(message, attempt.ctx)
        checks.check_adverts_cohort(attempt.context, message.adverts)
        checks.check_advert_signatures(policy, message.adverts)
        checks.check_own_advert(attempt.advert, message.adverts)
        checks.check_advert_keys(message.adverts)
        checks.check_advert_sequences(self.core.journal.peers, message.adverts, self.core.site)
        attempt.take_adverts(message.adverts)
        shares = attempt.deal(self.core.randomness)
        seen = records.KeysSeen(ctx=attempt.ctx, kx=attempt.kx, adverts=message.adverts)
        return in_order(shares, attempt.context, record=self.core.record(seen))

    def deliver(self, message: messages.Deliver) -> Effects:
        attempt = self._open()
        self._check_kx(message.kx)
        attempt.take_deals(self.core.policy, message)
        if attempt.disputed:
            return tuple(effect for dealer in attempt.disputed for effect in self._accuse(dealer))
        return self._upload()

    def _upload(self) -> Effects:
        attempt, bound = self._open(), self.core.journal.update
        if self.update is None or bound is None:
            raise LocalProtocolError("the update is no longer in memory", where="upload")
        policy = self.core.policy
        group = policy.parts(attempt.context.sites)[policy.sum_of(self.core.site)]
        header = attempt.mask(self.update.words, policy.layout.ring, group=group, workers=self.core.workers)
        upload = records.UploadBound(
            ctx=attempt.ctx,
            deals=attempt.deals,
            root=header.root,
            state_hash=bound.state_hash,
            update=bound.digest,
        )
        return *in_order(header, attempt.context, record=self.core.record(upload)), self._frames(0)

    def _frames(self, first: int) -> SendUpload:
        attempt = self._open()
        if attempt.vector is None or attempt.header is None or not 0 <= first <= self.core.policy.layout.frames:
            raise RemoteProtocolError("there is no such frame", where="upload")
        context, root = attempt.context, attempt.header.root
        return SendUpload(attempt.kx, attempt.vector, root, context.round, context.sites, first)

    def resume(self, message: messages.UploadResume) -> Effects:
        self._check_kx(message.kx)
        return (self._frames(message.next_frame),)

    def survivors(self, message: messages.Survivors) -> Effects:
        attempt, core = self._open(), self.core
        self._check_kx(message.kx)
        memory = core.journal.attempts[attempt.ctx]
        sites = [line.site for line in message.uploads]
        checks.check_survivors_members(attempt.context, sites)
        checks.check_survivors_count(attempt.context, sites)
        checks.check_groups(core.policy, sites)
        checks.check_upload_roots(
            core.policy,
            message.uploads,
            kx=attempt.kx,
            deals=attempt.deals,
            length=core.policy.layout.byte_length,
        )
        checks.check_own_upload(core.site, memory.upload.root if memory.upload else b"", message.uploads)
        checks.check_not_agreed(memory)
        differences.check_same_state_sums(core.policy, core.journal, attempt.context, sites)
        roots = [(line.site, line.root) for line in message.uploads]
        survivors = hashes.survivors_digest(attempt.kx, attempt.deals, roots)
        sealed = aead.seal(
            core.storage_key,
            attempt.reply(sites),
            kx=attempt.kx,
            source=core.site,
            destination=core.site,
            randomness=core.randomness,
        )
        expires = core.clock.now_ms() + core.policy.secret_ttl_ms
        agreed = core.record(
            records.Agreed(
                ctx=attempt.ctx, survivors=survivors, sites=tuple(sites), sealed=sealed, expires_ms=expires
            )
        )
        # Keys, seed, the other shares and the masked vector are dropped here: what is left answers one set only.
        self.attempt = None
        entry = entries.agreed(attempt.context, survivors, sites)
        return in_order(self.agree(attempt.kx, survivors), attempt.context, record=agreed, entry=entry)

    def quorum(self, message: messages.Quorum) -> Effects:
        memory = self.core.journal.by_kx(message.kx)
        if memory is None or memory.agreed is None:
            raise RemoteProtocolError("quorum is for an attempt in which this site did not agree", where="quorum")
        checks.check_may_release(memory)
        checks.check_quorum_is_ours(memory.agreed.survivors, message)
        checks.check_quorum(self.core.policy, memory.context, message)
        reply = aead.open_box(
            self.core.storage_key,
            memory.agreed.sealed,
            kx=message.kx,
            source=self.core.site,
            destination=self.core.site,
        )
        unmask = unmask_message(self.core.signer, message.kx, message.survivors, reply)
        known = memory.outcome is AttemptOutcome.RELEASED
        released = None if known else self.core.record(ended(memory.context, AttemptOutcome.RELEASED))
        entry = entries.unmasked(memory.context, memory.agreed.sites)
        return in_order(unmask, memory.context, record=released, entry=entry)

    def agree(self, kx: bytes, survivors: bytes) -> messages.Agree:
        signature = self.core.signer.sign(statements.agree(kx, survivors))
        return messages.Agree(site=self.core.site, kx=kx, survivors=survivors, signature=signature)

    def agree_again(self, message: messages.Survivors) -> Effects:
        """The same set again gets the same answer. Another set is refused, and the first answer stays valid."""
        memory = self.core.journal.by_kx(message.kx)
        if memory is None or memory.agreed is None or memory.upload is None:
            raise RemoteProtocolError("survivors of another attempt than the open one", where="survivors")
        roots = [(line.site, line.root) for line in message.uploads]
        survivors = hashes.survivors_digest(message.kx, memory.upload.deals, roots)
        checks.check_same_set(memory.agreed.survivors, survivors)
        entry = entries.agreed(memory.context, survivors, memory.agreed.sites)
        return in_order(self.agree(message.kx, survivors), memory.context, entry=entry)

    # Disputes about the boxes of C2 (section 11).

    @property
    def disputing(self) -> bool:
        return self.attempt is not None and bool(self.attempt.disputed)

    def _accuse(self, dealer: str) -> Effects:
        attempt = self._open()
        signature = self.core.signer.sign(statements.accuse(attempt.kx, dealer))
        accusation = messages.Accusation(site=self.core.site, kx=attempt.kx, dealer=dealer, signature=signature)
        return in_order(accusation, attempt.context)

    def disclosure(self, message: messages.Disclosure) -> Effects:
        """An accused dealer has answered; after the last answer the upload follows."""
        self._check_kx(message.kx)
        self._open().take_disclosure(message)
        return () if self.disputing else self._upload()

    def accusation(self, message: messages.Accusation) -> Effects:
        """A holder says that its box is wrong: publish its shares, which no longer count as secret from here on."""
        attempt, core, holder = self._open(), self.core, message.site
        certificate_checks.check_accusation(core.policy, attempt.context, attempt.kx, message)
        if message.dealer != core.site:
            raise RemoteProtocolError("another dealer is accused", where="accusation")
        known = core.journal.attempts[attempt.ctx].disclosed
        certificate_checks.check_disclosures(attempt.context, {*known, holder})
        disclosed = None
        if holder not in known:
            disclosed = core.record(records.ShareDisclosed(ctx=attempt.ctx, holder=holder))
        return in_order(attempt.disclose(holder), attempt.context, record=disclosed)


def ended(context: hashes.RoundContext, outcome: AttemptOutcome, code: int = 0) -> records.AttemptEnded:
    return records.AttemptEnded(
        ctx=context.ctx(), round=context.round, attempt=context.attempt, outcome=outcome, code=code
    )
