"""A31: a listed site decides who is summed. It deals its victim a box that does not open, and the victim cannot go on.

The coordinator is honest. Toggled over rounds, sums with and without the victim would give its update. With disputes
the liar publishes the share, or is named: the victim stays in every sum.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from security.clock import ManualClock
from security.crypto.prg import Words
from security.secagg import certificate_checks, fixed_point, messages, statements
from security.secagg.coordinator.attempt import CoordinatorAttempt
from security.secagg.coordinator.disputes import Disputes
from security.secagg.coordinator.rounds import BlameBook
from security.secagg.coordinator.uploads import Timeouts
from security.secagg.effects import Effects
from tests.support import cheats
from tests.support.evil import VICTIM, EvilCoordinator, assert_recovered, assert_safe, evil
from tests.support.secagg_world import reference_sum, small_layout
from tests.support.spoils import correlation

LIAR = "site-03"
ROUNDS, SPREAD, NOISE = 16, 0.14, 0.03
STEP = 30_000


def one_round(*ways: cheats.Cheat) -> tuple[EvilCoordinator, tuple[str, ...], int]:
    run = evil(wide=False)
    cheats.both(cheats.bad_box, *ways)(run, run.colluders[0])
    updates = run.updates(1)
    outcome = run.run_round(updates)
    assert outcome.total is not None
    assert outcome.total.tolist() == reference_sum(run.policy.layout, updates, outcome.survivors)
    run.check_promises()
    return run, outcome.survivors, outcome.attempts


def test_a_valid_answer_is_used_and_nobody_is_left_out() -> None:
    run, survivors, attempts = one_round()
    assert (survivors, attempts) == (tuple(run.sites), 1)
    assert run.book.accusations == {(VICTIM, LIAR)}
    assert not run.book.strikes and not run.book.excluded
    shown = run.said(messages.Disclosure)
    assert [(said.site, said.holder) for said in shown] == [(LIAR, VICTIM)], "one share, of one pair"


def test_no_answer_names_the_dealer_and_the_victim_is_summed() -> None:
    run, survivors, attempts = one_round(cheats.keeps(messages.Disclosure))
    assert (survivors, attempts) == (tuple(run.honest), 2)
    assert run.book.strikes == {LIAR: 1} and run.book.silence == {LIAR: 1}


def test_a_wrong_answer_convicts_the_dealer() -> None:
    run, survivors, attempts = one_round(cheats.wrong_answer)
    assert (survivors, attempts) == (tuple(run.honest), 2)
    assert run.book.excluded == {LIAR: "wrong share"}


def test_an_answer_to_nobody_changes_nothing() -> None:
    """The victim goes on with shares that the dealer has signed for, whoever sends them; with no others."""

    def other(message: messages.Disclosure, site: str) -> list[messages.Disclosure]:
        forged = messages.Disclosure(
            site=message.site,
            kx=message.kx,
            holder=message.holder,
            b_share=bytes(32),
            s_share=message.s_share,
            pair=message.pair,
            signature=message.signature,
        )
        return [forged, message]

    run, survivors, _ = one_round(lambda run, _: run.change(messages.Disclosure, other, to=VICTIM))
    assert survivors == tuple(run.sites)
    assert any("share is not the one that was dealt" in str(error) for error in run.sites[VICTIM].errors)


def toggled() -> tuple[EvilCoordinator, float, list[int]]:
    """The liar spoils the victim's box in every second round, and gives no answer. Returns how well the difference of
    the two means fits what the victim learned, and the weights of both kinds of sums."""
    layout = small_layout(5, words=2000)
    run = evil(5, c=1, layout=layout)
    generator = np.random.default_rng(3)
    learned = {name: generator.normal(0, SPREAD, layout.state_words).clip(-0.5, 0.5) for name in run.sites}
    weights = dict(zip(run.sites, (40, 17, 9, 33, 21), strict=True))
    sums: dict[bool, list[Words]] = {True: [], False: []}
    for number in range(ROUNDS):
        run.rules.clear()
        if number % 2:
            cheats.both(cheats.bad_box, cheats.keeps(messages.Disclosure))(run, run.colluders[0])
        updates = {}
        for name in run.sites:
            trained = learned[name] + generator.normal(0, NOISE, layout.state_words)
            updates[name] = fixed_point.encode(layout, trained.astype(np.float32), weight=weights[name]).words
        outcome = run.run_round(updates)
        assert outcome.total is not None
        liars = updates[run.colluders[0]] if run.colluders[0] in outcome.survivors else 0 * updates[VICTIM]
        sums[number % 2 == 0].append((outcome.total - liars).view(layout.signed_dtype).astype(float))
    with_victim, without = (np.mean(sums[kind], axis=0) for kind in (True, False))
    truth = fixed_point.encode(layout, learned[VICTIM].astype(np.float32), weight=weights[VICTIM]).words
    slot = layout.slot("weight")
    counts = [round(found[slot].item()) for found in (with_victim, without)]
    return run, correlation(layout, with_victim - without, truth), counts


def test_sixteen_rounds_of_bad_boxes_never_isolate_the_victim() -> None:
    run, fit, counts = toggled()
    assert abs(fit) < 0.2 and counts[0] == counts[1], "the victim is in all of them"
    assert not run.book.excluded.keys() & set(run.honest) and not run.book.strikes.keys() & set(run.honest)


def test_sixteen_rounds_of_bad_boxes_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody asks the dealer, the sum is made without the accuser: its update and sample count come out."""
    monkeypatch.setattr(Disputes, "accusation", lambda *_args, **_named: ())
    _, fit, counts = toggled()
    assert fit > 0.9 and counts[0] - counts[1] == 40


# Accusations against honest dealers.


def test_false_accusations_leave_nobody_out_and_convict_their_maker() -> None:
    run = evil(7, colluders=1, c=2, wide=False)
    cheats.accuse_in_turn(run, run.colluders[0])
    for number in (1, 2, 3):
        outcome = run.run_round(run.updates(number))
        assert outcome.attempts == 1 and set(run.honest) <= set(outcome.survivors)
    assert run.book.excluded == {run.colluders[0]: "disputes"}
    run.check_promises()


def test_an_accusation_taken_at_its_word_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the accused simply thrown out, one liar would empty the federation."""

    def believe(self: BlameBook, accuser: str, dealer: str, *, c: int) -> None:
        self.exclude(dealer, "accused")

    monkeypatch.setattr(BlameBook, "accuse", believe)
    run = evil(7, colluders=1, c=2, wide=False)
    cheats.accuse_in_turn(run, run.colluders[0])
    run.run_round(run.updates(1))
    assert set(run.book.excluded) & set(run.honest)


# Accusations at the last moment, so that the honest dealer has no time to answer.


def accuse(run: EvilCoordinator, accuser: str, dealer: str) -> None:
    """The coordinator takes the accusation; it is on its way to the dealer."""
    attempt = run.planned.attempts[-1]
    signature = run.signer(accuser).sign(statements.accuse(attempt.dealing.kx, dealer))
    said = messages.Accusation(site=accuser, kx=attempt.dealing.kx, dealer=dealer, signature=signature)
    run._do_coordinator(run.planned.receive(accuser, said))


def pass_time(run: EvilCoordinator, until_ms: int) -> None:
    """With a look at the clock at every second, as a coordinator does it."""
    clock, attempt = run.core.clock, run.planned.attempts[-1]
    assert isinstance(clock, ManualClock)
    while (left := until_ms - clock.mono_ms()) > 0:
        clock.advance(min(1000, left))
        effects = attempt.tick()
        run.planned.note(effects)
        run._do_coordinator(effects)


def begin(run: EvilCoordinator, number: int = 1) -> CoordinatorAttempt:
    """All time limits are alike: what is asked for at the end of one is due after the end of another."""
    run.core.timeouts = Timeouts(step_ms=STEP, upload_ms=STEP)
    run.open_round(number)
    return run.launch(run.plan())


def accused_at_the_last_moment(run: EvilCoordinator, *, early: tuple[str, str] | None = None) -> CoordinatorAttempt:
    """A liar accuses the victim in the last millisecond in which it may: the time of the uploads is over then, too,
    and with `early` that of another accusation, whose dealer does not answer."""
    run.lose(messages.UploadFrame, by=run.colluders[0])
    attempt = begin(run)
    last = run.core.clock.mono_ms() + STEP
    if early is not None:
        accuse(run, *early)
    pass_time(run, last - 1)
    accuse(run, run.colluders[0], VICTIM)
    pass_time(run, last + 1000)
    run.pump()  # the victim has the accusation, and answers
    pass_time(run, attempt.deadline or 0)
    run.pump()
    return attempt


def test_a_dealer_that_is_accused_at_the_last_moment_has_time_to_answer() -> None:
    run = evil(5, c=1, wide=False)
    attempt = accused_at_the_last_moment(run)
    assert attempt.publication is not None and set(attempt.publication.survivors) == set(run.honest)
    assert not run.book.strikes and not run.book.silence, "the liar has left itself out, and nobody else"


def test_a_dealer_that_is_accused_at_the_last_moment_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no more time than is left of the step, whoever is accused last is called silent, and left out."""
    monkeypatch.setattr(Disputes, "deadline", None)
    monkeypatch.setattr(Disputes, "silent", property(lambda self: tuple(sorted({pair[1] for pair in self.open}))))
    run = evil(5, c=1, wide=False)
    assert accused_at_the_last_moment(run).publication is None
    assert run.book.strikes == {VICTIM: 1} == run.book.silence


def test_only_the_dealer_whose_time_is_over_is_named() -> None:
    """Two liars: one accuses the other, which does not answer, and the victim just before that is over."""
    run = evil(7, colluders=2, c=2, wide=False)
    accuser, silent = run.colluders
    run.lose(messages.Disclosure, by=silent)
    attempt = accused_at_the_last_moment(run, early=(accuser, silent))
    assert attempt.publication is None and run.book.silence == {silent: 1}
    assert not run.book.strikes.keys() & set(run.honest)


def test_later_accusations_keep_nobody_waiting() -> None:
    run = evil(5, c=1, wide=False)
    run.lose(messages.UploadFrame, by=run.colluders[0])
    attempt = begin(run)
    run.core.clock.advance(STEP)  # type: ignore[attr-defined]
    accuse(run, run.colluders[0], VICTIM)
    assert not attempt.disputes.open and attempt.disputes.accused == {(run.colluders[0], VICTIM)}
    assert attempt.deadline is not None
    pass_time(run, attempt.deadline)
    assert attempt.survivors is not None and not run.book.silence


# Accusations of an honest dealer that has restarted: its secrets of the attempt were in memory only.


def accused_after_a_restart() -> EvilCoordinator:
    """In three rounds the victim's machine restarts during the aggregation, and the liar accuses it then."""
    run = evil(5, c=1, wide=False)
    for number in (1, 2, 3):
        run.rules.clear()
        run.lose(messages.UploadFrame, by=VICTIM)
        run.lose(messages.UploadFrame, by=run.colluders[0])
        attempt = begin(run, number)
        run.restart_site(VICTIM)
        run.pump()
        assert VICTIM in attempt.aborts
        accuse(run, run.colluders[0], VICTIM)
        pass_time(run, run.core.clock.mono_ms() + 2 * STEP)
        run.pump()
        assert attempt.publication is None, "the next attempt is held without the dealer"
    return run


def test_a_dealer_that_restarts_is_not_named_a_liar() -> None:
    run = accused_after_a_restart()
    assert not run.book.silence and not run.book.excluded


def test_a_dealer_that_restarts_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were its abort no answer, three restarts and one liar would exclude it until the consortium renews it."""
    whole = CoordinatorAttempt._close_uploads

    def without_aborts(self: CoordinatorAttempt) -> Effects:
        known, self.aborts = self.aborts, {}
        try:
            return whole(self)
        finally:
            self.aborts = known

    monkeypatch.setattr(CoordinatorAttempt, "_close_uploads", without_aborts)
    assert accused_after_a_restart().book.excluded == {VICTIM: "no answer to accusations"}


def answered_at_the_last_moment() -> tuple[str, ...]:
    """The liar publishes the share of its bad box in the last millisecond; the victim's upload takes a while. Returns
    who is summed."""
    run = evil(5, c=1, wide=False)
    cheats.both(cheats.bad_box, cheats.keeps(messages.Disclosure))(run, run.colluders[0])
    attempt = begin(run)
    pass_time(run, run.core.clock.mono_ms() + STEP - 1)
    (answer,) = run.said(messages.Disclosure)
    run._do_coordinator(run.planned.receive(run.colluders[0], answer))
    pass_time(run, run.core.clock.mono_ms() + STEP // 2)
    run.pump()
    return attempt.publication.survivors if attempt.publication is not None else ()


def test_an_answer_at_the_last_moment_leaves_time_for_the_upload() -> None:
    assert VICTIM in answered_at_the_last_moment()


def test_an_answer_at_the_last_moment_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without more time after an answer the liar decides, as with no answer at all, who is not summed."""
    whole = CoordinatorAttempt._extend

    def at_the_beginning_only(self: CoordinatorAttempt) -> None:
        if self._begun == self.core.clock.mono_ms():
            whole(self)

    monkeypatch.setattr(CoordinatorAttempt, "_extend", at_the_beginning_only)
    summed = answered_at_the_last_moment()
    assert summed and VICTIM not in summed


# The coordinator uses disputes to get at shares.


def asked_for_everything() -> EvilCoordinator:
    """The coordinator accuses the victim in the name of every other site, with whatever signature it has."""
    run = evil()
    run.open_round()
    run.lose(messages.Survivors)
    run.launch(run.plan())
    kx = run.planned.attempts[-1].dealing.kx
    for name in run.sites:
        if name == VICTIM:
            continue
        key = run.signer(name) if name in run.colluders else run.core.signer
        signature = key.sign(statements.accuse(kx, VICTIM))
        run.tell(VICTIM, messages.Accusation(site=name, kx=kx, dealer=VICTIM, signature=signature))
    return run


def test_only_the_holder_itself_can_ask_for_its_share() -> None:
    run = asked_for_everything()
    assert [said.holder for said in run.said(messages.Disclosure)] == list(run.colluders)
    assert_safe(run)


@pytest.mark.parametrize("off", [("check_accusation",), ("check_accusation", "check_disclosures")])
def test_only_the_holder_itself_can_ask_for_its_share_twin(
    off: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the holder's signature every share would do, and the limit is all that is left of the threshold."""
    silence: Callable[..., None] = lambda *_args, **_named: None  # noqa: E731 - a rule that is not there
    for rule in off:
        monkeypatch.setattr(certificate_checks, rule, silence)
    run = asked_for_everything()
    (assert_recovered if "check_disclosures" in off else assert_safe)(run)
