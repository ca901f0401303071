"""Disputes at the coordinator: passed on, asked again after a reconnect, remembered over a restart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lazaret.errors import PolicyViolation, VerificationFailed
from security.secagg import messages, records
from security.secagg.coordinator.recovery import restore_round
from security.secagg.coordinator.rounds import BlameBook
from security.secagg.effects import Send
from security.secagg.site import checks
from security.secagg.transitions import CoordinatorState, SiteState
from tests.support import cheats
from tests.support.evil import VICTIM, EvilCoordinator, evil

LIAR = "site-03"


def disputed(*ways: cheats.Cheat) -> EvilCoordinator:
    """Until everything that can be said without a timeout is said."""
    run = evil(wide=False)
    cheats.both(cheats.bad_box, *ways)(run, LIAR)
    run.open_round()
    run.launch(run.plan())
    return run


def test_an_open_dispute_is_asked_again_when_its_dealer_reconnects() -> None:
    run = disputed(cheats.keeps(messages.Disclosure))
    attempt = run.planned.attempts[-1]
    assert run.machine().state is SiteState.DISPUTING and attempt.disputes.silent == (LIAR,)
    assert attempt.uploads.next_frame(VICTIM) is None
    hello = run.machine(LIAR).hello()
    asked = [effect.message for effect in attempt.receive(LIAR, hello) if isinstance(effect, Send)]
    assert [type(message) for message in asked] == [messages.Accusation]
    run.rules.clear()
    run._do_coordinator(attempt.receive(LIAR, hello))
    run.pump()
    assert attempt.state is CoordinatorState.CERTIFIED and VICTIM in attempt.publication.survivors  # type: ignore[union-attr]


def test_a_dealer_is_not_asked_as_often_as_its_accuser_likes() -> None:
    """Each answer would be signed, and an entry in the dealer's privacy log."""
    run = disputed(cheats.keeps(messages.Disclosure))
    accusation = run.said(messages.Accusation)[0]
    assert run.planned.attempts[-1].receive(VICTIM, accusation) == ()


def test_an_accuser_that_reconnects_gets_the_answer_again() -> None:
    run = disputed(lambda run, _: run.lose(messages.Disclosure, to=VICTIM))
    attempt = run.planned.attempts[-1]
    assert run.machine().state is SiteState.DISPUTING and not attempt.disputes.open
    run.rules.clear()
    run._do_coordinator(attempt.receive(VICTIM, run.machine().hello()))
    run.pump()
    assert attempt.state is CoordinatorState.CERTIFIED and VICTIM in attempt.publication.survivors  # type: ignore[union-attr]
    assert len([r for r in run.written[LIAR] if isinstance(r, records.ShareDisclosed)]) == 1


def test_a_header_that_was_lost_after_a_dispute_is_sent_again() -> None:
    run = disputed(lambda run, _: run.lose(messages.UploadHeader, messages.UploadFrame, by=VICTIM))
    attempt = run.planned.attempts[-1]
    assert run.machine().state is SiteState.UPLOADED
    run.rules.clear()
    run._do_coordinator(attempt.receive(VICTIM, run.machine().hello()))
    run.pump()
    assert attempt.state is CoordinatorState.CERTIFIED and VICTIM in attempt.publication.survivors  # type: ignore[union-attr]


def test_the_time_for_an_answer_is_that_of_a_step_and_not_of_the_upload() -> None:
    run = disputed(cheats.keeps(messages.Disclosure))
    attempt, clock = run.planned.attempts[-1], run.core.clock
    clock.advance(run.core.timeouts.step_ms - 1)  # type: ignore[attr-defined]
    assert not attempt.tick()
    clock.advance(1)  # type: ignore[attr-defined]
    run.planned.note(attempt.tick())
    assert attempt.state is CoordinatorState.ABORTING and run.book.silence == {LIAR: 1}


def test_answers_survive_a_restart_and_what_is_public_counts_no_more() -> None:
    run = disputed(lambda run, _: run.lose(messages.UploadHeader, messages.UploadFrame, by=VICTIM))
    stored = run.sites[VICTIM].saved
    found = restore_round(run.core, BlameBook(), run.coordinator_wal, lambda digest: stored[digest])
    assert found is not None
    attempt = found.attempts[-1]
    assert attempt.disputes.settled.keys() == {(VICTIM, LIAR)} == attempt.disputes.accused
    names = list(run.sites)
    assert not attempt.disputes.frees(LIAR, names[:3], 3) and attempt.disputes.frees(LIAR, names, 3)
    assert attempt.disputes.frees(VICTIM, names[:3], 3)


def test_a_dealer_that_the_aborts_do_not_free_is_not_planned() -> None:
    """It would refuse the plan, because the abort of its accuser keeps nothing secret."""
    run = disputed(lambda run, _: run.lose(messages.Survivors))
    attempt, names = run.planned.attempts[-1], list(run.sites)
    signed = run.aborts_of(attempt, names)
    for line in signed.lines[:3]:
        abort = messages.Abort(site=line.site, ctx=attempt.ctx, code=line.code, signature=line.signature)
        attempt.aborts[line.site] = abort
    assert run.planned._cohort(names) == [name for name in names if name != LIAR]


def test_a_dealer_counts_no_abort_of_a_holder_whose_share_is_public() -> None:
    run = disputed(lambda run, _: run.lose(messages.Survivors))
    attempt = run.planned.attempts[-1]
    certificate = run.aborts_of(attempt, run.sites)
    for journal, lines, enough in (
        (run.machine(LIAR).core.journal, certificate.lines[:3], False),
        (run.machine(LIAR).core.journal, certificate.lines, True),
        (run.machine().core.journal, certificate.lines[:3], True),
    ):
        plan = run.plan(aborts=[replace(certificate, lines=lines)])
        if enough:
            checks.check_plan_reuse(run.policy, journal.of_round(1), plan)
        else:
            with pytest.raises(VerificationFailed, match="fewer than the abort quorum"):
                checks.check_plan_reuse(run.policy, journal.of_round(1), plan)


def test_nothing_is_answered_that_is_not_asked() -> None:
    run = disputed(lambda run, _: run.lose(messages.Survivors))
    attempt = run.planned.attempts[-1]
    accusation = run.said(messages.Accusation)[0]
    for wrong in (
        replace(accusation, kx=bytes(32)),
        replace(accusation, dealer="site-01"),
        replace(accusation, dealer=VICTIM),
    ):
        with pytest.raises((VerificationFailed, PolicyViolation)):
            attempt.disputes.accusation(wrong, over=False)
    answer = run.said(messages.Disclosure)[0]
    for forged in (replace(answer, kx=bytes(32)), replace(answer, b_share=bytes(32))):
        with pytest.raises(VerificationFailed):
            attempt.disputes.disclosure(forged, over=False)
    assert attempt.disputes.disclosure(answer, over=True) == ()
    attempt.disputes.settled.clear()
    assert attempt.disputes.disclosure(answer, over=False) == (), "nobody asks any more"
    assert not attempt.disputes.settled
