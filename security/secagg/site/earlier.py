"""What became of earlier attempts on the same model, before this site joins another one (section 10 of
docs/spec/secure-aggregation.md, "Differences of sums").

A coordinator can call a round lost whose sum it has, and no site need have seen its set. Two cohorts share an honest
site, and every member deals shares before anything masked is sent. So each site asks for the end of the attempts in
which it has dealt itself: that no sum can exist, or the one set that can have a sum. The sets are part of the context,
so that what one honest site knows all members compare with.
"""

from __future__ import annotations

from collections.abc import Sequence

from lazaret.errors import PolicyViolation, VerificationFailed
from security.identity.membership import AggregationPolicy
from security.secagg import certificate_checks
from security.secagg.context import RoundContext
from security.secagg.messages import Plan
from security.secagg.records import AttemptSettled
from security.secagg.site import checks
from security.secagg.site.journal import AttemptMemory, Journal


def check_earlier_attempts(policy: AggregationPolicy, journal: Journal, plan: Plan) -> tuple[AttemptSettled, ...]:
    """For each attempt on this model in which this site has dealt, a certificate says what became of it.

    Returns what is to be recorded: each certificate is asked for once.
    """
    if policy.dp_active:
        return ()  # the noise that was booked covers every release, whatever it is combined with
    # A coordinator that the consortium has put in the place of a lost one has no records of its attempts.
    cert, unsettled = policy.coordinator.cert, journal.unsettled(plan.context.state_hash)
    return tuple(_settled(policy, memory, plan) for memory in unsettled if memory.context.coordinator_cert == cert)


def _settled(policy: AggregationPolicy, memory: AttemptMemory, plan: Plan) -> AttemptSettled:
    ctx = memory.context.ctx()
    certificate = next((found for found in plan.repeats if found.ctx == ctx), None)
    if certificate is None and all(found.ctx != ctx for found in plan.aborts):
        raise PolicyViolation(
            "it is not shown whether an earlier attempt on this model has a sum",
            where="plan",
            hint="its members abort it when they are back, or the operators decide (`site-agent permit`)",
        )
    if certificate is None:
        checks.check_dead(policy, memory, plan)
        return AttemptSettled(ctx=ctx, sites=())
    if certificate.kx != memory.kx:
        # Under other keys it may be the certificate of another attempt, over another set.
        raise VerificationFailed("the certificate of an earlier set is under other keys", where="plan")
    certificate_checks.check_repeat_certificate(policy, memory.context, certificate)
    return AttemptSettled(ctx=ctx, sites=tuple(line.site for line in certificate.roots))


def check_sums_listed(
    policy: AggregationPolicy, journal: Journal, context: RoundContext, settled: tuple[AttemptSettled, ...]
) -> None:
    """Every sum on this model that this site was shown by certificate is in the context: others may not know of it."""
    if policy.dp_active:
        return
    listed = {(found.round, found.sites) for found in context.sums}
    known = {(journal.attempts[end.ctx].context.round, end.sites) for end in settled if end.sites}
    known |= {
        (seen.round, seen.sites)
        for seen in journal.sums
        if seen.state_hash == context.state_hash
        and seen.shown_by == policy.coordinator.cert
        and not journal.set_aside(context.state_hash, seen.round)
    }
    if not known <= listed:
        raise PolicyViolation("plan leaves out a sum on the same model", where="plan")


def check_plan_repeats_ours(earlier: Sequence[AttemptMemory], context: RoundContext) -> None:
    """A site repeats only attempts of this round whose set it was in: it has seen their certificates, and the set is
    compared with no earlier sum (section 10). An attempt that is invented would make any set a repeat."""
    ours = {memory.context.ctx() for memory in earlier if memory.upload is not None}
    if any(repeat.ctx not in ours for repeat in context.repeats):
        raise PolicyViolation("plan repeats an attempt in which this site sent nothing", where="plan")
