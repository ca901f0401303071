"""A13: one site is left out of every second sum while a colluder keeps the model where it is, by voiding each round.

Each pair of sums gives the victim's update under the noise of everybody's training; many pairs average that away.
On one model no site agrees to a set that, with the sets before that it knows of, isolates anybody; and without
differential privacy a site sends three different updates on one model and then waits for its operator.
"""

from __future__ import annotations

import numpy as np
import pytest

from lazaret.errors import PolicyViolation
from security.crypto.prg import Words
from security.secagg import fixed_point, messages
from security.secagg.context import SumVerdict
from security.secagg.site import checks, differences
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


# A limit that the threat model states: a site compares the sums that it knows of.


def hidden_sum(
    run: EvilCoordinator, trained: dict[str, Words], cohort: list[str], left_out: str, shown: list[str]
) -> Words | None:
    """A sum on the standing model that is published to nobody. Its set, the cohort without `left_out`, is shown to two
    honest sites alone, which with the colluder are a quorum."""
    run.begin_round(trained)
    run.machine(run.colluders[0]).core.journal.sums.clear()  # a colluder agrees to anything
    if left_out:
        run.lose(messages.UploadHeader, messages.UploadFrame, by=left_out)
    for name in cohort:
        if name not in (*shown, *run.colluders):
            run.lose(messages.Survivors, to=name)
    attempt = run.secretly(cohort)
    if attempt.publication is None:
        run.planned.note(done := attempt.close_step())  # the upload that is missing is waited for no longer
        run._do_coordinator(done)
        run.rules += [Rule(kind, lambda *_: None, None, None) for kind in (messages.Result, messages.SumFrame)]
        run.pump()
    run.rules.clear()
    # Who has not seen the set must close the attempt before the next one; one abort certifies nothing.
    run.aborts_of(attempt, [name for name in cohort if name not in (*shown, *run.colluders)])
    return None if attempt.publication is None else attempt.publication.total


def two_lost_rounds(*second: str) -> tuple[EvilCoordinator, float]:
    """Five sites, one of which colludes. The set of the first round is shown to site-00 and site-01, that of the
    second, which is the same without the victim, to `second`. Returns how well the difference fits the update."""
    layout = small_layout(5, words=2000, weight_cap=1)
    run = evil(5, c=1, layout=layout)
    generator = np.random.default_rng(4)
    learned = {name: generator.normal(0, SPREAD, layout.state_words).clip(-0.5, 0.5) for name in run.sites}

    def trained() -> dict[str, Words]:
        noisy = {name: learned[name] + generator.normal(0, NOISE, layout.state_words) for name in run.sites}
        return {name: fixed_point.encode(layout, x.astype(np.float32), weight=1).words for name, x in noisy.items()}

    found = []
    for cohort, left_out, shown in (
        (["site-00", "site-01", "site-02", "site-04"], "", [VICTIM, "site-01"]),
        (["site-01", "site-02", "site-03", "site-04"], "site-03", list(second)),
    ):
        updates = trained()
        total = hidden_sum(run, updates, cohort, left_out, shown)
        if total is None:
            return run, float("nan")
        found.append((total - updates["site-04"]).view(layout.signed_dtype).astype(float))
    truth = fixed_point.encode(layout, learned[VICTIM].astype(np.float32), weight=1).words
    return run, correlation(layout, found[0] - found[1], truth)


def test_who_has_released_a_set_agrees_to_no_other_that_shows_a_site_with_it() -> None:
    run, fit = two_lost_rounds("site-01", "site-02")
    assert np.isnan(fit)
    assert_refused(run, "site-01", PolicyViolation, "check_same_state_sums")


def test_sets_that_are_shown_to_different_sites_are_not_compared() -> None:
    """The coordinator has both sums and calls both rounds lost: no site knows of both."""
    run, fit = two_lost_rounds("site-02", "site-03")
    assert fit > 0.85
    run.check_promises()
