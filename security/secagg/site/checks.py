"""What a site checks in C0 to C4, in abort requests and at its start; both sides use some of it for signed pieces.

One function for each rule, called by name from the machines, so that a test can switch off exactly one and show the
attack that it stops (docs/attacks.md). Sections are those of docs/spec/secure-aggregation.md. What follows from a
failed check is decided by the machine (section 3): a Plan is refused, a later message before AGREE ends the attempt,
and after AGREE nothing changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lazaret.errors import PolicyViolation, RemoteProtocolError, VerificationFailed
from security.crypto import merkle
from security.identity.membership import AggregationPolicy
from security.secagg import certificate_checks, statements, thresholds
from security.secagg.certificates import Advert, RepeatCertificate
from security.secagg.context import PROTOCOL_VERSION, RoundContext
from security.secagg.messages import Adverts, DeliveredShare, Plan, Quorum, SignedRoot
from security.secagg.records import AttemptOutcome, ManifestSeen, UpdateBound
from security.secagg.site.journal import AttemptMemory, Journal, NewestResult

# C1: the adverts of the cohort. From them follows KX, and from KX every mask key (section 4).


def check_adverts_cohort(context: RoundContext, adverts: Sequence[Advert]) -> None:
    """Exactly the planned cohort, all in this context: a missing or added member would change whom the masks hide."""
    if tuple(advert.site for advert in adverts) != context.sites:
        raise VerificationFailed("adverts are not those of the planned cohort", where="adverts")
    if any(advert.ctx != context.ctx() for advert in adverts):
        raise VerificationFailed("an advert is of another context", where="adverts")
    if [len(advert.pair_hashes) for advert in adverts] != list(range(context.n))[::-1]:
        raise VerificationFailed("an advert has no hash for each later member", where="adverts")


def check_advert_signatures(policy: AggregationPolicy, adverts: Sequence[Advert]) -> None:
    """Keys belong to the sites that the manifest lists; with keys of its own the coordinator could open every box."""
    for advert in adverts:
        statements.verify(policy.entry(advert.site), statements.advert(policy, advert), advert.signature)


def check_advert_keys(adverts: Sequence[Advert]) -> None:
    """All 4n keys are distinct. A key shown under two names would give a site a pairwise mask with itself, and a mask
    key that is also a box key would be opened when its site drops out (section 4)."""
    keys = [
        key for advert in adverts for key in (advert.mask_key, advert.share_key, advert.mask_kem, advert.share_kem)
    ]
    if len(set(keys)) != len(keys):
        raise VerificationFailed("two adverts share a key", where="adverts")


def check_own_advert(own: Advert, adverts: Sequence[Advert]) -> None:
    """Others must derive this site's masks from the keys that it made in this attempt."""
    if own not in adverts:
        raise VerificationFailed("this site's own advert was changed", where="adverts")


class StateRestored(VerificationFailed):
    """A site has signed an advert that is not in its records: its state was restored from an old copy (section 9)."""

    def __init__(self, known: Advert) -> None:
        super().__init__(
            "the sequence number of an advert was used before: the site's state was restored from an old copy",
            where=f"site {known.site}",
            hint="the consortium must enrol this site again",
        )
        self.known = known


def check_advert_sequences(peers: Mapping[str, Advert], adverts: Sequence[Advert], own: str) -> None:
    """A site restored from an old copy could agree to a second set. Its peers notice: they keep its last advert.

    :param peers: the newest advert of each other site, from the records.
    """
    for advert in adverts:
        known = peers.get(advert.site)
        if advert.site != own and known is not None and advert.sequence <= known.sequence:
            raise StateRestored(known)


# C2: the boxes for this site, and every dealer's signed root. From the roots follows D.


def check_deal_roots(policy: AggregationPolicy, context: RoundContext, kx: bytes, roots: Sequence[SignedRoot]) -> None:
    """Every member has dealt, so that each secret that may have to be opened is shared (in the paper: U2 = U1)."""
    if tuple(line.site for line in roots) != context.sites:
        raise VerificationFailed("dealer roots are not those of all members of the cohort", where="deliver")
    for line in roots:
        statements.verify(policy.entry(line.site), statements.deal(kx, line.root), line.signature)


def check_own_deal(own: bytes, site: str, roots: Sequence[SignedRoot]) -> None:
    """D must cover the list that this site dealt: other sites judge its shares by it."""
    if next((line.root for line in roots if line.site == site), None) != own:
        raise VerificationFailed("this site's own dealer root was changed", where="deliver")


def check_delivered_path(
    context: RoundContext, kx: bytes, holder: Advert, delivered: DeliveredShare, roots: Mapping[str, bytes]
) -> None:
    """A line is in its dealer's signed list. If not, the coordinator changed it, and no dealer may be accused."""
    merkle.verify_inclusion(
        leaf=merkle.leaf_hash(certificate_checks.dealt_leaf(kx, delivered.dealer, holder, delivered.share)),
        index=context.position(holder.site) - 1,
        size=context.n,
        path=delivered.path,
        root=roots[delivered.dealer],
    )


# C3: the survivors. AGREE on their set U is final for this attempt (section 8).


def check_survivors_members(context: RoundContext, sites: Sequence[str]) -> None:
    """A subset of the cohort in its order, and all of it in an exact repeat: a smaller set would give a second sum of
    the same vectors, and the difference of the two sums is the vector of one site (section 8)."""
    if [site for site in context.sites if site in set(sites)] != list(sites):
        raise VerificationFailed("survivors are not distinct members in order", where="survivors")
    if context.repeats and len(sites) != context.n:
        raise VerificationFailed("an exact repeat needs every member", where="survivors")


def check_survivors_count(context: RoundContext, sites: Sequence[str]) -> None:
    """At least t vectors, so that with c colluders any sum still contains two honest ones (section 2)."""
    if len(sites) < context.t:
        raise VerificationFailed(f"{len(sites)} survivors are fewer than the quorum of {context.t}", where="survivors")


def check_upload_roots(
    policy: AggregationPolicy, uploads: Sequence[SignedRoot], *, kx: bytes, deals: bytes, length: int
) -> None:
    """Every survivor uploaded under the same keys and the same deals. Sites that were shown two lists of one dealer
    have different D, and find it here."""
    for line in uploads:
        statements.verify(policy.entry(line.site), statements.upload(kx, deals, length, line.root), line.signature)


def check_own_upload(site: str, own_root: bytes, uploads: Sequence[SignedRoot]) -> None:
    """A site may be left out, but not counted with a vector that it never sent."""
    if any(line.site == site and line.root != own_root for line in uploads):
        raise VerificationFailed("this site's own upload was changed", where="survivors")


def check_not_agreed(memory: AttemptMemory) -> None:
    """At most one AGREE in an attempt. Two quorums share an honest site, so only one set is certified (section 2)."""
    if memory.agreed is not None or memory.outcome is not None:
        raise RemoteProtocolError("this site has already decided in this attempt", where="survivors")


def check_same_set(agreed: bytes, survivors: bytes) -> None:
    """Asked again after AGREE: the same set gets the same answer, another set gets none (section 8)."""
    if survivors != agreed:
        raise RemoteProtocolError("this site has agreed to another set", where="survivors")


# C4: the certificate of a set. Only now do shares leave the site.


def check_quorum(policy: AggregationPolicy, context: RoundContext, quorum: Quorum) -> None:
    """At least t members of the cohort agreed; what the coordinator says about it does not count."""
    certificate_checks.check_agreements(
        policy,
        context.sites,
        context.t,
        kx=quorum.kx,
        survivors=quorum.survivors,
        agreements=quorum.agreements,
    )


def check_quorum_is_ours(agreed: bytes, quorum: Quorum) -> None:
    """Shares are released only for the set that this site agreed to: the sealed answer fits no other (section 9)."""
    if quorum.survivors != agreed:
        raise RemoteProtocolError("quorum is for another set than this site agreed to", where="quorum")


def check_may_release(memory: AttemptMemory) -> None:
    """A signed ABORT promises that this site never releases in the attempt (section 8)."""
    if memory.outcome is AttemptOutcome.ABORTED:
        raise RemoteProtocolError("this site has aborted the attempt", where="quorum")


# Abort requests.


def check_abort_request(policy: AggregationPolicy, context: RoundContext, signature: bytes) -> None:
    """Only the coordinator may ask for an ABORT; otherwise any member could end every attempt."""
    statements.verify(policy.coordinator_entry(), statements.abort_request(context.ctx()), signature)


def check_may_abort(journal: Journal, ctx: bytes) -> None:
    """RELEASE and ABORT never both: `a` aborts must prove that fewer than `t` releases exist (section 2)."""
    if ctx in journal.released:
        raise RemoteProtocolError("this site has released in that attempt", where="abort request")


# Start.


def check_own_advert_known(journal: Journal, policy: AggregationPolicy, site: str, advert: Advert) -> None:
    """A peer shows this site an advert of its own. If it is not in the records, they are an old copy (section 9).

    :raises StateRestored: if this site has signed an advert that its records do not contain.
    """
    if advert.site != site:
        raise VerificationFailed("advert is another site's", where="rollback")
    statements.verify(policy.entry(site), statements.advert(policy, advert), advert.signature)
    remembered = {memory.advert.sequence: memory.advert for memory in journal.attempts.values()}
    if advert.sequence > journal.sequence or remembered.get(advert.sequence, advert) != advert:
        raise StateRestored(advert)


def check_adverts_context(adverts: Adverts, ctx: bytes) -> None:
    """The list answers the Plan that this site joined."""
    if adverts.ctx != ctx:
        raise VerificationFailed("adverts are of another attempt", where="adverts")


# C0: the update and the Plan, before this site makes a key (sections 2, 8 and 9).

ROUND_WINDOW = 1000  # rounds that a Plan may be ahead of those seen (section 9)


def check_manifest_version(policy: AggregationPolicy, seen: ManifestSeen | None) -> None:
    """An older manifest may have a smaller c; two different ones of one version would be two federations."""
    if seen is None or policy.manifest_version > seen.version:
        return
    if policy.manifest_version < seen.version or policy.manifest_hash != seen.manifest_hash:
        raise PolicyViolation(
            f"manifest version {policy.manifest_version} does not follow version {seen.version}",
            where="manifest",
            hint="fetch the newest manifest from the consortium",
        )


def check_one_update(known: UpdateBound | None, bound: UpdateBound) -> None:
    """One encoded update for each round: two of them in two attempts would reveal their difference (section 8)."""
    if known is not None and (bound.round < known.round or (bound.round == known.round and bound != known)):
        raise PolicyViolation("this round already has another update", where="update", hint="wait for the next round")


def check_fresh_update(journal: Journal, bound: UpdateBound) -> None:
    """What was sent in one round is never sent in a later one: the reuse rule covers the attempts of one round only.

    A round that was lost or void may have a sum somewhere. With the same vector in the sum of another cohort, the
    difference of both sums would reveal the sites that changed (section 8).
    """
    again = journal.update is not None and journal.update.round == bound.round
    if not again and bound.state_hash == journal.uploaded_on and bound.digest in journal.uploaded:
        raise PolicyViolation(
            "this update was already sent in an earlier round",
            where="update",
            hint="train again: the seed must depend on the round",
        )


def check_plan_signature(policy: AggregationPolicy, plan: Plan) -> None:
    """Signed, so that a Plan which breaks a rule is evidence against the coordinator (section 5)."""
    statements.verify(policy.coordinator_entry(), statements.plan(plan.context), plan.signature)


def check_plan_federation(policy: AggregationPolicy, context: RoundContext) -> None:
    """Same protocol, federation, manifest, run and coordinator: no replay across studies, no second run."""
    expected = {
        "protocol version": PROTOCOL_VERSION,
        "key agreement": policy.suite,
        "federation": policy.federation,
        "manifest": policy.manifest_hash,
        "run": policy.run,
        "coordinator certificate": policy.coordinator.cert,
    }
    got = (context.version, context.suite, context.federation, context.manifest_hash, context.run)
    for (name, want), have in zip(expected.items(), (*got, context.coordinator_cert), strict=True):
        if want != have:
            raise PolicyViolation(f"plan is of another {name}", where="plan")


def check_plan_layout(policy: AggregationPolicy, context: RoundContext) -> None:
    """Clips, ring and order of the vector come from the manifest, or a sum could overflow (section 7)."""
    if context.layout_hash != policy.layout.layout_hash:
        raise PolicyViolation("plan has another layout than the manifest", where="plan")


def check_plan_members(policy: AggregationPolicy, context: RoundContext) -> None:
    """Only roster sites, each under its pinned certificate, none revoked."""
    for member in context.members:
        if policy.entry(member.site).cert != member.cert:
            raise PolicyViolation("plan names another certificate than the manifest", where=f"site {member.site}")


def check_plan_self(site: str, context: RoundContext) -> None:
    """A site sends nothing, and promises nothing, for an attempt that it is not a member of."""
    if site not in context.sites:
        raise PolicyViolation("this site is not in the cohort", where="plan")


def check_plan_thresholds(policy: AggregationPolicy, context: RoundContext) -> None:
    """c and m come from the manifest; n, t and a follow (section 2). c does not shrink with the cohort, so that a
    cohort of the c colluders and one other site is too small."""
    if context.thresholds != policy.thresholds(len(context.members)):
        raise PolicyViolation("plan has other thresholds than the manifest gives this cohort", where="plan")


def check_plan_single_history(policy: AggregationPolicy, context: RoundContext) -> None:
    """Two cohorts that could each have a quorum share an honest site, or two histories could exist (section 2)."""
    policy.check_single_history(context.n)


def check_groups(policy: AggregationPolicy, sites: Sequence[str]) -> None:
    """The sum of each group is published: in a small one, c colluders would know all vectors but one (section 10)."""
    policy.check_groups(sites, "groups")


def check_plan_window(head: NewestResult, journal: Journal, context: RoundContext) -> None:
    """Numbers only increase (section 9), so a very high one would be the last one that this site could ever join."""
    latest = max(head.round, journal.high_water[0])
    if context.round > latest + ROUND_WINDOW:
        raise PolicyViolation("round number is out of the window", where="plan")


def check_plan_attempts(policy: AggregationPolicy, context: RoundContext) -> None:
    """A round has at most c + 3 attempts. Every further one would show the coordinator one more set of dropouts, and
    one more chance that a certificate is lost on the way (section 8)."""
    most = thresholds.most_attempts(policy.c)
    if not 1 <= context.attempt <= most:
        raise PolicyViolation(f"attempt {context.attempt} is above the {most} that a round may have", where="plan")


def check_plan_fresh(policy: AggregationPolicy, now_ms: int) -> None:
    """Under a manifest that has expired a site sends nothing: a newer one may have revoked somebody, and the
    coordinator, which passes manifests on, may have withheld it (section 2)."""
    policy.check_fresh(now_ms)


def check_plan_high_water(head: NewestResult, journal: Journal, context: RoundContext) -> None:
    """The same round and attempt never twice: masks are used once, and an old Plan cannot be replayed (section 9)."""
    if context.place <= journal.high_water or context.round <= head.round:
        raise PolicyViolation("round and attempt are not above the last ones joined", where="plan")


def check_plan_history(head: NewestResult, context: RoundContext) -> None:
    """All members follow the same result. Otherwise CTX differs between them and masks do not cancel (section 4)."""
    if context.prev_result != head.link:
        raise PolicyViolation("plan follows another result than this site has", where="plan")


def check_plan_state(head: NewestResult, update: UpdateBound, context: RoundContext) -> None:
    """The state that this site computed itself (section 10), and that its update was trained on."""
    if context.state_hash != head.state_hash or context.state_hash != update.state_hash:
        raise PolicyViolation("plan is for another model than this site trained on", where="plan")


def check_plan_config(policy: AggregationPolicy, update: UpdateBound, context: RoundContext) -> None:
    """A configuration that the manifest lists, and that the update was trained under: the coordinator cannot ask for
    training that reveals more."""
    if context.config_hash not in policy.config_hashes or context.config_hash != update.config_hash:
        raise PolicyViolation("plan has a training configuration that is not the agreed one", where="plan")


def check_plan_update(update: UpdateBound, context: RoundContext) -> None:
    """An update belongs to the round that it was trained for (section 8)."""
    if context.round != update.round:
        raise PolicyViolation("plan is for another round than the update", where="plan")


def check_plan_certificate(policy: AggregationPolicy, head: NewestResult, plan: Plan) -> None:
    """Nothing leaves a site that was trained on a sum which was not checked. The coordinator could hide a warning, so
    a certificate is asked for: a missing one cannot be hidden (section 10)."""
    if head.round == 0 or head.certified:
        return
    if policy.vote:
        raise PolicyViolation("the vote on the newest model is not known here", where="plan")
    certificate_checks.check_certificate(
        policy, plan.check, result=head.result, state_hash=head.state_hash, quorum=head.quorum
    )


def check_plan_updates_on_state(policy: AggregationPolicy, journal: Journal, update: UpdateBound) -> None:
    """Many sums of new updates on one unchanged model would average out the randomness of training (section 8)."""
    if policy.dp_active or journal.uploaded_on != update.state_hash or update.digest in journal.uploaded:
        return
    if journal.updates_left(vote=policy.vote) == 0:
        raise PolicyViolation(
            f"{len(journal.uploaded)} different updates were already sent on this model, which did not change",
            where="plan",
            hint="find out with the consortium why rounds fail; then permit more with `site-agent permit`",
        )


def check_plan_manifest_of_round(earlier: Sequence[AttemptMemory], context: RoundContext) -> None:
    """One manifest version for all attempts of a round: quorums of different rosters need not share an honest site."""
    if any(memory.context.manifest_hash != context.manifest_hash for memory in earlier):
        raise PolicyViolation("the manifest changed inside a round", where="plan", hint="continue with the next round")


def check_plan_reuse(policy: AggregationPolicy, earlier: Sequence[AttemptMemory], plan: Plan) -> None:
    """The reuse rule (section 8): every earlier attempt that may contain this update has an abort certificate, or is
    repeated exactly. Without it, two sums of different cohorts would differ by the vector of one site."""
    exact = {repeat.ctx: repeat.survivors for repeat in plan.context.repeats}
    repeated: list[set[str]] = []
    cheats: set[str] = set()
    for memory in earlier:
        if memory.upload is None:
            continue  # no byte of the update was sent in that attempt
        ctx = memory.context.ctx()
        if ctx in exact:
            certificate = _certified_repeat(policy, memory, plan, exact[ctx])
            repeated.append({line.site for line in certificate.roots})
            cheats |= certificate.cheats
        else:
            check_dead(policy, memory, plan)
    check_plan_repeats_set(plan.context.sites, repeated, cheats)


def check_plan_repeats_set(cohort: Sequence[str], repeated: Sequence[set[str]], cheats: set[str]) -> None:
    """The new cohort is the certified set without dealers that have a fraud proof, so that the repeat can only give
    the one sum that the old attempt could have (section 8)."""
    if any(certified - cheats != set(cohort) for certified in repeated):
        raise PolicyViolation("the cohort is not the set that it claims to repeat", where="plan")


def check_dead(policy: AggregationPolicy, memory: AttemptMemory, plan: Plan) -> None:
    """The plan carries an abort certificate for an earlier attempt: it can have no sum (section 8)."""
    ctx = memory.context.ctx()
    certificate = next((found for found in plan.aborts if found.ctx == ctx), None)
    if certificate is None:
        raise PolicyViolation(
            "an earlier attempt that contains this update has neither an abort certificate nor an exact repeat",
            where="plan",
        )
    counted = certificate_checks.still_secret(certificate, memory.disclosed)
    certificate_checks.check_abort_certificate(policy, memory.context.sites, memory.context.thresholds, counted)


def _certified_repeat(
    policy: AggregationPolicy, memory: AttemptMemory, plan: Plan, survivors: bytes
) -> RepeatCertificate:
    old = memory.context
    certificate = next((found for found in plan.repeats if found.ctx == old.ctx()), None)
    if certificate is None:
        raise PolicyViolation("an exact repeat comes without its certificate", where="plan")
    if certificate.kx != memory.kx:
        # Under other keys the same names could stand for other vectors.
        raise VerificationFailed("repeat certificate is under other keys", where="plan")
    if certificate_checks.check_repeat_certificate(policy, old, certificate) != survivors:
        raise VerificationFailed("repeat certificate is of another set", where="plan")
    return certificate
