"""A19: an old copy of a site's state directory is put back, so that it forgets what it has promised.

A set-back site counts as one more colluder in what it forgot: it signs ABORT for an attempt in which it has released.
Its peers notice at its next advert, because adverts are numbered, before that becomes another site's loss.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from lazaret.errors import VerificationFailed
from security import labels
from security.secagg import messages, statements
from security.secagg.certificates import Advert
from security.secagg.effects import Blamed, Leave
from security.secagg.site import checks, differences
from security.secagg.site.attempt import AdvertisedLog, OpenAttempt
from security.secagg.site.checks import StateRestored
from security.secagg.site.journal import Journal
from security.secagg.site.machine import SiteMachine
from security.secagg.statements import Statement
from security.secagg.transitions import CoordinatorState, SiteState
from tests.support.evil import VICTIM, EvilCoordinator, assert_recovered, assert_refused, assert_safe, evil

RESTORED = "site-01"


def a_backup_is_restored(run: EvilCoordinator) -> None:
    """n = 5, t = 4, a = 3: four release; one of them is set back and aborts, with the fifth and the colluder."""
    run.lose(messages.Quorum, to="site-03")
    run.open_round()
    backup = list(run.sites[RESTORED].wal)
    attempt = run.secretly()
    run.restored(RESTORED, backup, run.model)
    certificate = run.aborts_of(attempt, [RESTORED, "site-03", *run.colluders])
    assert len(certificate.lines) == attempt.context.a
    run.secretly([name for name in run.sites if name != VICTIM], aborts=[certificate])


def test_peers_notice_and_the_restored_site_halts() -> None:
    run = evil(5)
    a_backup_is_restored(run)
    assert_refused(run, "site-02", StateRestored, "check_advert_sequences")
    assert run.machine(RESTORED).state is SiteState.HALTED
    assert run.book.excluded == {RESTORED: "restored from an old copy"}
    assert_safe(run)


def test_a_restored_backup_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unnoticed, one restored site costs another one its update."""
    monkeypatch.setattr(differences, "check_same_state_sums", lambda *_: None)  # stops it as well
    monkeypatch.setattr(checks, "check_advert_sequences", lambda *_: None)
    run = evil(5)
    a_backup_is_restored(run)
    assert_recovered(run)


def test_a_halted_site_stays_halted_over_restarts() -> None:
    run = evil(5, wide=False)
    a_backup_is_restored(run)
    site = run.sites[RESTORED]
    again = SiteMachine(replace(site.machine.core, journal=Journal.replay(site.wal)), run.model)
    assert [type(effect) for effect in again.start()] == [Leave]
    assert again.state is SiteState.HALTED


def test_at_start_up_its_own_advert_is_enough() -> None:
    run = evil(5, wide=False)
    run.open_round()
    backup = list(run.sites[RESTORED].wal)
    run.launch(run.plan())
    newest = run.machine(VICTIM).core.journal.peers[RESTORED]
    run.restored(RESTORED, backup, evil(5, wide=False).model)
    run.tell(RESTORED, messages.Rollback(advert=newest))
    assert run.machine(RESTORED).state is SiteState.HALTED


def an_advert_of_an_earlier_run() -> tuple[EvilCoordinator, messages.Rollback]:
    """A new run has a new state directory and counts from one. A colluder kept an advert of the run before, and shows
    it to an honest coordinator as proof that its signer was set back.
    """
    run = evil(5, wide=False)
    core = run.machine().core
    run.open_round()
    plan = run.plan()
    context = replace(plan.context, run="last-year")
    begun = OpenAttempt.begin(core.signer, context, sequence=900, heads=AdvertisedLog(), randomness=run.randomness)
    kept = begun.advert
    proof = messages.Rollback(advert=kept)
    run.change(messages.Shares, lambda shares, site: [shares, proof], by=run.colluders[0])
    run.launch(plan)
    return run, proof


def test_an_advert_of_an_earlier_run_says_nothing() -> None:
    run, proof = an_advert_of_an_earlier_run()
    assert run.machine().state is SiteState.IDLE and run.machine().core.head.round == 1
    assert not run.book.excluded
    run.tell(VICTIM, proof)
    assert_refused(run, VICTIM, VerificationFailed, "check_own_advert_known")
    assert run.machine().state is SiteState.IDLE


def test_an_advert_of_an_earlier_run_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Did adverts not name their run, one colluder could have every site of a second run excluded and halted."""
    monkeypatch.setattr(statements, "advert", lambda scope, signed: Statement(labels.SIGN_ADVERT, (signed.body(),)))
    run, _ = an_advert_of_an_earlier_run()
    assert run.machine().state is SiteState.HALTED
    assert VICTIM in {effect.site for effect in run.noted["coordinator"] if isinstance(effect, Blamed)}


def test_a_gap_in_the_numbers_is_no_offence() -> None:
    run = evil(5, wide=False)
    run.machine(RESTORED).core.journal.sequence = 40
    assert run.run_round(run.updates(1)).total is not None


def test_a_listed_site_cannot_have_another_one_called_restored() -> None:
    """It shows an advert of the victim's from an earlier attempt: whoever goes on has signed later ones since."""
    run = evil(wide=False)
    run.run_round(run.updates(1))
    older = run.said(Advert, by=VICTIM)[0]
    run.open_round(2)
    run.lose(messages.Shares)
    attempt = run.launch(run.plan())
    newer = run.said(Advert, by=VICTIM)[-1]
    assert attempt.state is CoordinatorState.DEALING and newer.sequence > older.sequence
    for shown in (older, newer):
        with pytest.raises(VerificationFailed, match="no evidence against its signer"):
            attempt.receive(run.colluders[0], messages.Rollback(advert=shown))
    assert attempt.state is CoordinatorState.DEALING and not run.book.excluded
