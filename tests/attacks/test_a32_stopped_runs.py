"""A32: listed sites try to stop a run: bad boxes, withheld messages, false accusations, wrong secrets, void sums.

The coordinator is honest. With up to c of n = 4 to 7 sites against it, every round has a sum of all honest sites,
within c + 3 attempts. There are two exceptions, void sums, and wrong secrets of one liar together with the silence of
another: after these the operators decide. At three sites there is nobody to go on without: the round is lost, and its
cause names the liar.
"""

from __future__ import annotations

from typing import Any

import pytest

from lazaret.errors import PolicyViolation
from security.crypto import shamir
from security.secagg import messages
from security.secagg.certificates import Advert
from security.secagg.context import SumVerdict
from security.secagg.coordinator.attempt import CoordinatorAttempt
from security.secagg.coordinator.rounds import BlameBook, RoundLost
from security.secagg.records import UpdatesPermitted
from security.secagg.site import differences
from security.secagg.site.journal import Journal
from security.secrets import Secret
from tests.support import cheats
from tests.support.evil import EvilCoordinator, assert_refused, evil
from tests.support.secagg_world import reference_sum

UPLOAD = (messages.UploadHeader, messages.UploadFrame)
SIZES = [(4, 1), (5, 1), (6, 1), (7, 1), (7, 2)]
WAYS: dict[str, cheats.Cheat] = {
    "bad box, no answer": cheats.both(cheats.bad_box, cheats.keeps(messages.Disclosure)),
    "bad box, answer, no upload": cheats.both(cheats.bad_box, cheats.keeps(*UPLOAD)),
    "bad box, no answer, no upload, no abort": cheats.both(
        cheats.bad_box, cheats.keeps(messages.Disclosure, *UPLOAD, messages.Abort)
    ),
    "bad box, wrong answer": cheats.both(cheats.bad_box, cheats.wrong_answer),
    "false accusations, no upload": cheats.both(cheats.accuse_in_turn, cheats.keeps(messages.UploadFrame)),
    "no shares": cheats.keeps(messages.Shares),
    "no agreement, no release": cheats.keeps(messages.Agree, messages.Unmask),
}


def attacked(n: int, liars: int, way: str, rounds: int = 3) -> EvilCoordinator:
    """Runs rounds; each has a sum of at least all honest sites."""
    run = evil(n, colluders=liars, c=max(liars, 1), wide=False)
    for liar in run.colluders:
        WAYS[way](run, liar)
    for number in range(1, rounds + 1):
        updates = run.updates(number)
        outcome = run.run_round(updates)
        assert outcome.verdict is SumVerdict.GOOD and outcome.attempts <= run.policy.c + 3, f"round {number}"
        assert set(run.honest) <= set(outcome.survivors), f"round {number}"
        assert outcome.total is not None
        assert outcome.total.tolist() == reference_sum(run.policy.layout, updates, outcome.survivors)
    assert not (run.book.strikes.keys() | run.book.excluded.keys()) & set(run.honest), "strikes fall on liars"
    run.check_promises()
    return run


@pytest.mark.parametrize(("n", "liars"), SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_every_round_has_a_sum(n: int, liars: int, way: str) -> None:
    attacked(n, liars, way)


@pytest.mark.parametrize("n", [4, 5])
def test_every_round_has_a_sum_twin(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a strike for the dealer that does not answer, the same bad box ends every attempt of every round."""
    monkeypatch.setattr(BlameBook, "missed", lambda *_: None)
    monkeypatch.setattr(BlameBook, "unanswered", lambda *_: None)
    run = evil(n, c=1, wide=False)
    WAYS["bad box, no answer"](run, run.colluders[0])
    assert all(run.run_round(run.updates(number)).total is None for number in range(1, 5))


@pytest.mark.parametrize(("n", "liars"), SIZES)
def test_a_dealer_of_wrong_secrets_costs_one_repeat(n: int, liars: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = evil(n, colluders=liars, c=liars, wide=False)
    split = shamir.split

    def cheat(secret: Secret, **options: Any) -> tuple[Secret, ...]:
        attempts = [run.machine(liar).aggregation.attempt for liar in run.colluders]
        wrong = any(attempt is not None and secret is attempt.seed for attempt in attempts)
        return split(Secret(bytes(32)) if wrong else secret, **options)

    monkeypatch.setattr(shamir, "split", cheat)
    for number in (1, 2):
        outcome = run.run_round(run.updates(number))
        assert outcome.verdict is SumVerdict.GOOD and set(run.honest) <= set(outcome.survivors)
    assert run.book.excluded == dict.fromkeys(run.colluders, "fraud")


def test_at_three_sites_the_round_is_lost_and_its_cause_is_named() -> None:
    run = evil(3, c=1, wide=False)
    liar = run.colluders[0]
    WAYS["bad box, no answer"](run, liar)
    for number in (1, 2):
        assert run.run_round(run.updates(number)).total is None
    with pytest.raises(RoundLost, match=rf"2 sites are too few .* at fault: {liar} \(no answer to accusations\)"):
        run.planned._cohort(list(run.sites))
    assert not (run.book.strikes.keys() | run.book.excluded.keys()) & set(run.honest)


# Void sums: nobody can see who sent what makes them void, and no site goes on for ever on one model.


def voided(run: EvilCoordinator, number: int) -> Any:
    updates = run.updates(number)
    updates[run.colluders[0]] = updates[run.colluders[0]].copy()
    updates[run.colluders[0]][run.policy.layout.slot("weight")] = 2**20
    return run.run_round(updates)


def permit(run: EvilCoordinator, name: str) -> None:
    """`site-agent permit` at one site."""
    core = run.machine(name).core
    run._do_site(name, (core.record(UpdatesPermitted(state_hash=core.head.state_hash)),))


def stopped(n: int) -> EvilCoordinator:
    run = evil(n, c=1, wide=False)
    for number in (1, 2, 3):
        assert voided(run, number).verdict is SumVerdict.VOID
    return run


@pytest.mark.parametrize("n", [4, 5, 6, 7])
def test_after_three_void_sums_each_operator_decides(n: int) -> None:
    """The run goes on in the next round once the operators have released it, here without the liar."""
    run = stopped(n)
    honest = {name: words for name, words in run.updates(4).items() if name in run.honest}
    assert run.run_round(dict(honest)).total is None
    for name in run.honest:
        error = assert_refused(run, name, PolicyViolation, "check_plan_updates_on_state")
        assert "site-agent permit" in (error.hint or "")
        permit(run, name)
    outcome = run.run_round({name: words for name, words in run.updates(5).items() if name in run.honest})
    # Who refused first in round 4 may sit out one cohort.
    assert outcome.verdict is SumVerdict.GOOD and len(set(run.honest) - set(outcome.survivors)) <= 1


def test_the_operators_release_is_for_three_more_and_survives_a_restart() -> None:
    run = stopped(4)
    for name in run.honest:
        state = run.machine(name).core.head.state_hash
        for ignored in (bytes(32), state):
            run._do_site(name, (run.machine(name).core.record(UpdatesPermitted(state_hash=ignored)),))
        run.restart_site(name)
        assert run.machine(name).core.journal.updates_left(vote=False) == 3
    run.machine("site-03").core.journal.permitted = 1  # its own operator releases it too
    for number in (4, 5, 6):
        assert voided(run, number).verdict is SumVerdict.VOID
    assert voided(run, 7).total is None


def test_after_three_void_sums_each_operator_decides_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the operator's word not counted, no command could bring the run back."""
    monkeypatch.setattr(Journal, "updates_left", lambda self, **_: max(0, 3 - len(self.uploaded)))
    run = stopped(4)
    for name in run.honest:
        permit(run, name)
    for number in (4, 5):
        assert run.run_round(dict(run.updates(number))).total is None


# A sum on the model exists that the next one could be compared with, and a liar stays away.


def waits_for_its_operators(run: EvilCoordinator, number: int) -> None:
    """Honest sites refuse a set without those who stay away now; then each operator decides, and there is a sum."""
    honest = {name: words for name, words in run.updates(number).items() if name in run.honest}
    assert run.run_round(dict(honest)).total is None
    for name in run.honest:
        error = assert_refused(run, name, PolicyViolation, "check_same_state_sums")
        assert "site-agent permit" in (error.hint or "")
        permit(run, name)
    fresh = {name: words for name, words in run.updates(number + 1).items() if name in run.honest}
    assert run.run_round(fresh).verdict is SumVerdict.GOOD


@pytest.mark.parametrize("n", [4, 7])
def test_a_liar_that_stays_away_after_a_void_sum(n: int) -> None:
    run = evil(n, c=1, wide=False)
    assert voided(run, 1).verdict is SumVerdict.VOID
    waits_for_its_operators(run, 2)


def test_a_liar_that_stays_away_after_a_void_sum_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the run waits for: without the rule it goes on, also if it is an honest site that is away, whose update is
    then the difference of two sums (A13)."""
    monkeypatch.setattr(differences, "check_same_state_sums", lambda *_: None)
    run = evil(4, c=1, wide=False)
    assert voided(run, 1).verdict is SumVerdict.VOID
    assert run.run_round({n: w for n, w in run.updates(2).items() if n in run.honest}).total is not None


def with_silent_repeats(monkeypatch: pytest.MonkeyPatch) -> EvilCoordinator:
    """One liar shares another seed than it has committed to, a second one says nothing when the set is repeated."""
    run = evil(7, colluders=2, c=2, wide=False)
    dealer, silent = run.colluders
    split = shamir.split

    def cheat(secret: Secret, **options: Any) -> tuple[Secret, ...]:
        attempt = run.machine(dealer).aggregation.attempt
        return split(Secret(bytes(32)) if attempt is not None and secret is attempt.seed else secret, **options)

    def keep(message: Advert, site: str) -> Advert | None:
        attempt = run.machine(site).aggregation.attempt
        return None if attempt is not None and attempt.context.repeats else message

    monkeypatch.setattr(shamir, "split", cheat)
    run.change(Advert, keep, by=silent)
    return run


def test_wrong_secrets_of_one_liar_and_silence_of_another_cost_a_round_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = with_silent_repeats(monkeypatch)
    assert run.run_round(run.updates(1)).total is None
    assert run.book.excluded == {run.colluders[0]: "fraud"} and run.book.strikes.keys() == {run.colluders[1]}
    waits_for_its_operators(run, 2)
    for number in (4, 5):
        assert set(run.honest) <= set(run.run_round(run.updates(number)).survivors)


def test_a_coordinator_that_leaves_the_dispute_open_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before disputes: a bad box and a withheld upload left too few uploads, in every round."""
    monkeypatch.setattr(CoordinatorAttempt, "_accusation", lambda *_: ())
    run = evil(4, c=1, wide=False)
    WAYS["bad box, answer, no upload"](run, run.colluders[0])
    outcome = run.run_round(run.updates(1))
    assert outcome.attempts > 1 and set(run.book.strikes) & set(run.honest), "the victim is struck like the liar"
