"""A18: a site is killed and asked again, for another answer than it gave before.

What it has said is in its write-ahead log before it is said. Killing either side before every single effect of a round
is in tests/unit/security/secagg/coordinator/test_recovery.py; here the attacker makes use of it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from lazaret.errors import PolicyViolation, RemoteProtocolError, VerificationFailed
from security.secagg import messages, records
from security.secagg.fields import Wire
from security.secagg.site import checks, differences
from security.secagg.site.machine import SiteMachine
from security.secagg.transitions import SiteState
from tests.support.evil import VICTIM, EvilCoordinator, assert_recovered, assert_refused, assert_safe, evil
from tests.support.secagg_world import reference_sum


def abort_after_release(run: EvilCoordinator, *, forget: bool = False) -> None:
    """All release, the sum stays secret, all are killed; then they are to abort and go on without the victim."""
    run.open_round()
    attempt = run.secretly()
    run.deaf = True
    for name in run.sites:
        if forget:
            wal = run.sites[name].wal
            wal[:] = [record for record in wal if not isinstance(record, records.Agreed | records.AttemptEnded)]
        run.restart_site(name)
    run.pump()
    certificate = run.aborts_of(attempt, run.sites)
    run.secretly([name for name in run.sites if name != VICTIM], aborts=[certificate])


def test_who_has_released_does_not_abort() -> None:
    run = evil(5)
    abort_after_release(run)
    for name in run.honest:
        assert_refused(run, name, RemoteProtocolError, "receive")
    first = run.planned.attempts[0].ctx
    assert not [abort for abort in run.said(messages.Abort) if abort.ctx == first]
    assert_refused(run, "site-01", VerificationFailed, "check_abort_certificate")
    assert_safe(run)


def asked_after_a_day(run: EvilCoordinator) -> None:
    """The same, when the released answers have outlived their time and the attempt is no longer open."""
    run.open_round()
    attempt = run.secretly()
    run.clock.advance(run.policy.secret_ttl_ms)  # type: ignore[attr-defined]
    for name in run.honest:
        run._do_site(name, run.machine(name).tick())
        assert run.machine(name).state is SiteState.IDLE
    certificate = run.aborts_of(attempt, run.sites)
    run.secretly([name for name in run.sites if name != VICTIM], aborts=[certificate])


def test_the_promise_outlives_the_attempt() -> None:
    run = evil(5)
    asked_after_a_day(run)
    assert_refused(run, VICTIM, RemoteProtocolError, "check_may_abort")
    assert_safe(run)


def test_the_promise_outlives_the_round_and_a_restart() -> None:
    """The records of an attempt are dropped with its round; that shares were released in it is remembered."""
    run = evil(4, wide=False)
    run.run_round(run.updates(1))
    asked = run.planned.attempts[0].abort_request()
    run.restart_site(VICTIM)
    with pytest.raises(RemoteProtocolError, match="released in that attempt"):
        run.machine().receive(asked)


def test_abort_after_release_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort certificate beside a sum: the updates go into a second one, and the difference is the victim's."""
    monkeypatch.setattr(differences, "check_same_state_sums", lambda *_: None)  # stops it as well
    monkeypatch.setattr(checks, "check_may_abort", lambda *_: None)
    run = evil(5)
    asked_after_a_day(run)
    assert_recovered(run)


def test_promises_that_were_not_written_twin() -> None:
    """The log lost what was said last: restarted sites sign ABORT for an attempt in which they have released."""
    run = evil(5)
    abort_after_release(run, forget=True)
    assert_recovered(run)


def test_another_set_after_a_restart() -> None:
    run = evil()
    shown: list[messages.Survivors] = []
    run.change(messages.Survivors, lambda message, site: shown.append(message) or message)
    run.lose(messages.Quorum)
    run.open_round()
    run.launch(run.plan())
    run.deaf = True
    smaller = replace(shown[0], uploads=tuple(line for line in shown[0].uploads if line.site != VICTIM))
    for name in run.honest:
        run.restart_site(name)
        before = len(run.said(messages.Agree, by=name))
        run.tell(name, smaller)
        assert_refused(run, name, RemoteProtocolError, "agree_again")
        assert len(run.said(messages.Agree, by=name)) == before
    assert_safe(run)


def test_all_die_between_agree_and_release_and_the_round_still_ends() -> None:
    run = evil(wide=False)
    run.lose(messages.Quorum)
    updates = run.open_round()
    attempt = run.launch(run.plan())
    run.rules.clear()
    for name in run.sites:
        run.restart_site(name)
    run.finish_attempt()
    assert attempt.publication is not None
    assert attempt.publication.total.tolist() == reference_sum(run.policy.layout, updates, run.sites)
    run.check_promises()


def test_killed_before_agree_a_site_aborts_and_nothing_else() -> None:
    run = evil()
    run.lose(messages.Survivors, messages.Result, messages.SumFrame, to=VICTIM)
    run.open_round()
    run.launch(run.plan())
    run.deaf = True
    run.restart_site(VICTIM)
    run.pump()
    assert [abort.code for abort in run.said(messages.Abort, by=VICTIM)] == [3]
    (*_, refused) = run.machine().receive(run.planned.attempts[-1].plan)
    assert isinstance(refused.error, PolicyViolation)  # type: ignore[union-attr]
    assert_safe(run)


def asked_for_an_old_answer(run: EvilCoordinator) -> list[Wire]:
    """Attempt 1 is certified and given up by the others; the victim, which heard neither, joins attempt 2. Days later
    somebody who has found the certificate asks it for its shares of attempt 1."""
    held: list[messages.Quorum] = []
    run.change(messages.Quorum, lambda message, site: held.append(message))
    run.open_round()
    first = run.launch(run.plan())
    certificate = run.aborts_of(first, [name for name in run.sites if name != VICTIM])
    run.lose(messages.Adverts)
    run.launch(run.plan(aborts=[certificate], attempt=2))
    assert run.machine().state is SiteState.ADVERTISED
    run.clock.advance(run.policy.secret_ttl_ms)  # type: ignore[attr-defined]
    for _ in range(2):  # the first look ends the open attempt
        run._do_site(VICTIM, run.machine().tick())
    run.deaf = True
    run.rules.clear()
    return [said for said in run.tell(VICTIM, held[0]) if isinstance(said, messages.Unmask)]


def test_answers_of_earlier_attempts_expire_too() -> None:
    run = evil()
    assert not asked_for_an_old_answer(run)
    assert_safe(run)


def test_answers_of_earlier_attempts_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SiteMachine, "_expire", lambda self: ())
    assert asked_for_an_old_answer(evil())
