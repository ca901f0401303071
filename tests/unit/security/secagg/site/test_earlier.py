"""What a site asks for before it joins another attempt on the same model; the attacks are those of A13."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lazaret.errors import PolicyViolation, VerificationFailed
from security.secagg import messages, records, statements
from security.secagg.context import EarlierSum
from security.secagg.records import AttemptOutcome, AttemptSettled, UpdatesPermitted
from security.secagg.site import differences, earlier
from security.secagg.site.journal import Journal
from security.secagg.transitions import SiteState
from tests.support.secagg_world import RecordedFederation, federation, random_updates, take_policy

LIAR = "site-03"
ALL = tuple(f"site-{number:02d}" for number in range(4))


def updates(run: RecordedFederation, number: int, *, void: bool = False) -> Any:
    made = random_updates(run.policy.layout, run.sites, number)
    if void:
        made[LIAR][run.policy.layout.slot("weight")] = 2**20
    return made


def after_a_void_sum(**options: Any) -> RecordedFederation:
    """The model stands, with a sum of all on it."""
    run = federation(4, c=1, **options)
    run.run_round(updates(run, 1, void=True))
    return run


def next_plan(run: RecordedFederation, number: int = 2) -> messages.Plan:
    run.begin_round(updates(run, number))
    return run.planned.next_attempt(list(run.sites)).plan


def journal(run: RecordedFederation, site: str = "site-00") -> Journal:
    return run.sites[site].machine.core.journal


def test_the_set_of_an_attempt_is_shown_once_and_its_sum_stays_listed() -> None:
    run = after_a_void_sum()
    plan = next_plan(run)
    (end,) = earlier.check_earlier_attempts(run.policy, journal(run), plan)
    assert end == AttemptSettled(ctx=plan.repeats[0].ctx, sites=ALL)
    assert plan.context.sums == (EarlierSum(round=1, sites=ALL),) and not plan.context.repeats
    run = after_a_void_sum()
    run.run_round(updates(run, 2, void=True))
    plan = next_plan(run, 3)
    assert [found.ctx for found in plan.repeats] != [end.ctx] and len(plan.repeats) == 1
    assert [found.round for found in plan.context.sums] == [1, 2]
    assert run.run_round(updates(run, 3)).total is not None


def test_a_coordinator_in_the_place_of_a_lost_one_is_asked_for_nothing() -> None:
    """The consortium has named it in a manifest. What this site knows of, it still compares with by itself."""
    run = after_a_void_sum()
    plan = replace(next_plan(run), repeats=())
    other = replace(run.policy, coordinator=replace(run.policy.coordinator, cert=b"another".ljust(32)))
    assert earlier.check_earlier_attempts(other, journal(run), plan) == ()
    earlier.check_sums_listed(other, journal(run), _with(plan, ()), ())
    with pytest.raises(PolicyViolation, match="would show the update of one site"):
        differences.check_same_state_sums(other, journal(run), _with(plan, ()), ALL[1:])


@pytest.mark.parametrize("restart", [False, True])
def test_it_is_asked_for_until_it_was_shown_also_after_a_restart(restart: bool) -> None:
    run = after_a_void_sum()
    if restart:
        run.restart_site("site-00")
    state = journal(run).head(run.policy).state_hash
    (asked,) = journal(run).unsettled(state)
    assert asked.agreed is None and asked.upload is None, "what could open an upload is erased"
    assert not journal(run).unsettled(bytes(32))
    plan = replace(next_plan(run), repeats=())
    with pytest.raises(PolicyViolation, match="not shown whether an earlier attempt"):
        earlier.check_earlier_attempts(run.policy, journal(run), plan)


def test_under_the_noise_of_differential_privacy_nothing_is_asked_for() -> None:
    run = after_a_void_sum(dp_active=True)
    plan = next_plan(run)
    assert plan.repeats == () == plan.context.sums
    assert earlier.check_earlier_attempts(run.policy, journal(run), plan) == ()
    earlier.check_sums_listed(run.policy, journal(run), plan.context, ())


def test_a_certificate_counts_for_its_attempt_alone() -> None:
    """That of another attempt, under its keys, may be over another set."""
    run = after_a_void_sum()
    run.run_round(updates(run, 2, void=True))
    first = run.planned.before[0].certified(run.policy)
    assert first is not None
    plan = next_plan(run, 3)
    (right,) = plan.repeats
    assert right.ctx != first.ctx and right.kx != first.kx
    swapped = replace(plan, repeats=(replace(first, ctx=right.ctx),))
    with pytest.raises(VerificationFailed, match="under other keys"):
        earlier.check_earlier_attempts(run.policy, journal(run), swapped)


def test_fewer_agreements_than_a_quorum_are_no_certificate() -> None:
    run = after_a_void_sum()
    plan = next_plan(run)
    few = replace(plan.repeats[0], agreements=plan.repeats[0].agreements[:2])
    with pytest.raises(VerificationFailed, match="fewer than the quorum"):
        earlier.check_earlier_attempts(run.policy, journal(run), replace(plan, repeats=(few,)))


def test_a_set_that_was_shown_has_to_be_listed() -> None:
    run = after_a_void_sum()
    plan = next_plan(run)
    settled = earlier.check_earlier_attempts(run.policy, journal(run), plan)
    earlier.check_sums_listed(run.policy, journal(run), plan.context, settled)
    for sums in ((), (EarlierSum(round=2, sites=ALL),), (EarlierSum(round=1, sites=ALL[1:]),)):
        with pytest.raises(PolicyViolation, match="leaves out a sum"):
            earlier.check_sums_listed(run.policy, Journal(attempts=journal(run).attempts), _with(plan, sums), settled)
        # In later plans too, also after a restart; not by another coordinator, which has not shown it.
        shown = Journal.replay(run.sites["site-00"].wal)
        for end in settled:
            shown.apply(end)
        for known in (shown, Journal.replay(shown.compacted(done_round=1))):
            with pytest.raises(PolicyViolation, match="leaves out a sum"):
                earlier.check_sums_listed(run.policy, known, _with(plan, sums), ())
            other = replace(run.policy, coordinator=replace(run.policy.coordinator, cert=b"another".ljust(32)))
            earlier.check_sums_listed(other, known, _with(plan, sums), ())


def _with(plan: messages.Plan, sums: tuple[EarlierSum, ...]) -> Any:
    return replace(plan.context, sums=sums)


def test_what_the_operator_sets_aside_is_not_asked_for() -> None:
    run = after_a_void_sum()
    known = journal(run)
    state = known.head(run.policy).state_hash
    run._do_site("site-00", (run.sites["site-00"].machine.core.record(UpdatesPermitted(state_hash=state)),))
    again = Journal.replay(known.compacted(done_round=1, standing=[state]))
    for found in (known, again):
        assert not found.unsettled(state) and found.set_aside(state, 1) and not found.set_aside(state, 2)
        assert not found.set_aside(bytes(32), 1)
        earlier.check_sums_listed(run.policy, found, _with(next_plan(run), ()), ())
        run.round -= 1


def test_a_released_set_whose_attempt_was_aborted_is_no_sum() -> None:
    """Released once, then aborted by the others: what this site has noted is taken back."""
    run = federation(4, c=1)
    run.hook = lambda sender, receiver, message: [] if isinstance(message, messages.Result) else [message]
    run.run_round(updates(run, 1))
    known = journal(run)
    ((ctx, memory),) = known.attempts.items()
    state = memory.context.state_hash
    assert [(seen.sites, seen.ctx) for seen in known.sums] == [(ALL, ctx)]
    shown = Journal.replay(run.sites["site-00"].wal)
    shown.apply(AttemptSettled(ctx=ctx, sites=ALL))
    assert [(seen.sites, seen.ctx) for seen in shown.sums] == [(ALL, bytes(32))], "it exists"
    known.apply(AttemptSettled(ctx=ctx, sites=()))
    assert known.sums == [] and known.unsettled(state) == []
    assert Journal.replay(known.compacted(done_round=0)).unsettled(state) == []


def test_a_sum_that_was_released_and_then_accepted_counts_once() -> None:
    run = after_a_void_sum()
    (seen,) = journal(run).sums
    assert seen == records.SumSeen(round=1, state_hash=run.policy.initial_state_hash, sites=ALL)


def test_a_site_that_has_only_dealt_asks_too() -> None:
    """It was shown no boxes. The others may have a sum without it."""
    run = federation(4, c=1)
    run.hook = lambda _, receiver, said: [] if isinstance(said, messages.Deliver) and receiver == "site-00" else [said]
    run.run_round(updates(run, 1, void=True))
    ((_, memory),) = journal(run).attempts.items()
    assert memory.upload is None and memory.kx is not None
    assert journal(run).unsettled(memory.context.state_hash) == [memory]


def test_an_attempt_under_an_older_manifest_can_still_be_aborted() -> None:
    """No other one: under another manifest a site promises nothing for an attempt that it does not know."""
    run = federation(4, c=1)
    run.hook = lambda _sender, _receiver, said: [] if isinstance(said, messages.Deliver) else [said]
    run.begin_round(updates(run, 1))
    attempt = run.planned.next_attempt(list(run.sites))
    run._do_coordinator(attempt.start())
    run.pump()
    request, machine = attempt.abort_request(), run.sites["site-00"].machine
    (memory,) = machine.core.journal.attempts.values()
    machine.aggregation.attempt, machine.aggregation.ctx, machine.state = None, b"", SiteState.IDLE
    take_policy(machine, replace(run.policy, manifest_version=2, manifest_hash=bytes(32)))
    unknown = replace(request.context, attempt=2)
    signed = replace(request, context=unknown, signature=run.core.signer.sign(statements.abort_request(unknown.ctx())))
    with pytest.raises(PolicyViolation, match="another manifest"):
        machine.receive(signed)
    machine.receive(request)
    assert machine.core.journal.attempts[memory.context.ctx()].outcome is AttemptOutcome.ABORTED


def check(run: RecordedFederation, known: Journal, told: tuple[tuple[str, ...], ...], sites: tuple[str, ...]) -> None:
    """Whether a site with this journal agrees to a set, when these sets are listed."""
    sums = tuple(EarlierSum(round=number, sites=found) for number, found in enumerate(told, start=2))
    context = replace(next_plan(run).context, sums=sums)
    run.round -= 1
    differences.check_same_state_sums(run.policy, known, context, sites)


def test_a_set_that_is_only_listed_counts_until_the_operator_sets_it_aside() -> None:
    run = after_a_void_sum()
    with pytest.raises(PolicyViolation, match="would show the update of one site"):
        check(run, Journal(), (ALL[1:],), ALL)
    check(run, Journal(aside=(run.policy.initial_state_hash, 2)), (ALL[1:],), ALL)
    check(run, Journal(), (ALL,), ALL)


def test_a_set_that_is_only_listed_is_no_excuse_for_another() -> None:
    """Nobody would be shown better than by two sets that were invented, if these counted as known."""
    run = federation(5, c=1)
    run.run_round(updates(run, 1, void=True))
    a, b, c, d, _ = run.sites
    for invented in ((), ((a,), (a, b, d))):
        with pytest.raises(PolicyViolation, match="would show the update of one site"):
            check(run, journal(run), invented, (a, b, c))


def test_sums_on_other_models_are_not_compared() -> None:
    run = after_a_void_sum()
    elsewhere = records.SumSeen(round=1, state_hash=bytes(32), sites=ALL[1:])
    check(run, Journal(sums=[elsewhere]), (ALL,), ALL)
