"""A13: one site is left out of every second sum while a colluder keeps the model where it is, by voiding each round.

Each pair of sums gives the victim's update under the noise of everybody's training; many pairs average that away.
On one model no site agrees to a set that, with the sets before, isolates anybody; also with those of rounds that the
coordinator calls lost: a site that has dealt shares in an attempt asks what became of it, and the plan lists the sets
for all members. Without differential privacy a site sends three different updates on one model and then waits for its
operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from lazaret.errors import PolicyViolation, ToolkitError, VerificationFailed
from security.crypto.prg import Words
from security.secagg import certificate_checks, fixed_point, messages, statements
from security.secagg.context import RepeatOf, SumVerdict
from security.secagg.coordinator.attempt import CoordinatorAttempt
from security.secagg.site import checks, differences, earlier
from tests.support.evil import VICTIM, WON, EvilCoordinator, Rule, assert_refused, evil
from tests.support.secagg_world import small_layout
from tests.support.spoils import correlation

ROUNDS, SPREAD, NOISE = 30, 0.14, 0.03


def toggled() -> tuple[EvilCoordinator, float]:
    """Up to thirty rounds; returns how well the difference of the two means fits what the victim learned."""
    layout = small_layout(4, words=2000, weight_cap=1)
    run = evil(4, layout=layout)
    generator = np.random.default_rng(3)
    learned = {name: generator.normal(0, SPREAD, layout.state_words).clip(-0.5, 0.5) for name in run.sites}
    sums: dict[bool, list[Words]] = {True: [], False: []}
    for number in range(ROUNDS):
        present = number % 2 == 0
        updates = {}
        for name in run.sites if present else list(run.sites)[1:]:
            trained = learned[name] + generator.normal(0, NOISE, layout.state_words)
            updates[name] = fixed_point.encode(layout, trained.astype(np.float32), weight=1).words
        updates["site-03"][layout.slot("weight")] = 2**31
        outcome = run.run_round(updates)
        if outcome.total is None:
            break
        assert outcome.verdict is SumVerdict.VOID, "the model stands still"
        sums[present].append((outcome.total - updates["site-03"]).view(layout.signed_dtype).astype(float))
    if not sums[False]:
        return run, float("nan")
    guess = np.mean(sums[True], axis=0) - np.mean(sums[False], axis=0)
    truth = fixed_point.encode(layout, learned[VICTIM].astype(np.float32), weight=1).words
    return run, correlation(layout, guess, truth)


def test_the_second_set_on_one_model_must_not_isolate_anybody() -> None:
    run, fit = toggled()
    assert run.round == 2 and np.isnan(fit), "there is one sum, and no difference"
    for name in run.honest[1:]:
        assert_refused(run, name, PolicyViolation, "check_same_state_sums")
    run.check_promises()


def test_the_fourth_update_on_one_model_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second rule stops it too: three sums are what it leaks without the first."""
    monkeypatch.setattr(differences, "check_same_state_sums", lambda *_: None)
    run, fit = toggled()
    assert fit < 0.97, "three sums are what this leaks without noise; see the threat model"
    assert run.round == 4
    for name in run.honest[1:]:
        assert_refused(run, name, PolicyViolation, "check_plan_updates_on_state")
    run.check_promises()


def test_thirty_rounds_on_one_model_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differences, "check_same_state_sums", lambda *_: None)
    monkeypatch.setattr(checks, "check_plan_updates_on_state", lambda *_: None)
    run, fit = toggled()
    assert run.round == ROUNDS and fit > WON


# A round is called lost whose sum the coordinator has. Its set is shown to few, and the next one to others.

Set = tuple[list[str], str, list[str]]  # the cohort, who is left out of the set, who is shown it
Told = Callable[[EvilCoordinator, messages.Plan], messages.Plan]


def all_told(_: EvilCoordinator, plan: messages.Plan) -> messages.Plan:
    """The certificates of all earlier sets, which the context lists."""
    return plan


def nothing_told(run: EvilCoordinator, plan: messages.Plan) -> messages.Plan:
    return replace(signed(run, plan, sums=()), aborts=(), repeats=())


def told_to_who_asks(run: EvilCoordinator, plan: messages.Plan) -> messages.Plan:
    """Certificates for those who have dealt in an attempt; other members learn of no set."""
    return signed(run, plan, sums=())


def called_aborted(run: EvilCoordinator, plan: messages.Plan) -> messages.Plan:
    """Aborts of those who have not seen the set, and of the colluder."""
    first = run.planned.before[0] if run.planned.before else None
    if first is None:
        return plan
    attempt = run.lost[0]
    certificate = run.aborts_of(attempt, sorted(set(attempt.context.sites) - {VICTIM, "site-01"}))
    return replace(signed(run, plan, sums=()), aborts=(certificate,), repeats=())


def signed(run: EvilCoordinator, plan: messages.Plan, **changes: Any) -> messages.Plan:
    context = replace(plan.context, **changes)
    return replace(plan, context=context, signature=run.core.signer.sign(statements.plan(context)))


def called_a_repeat(run: EvilCoordinator, plan: messages.Plan) -> messages.Plan:
    """A repeat may give the sum of the old attempt again, so its set is compared with no other. Here there is none."""
    invented = RepeatOf(ctx=bytes(31) + b"r", survivors=bytes(32))
    return signed(run, plan, repeats=(invented,)) if run.lost else plan


class LostRounds(EvilCoordinator):
    lost: list[CoordinatorAttempt]


def hidden_sum(run: EvilCoordinator, trained: dict[str, Words], made: Set, told: Told) -> Words | None:
    """A sum on the standing model that is published to nobody. Its set, the cohort without `left_out`, is shown to some
    honest sites alone, which with the colluder are a quorum."""
    cohort, left_out, shown = made
    run.begin_round(trained)
    run.machine(run.colluders[0]).core.journal.sums.clear()  # a colluder agrees to anything
    if left_out:
        run.lose(messages.UploadHeader, messages.UploadFrame, by=left_out)
    for name in cohort:
        if name not in (*shown, *run.colluders):
            run.lose(messages.Survivors, to=name)
    attempt = run.secretly(plan=told(run, run.plan(cohort)))
    run.lost.append(attempt)
    if attempt.publication is None:
        run.planned.note(done := attempt.close_step())  # the upload that is missing is waited for no longer
        run._do_coordinator(done)
        run.rules += [Rule(kind, lambda *_: None, None, None) for kind in (messages.Result, messages.SumFrame)]
        run.pump()
    run.rules.clear()
    # Who has not seen the set must close the attempt before the next one; few aborts certify nothing.
    run.aborts_of(attempt, [name for name in cohort if name not in (*shown, *run.colluders)])
    return None if attempt.publication is None else attempt.publication.total


def lost_rounds(sites: int, weights: Sequence[float], sets: Sequence[Set], told: Told) -> tuple[LostRounds, float]:
    """One hidden sum for each set. Returns how well the weighted sum of all, without what the colluder has added, fits
    the victim's update; nan if there is not one for each."""
    layout = small_layout(sites, words=2000, weight_cap=1)
    run = cast(LostRounds, evil(sites, c=1, layout=layout))
    run.lost = []
    generator = np.random.default_rng(4)
    learned = {name: generator.normal(0, SPREAD, layout.state_words).clip(-0.5, 0.5) for name in run.sites}

    def trained() -> dict[str, Words]:
        noisy = {name: learned[name] + generator.normal(0, NOISE, layout.state_words) for name in run.sites}
        return {name: fixed_point.encode(layout, x.astype(np.float32), weight=1).words for name, x in noisy.items()}

    guess = np.zeros(layout.words)
    for weight, made in zip(weights, sets, strict=True):
        updates = trained()
        total = hidden_sum(run, updates, made, told)
        if total is None:
            return run, float("nan")
        guess += weight * (total - updates[run.colluders[0]]).view(layout.signed_dtype).astype(float)
    truth = fixed_point.encode(layout, learned[VICTIM].astype(np.float32), weight=1).words
    return run, correlation(layout, guess, truth)


def two_lost_rounds(*second: str, told: Told = all_told) -> tuple[LostRounds, float]:
    """Five sites, one of which colludes. The set of the first round is shown to site-00 and site-01, that of the
    second, which is the same without the victim, to `second`."""
    first = (["site-00", "site-01", "site-02", "site-04"], "", [VICTIM, "site-01"])
    again = (["site-01", "site-02", "site-03", "site-04"], "site-03", list(second))
    return lost_rounds(5, (1, -1), (first, again), told)


def test_who_has_released_a_set_agrees_to_no_other_that_shows_a_site_with_it() -> None:
    run, fit = two_lost_rounds("site-01", "site-02")
    assert np.isnan(fit)
    assert_refused(run, "site-01", PolicyViolation, "check_same_state_sums")


def test_who_has_not_seen_the_first_set_compares_with_it_too() -> None:
    """Neither was shown it, and site-03 was not even there: the plan lists it."""
    run, fit = two_lost_rounds("site-02", "site-03")
    assert np.isnan(fit)
    for name in ("site-02", "site-03"):
        assert_refused(run, name, PolicyViolation, "check_same_state_sums")
    run.check_promises()


@pytest.mark.parametrize(
    ("told", "kind", "check"),
    [
        (nothing_told, PolicyViolation, "check_earlier_attempts"),
        (called_aborted, VerificationFailed, "check_abort_certificate"),
        (told_to_who_asks, PolicyViolation, "check_sums_listed"),
    ],
)
def test_a_lost_round_is_not_kept_from_the_next_cohort(told: Told, kind: type[ToolkitError], check: str) -> None:
    """Two cohorts share an honest site, here site-01 and site-02. It asks what became of the first attempt."""
    run, fit = two_lost_rounds("site-02", "site-03", told=told)
    assert np.isnan(fit)
    for name in ("site-01", "site-02"):
        assert_refused(run, name, kind, check)
    run.check_promises()


def test_sets_that_are_shown_to_different_sites_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator has both sums and calls both rounds lost: no site knows of both."""
    monkeypatch.setattr(earlier, "check_earlier_attempts", lambda *_: ())
    run, fit = two_lost_rounds("site-02", "site-03", told=nothing_told)
    assert fit > 0.85
    run.check_promises()


def called_again(told: Told) -> tuple[LostRounds, float]:
    """Four sites. All of the second cohort are in its set, as in a repeat."""
    first = (["site-00", "site-01", "site-02", "site-03"], "", [VICTIM, "site-01"])
    again = (["site-01", "site-02", "site-03"], "", ["site-01", "site-02"])
    return lost_rounds(4, (1, -1), (first, again), told)


def test_a_set_is_no_repeat_because_the_coordinator_says_so() -> None:
    run, fit = called_again(called_a_repeat)
    assert np.isnan(fit)
    for name in ("site-01", "site-02"):
        assert_refused(run, name, PolicyViolation, "check_plan_repeats_ours")
    run, fit = called_again(all_told)
    assert np.isnan(fit)
    assert_refused(run, "site-01", PolicyViolation, "check_same_state_sums")


def test_a_set_is_no_repeat_because_the_coordinator_says_so_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier, "check_plan_repeats_ours", lambda *_: None)
    _, fit = called_again(called_a_repeat)
    assert fit > 0.85


def test_too_few_aborts_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate_checks, "check_abort_certificate", lambda *_: None)
    _, fit = two_lost_rounds("site-02", "site-03", told=called_aborted)
    assert fit > 0.85


def three_lost_rounds(told: Told) -> tuple[LostRounds, float]:
    """Seven sites, one of which colludes. The first set plus the third minus the second is the victim twice. In the
    third round the victim knows of the first set, and the other two of the second: each compares with one."""
    a, b, c, d, e, colluder = (f"site-{number:02d}" for number in range(1, 7))
    sets = (
        ([VICTIM, a, b, e, colluder], e, [VICTIM, a, b]),
        ([a, b, c, d, colluder], "", [a, c, d]),
        ([VICTIM, c, d, e, colluder], e, [VICTIM, c, d]),
    )
    return lost_rounds(7, (1, -1, 1), sets, told)


def test_members_compare_with_sets_that_only_others_know_of() -> None:
    run, fit = three_lost_rounds(told_to_who_asks)
    assert np.isnan(fit) and len(run.lost) == 2
    assert_refused(run, "site-01", PolicyViolation, "check_sums_listed")
    run, fit = three_lost_rounds(all_told)
    assert np.isnan(fit) and len(run.lost) == 3
    assert_refused(run, VICTIM, PolicyViolation, "check_same_state_sums")
    assert_refused(run, "site-03", PolicyViolation, "check_same_state_sums")


def test_members_compare_with_sets_that_only_others_know_of_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each site is shown the certificates that it asks for, and is alone with them."""
    monkeypatch.setattr(earlier, "check_sums_listed", lambda *_: None)
    run, fit = three_lost_rounds(told_to_who_asks)
    assert fit > 0.9
    run.check_promises()
