"""What members were shown of an earlier attempt stays so: they have recorded it, and ask for it in each later plan."""

from __future__ import annotations

from security.secagg import messages, statements
from security.secagg.certificates import AbortCode
from security.secagg.coordinator import earlier
from security.secagg.coordinator.earlier import EarlierAttempt
from security.secagg.coordinator.recovery import restore_round
from tests.support.secagg_world import RecordedFederation, federation, random_updates

RELEASED, LIAR = "site-00", "site-03"


def race() -> RecordedFederation:
    """The race of section 8: all agree, one site releases, and the lines of two break. They abort when they are back,
    and the fourth, which has said nothing, does so only when its abort makes the certificate whole."""
    run = federation(4, c=1)
    run.hook = lambda sender, receiver, said: (
        []
        if (isinstance(said, messages.Quorum) and receiver != RELEASED)
        or (sender in (LIAR, RELEASED) and isinstance(said, messages.Abort))
        else [said]
    )
    run.begin_round(random_updates(run.policy.layout, run.sites, 1))
    run.run_attempt(run.planned.next_attempt(list(run.sites)))
    return run


def late_abort(run: RecordedFederation) -> None:
    (first, *_) = run.planned.attempts
    signature = run.sites[LIAR].machine.core.signer.sign(statements.abort(first.ctx, AbortCode.REQUESTED))
    abort = messages.Abort(site=LIAR, ctx=first.ctx, code=AbortCode.REQUESTED, signature=signature)
    run._do_coordinator(run.planned.receive(LIAR, abort))
    run.pump()


def test_a_set_that_was_shown_is_listed_although_its_attempt_is_aborted_later() -> None:
    run = race()
    (first,) = run.planned.attempts
    then = EarlierAttempt.of(first)
    assert len(first.aborts) == 2 and then.certified(run.policy) is not None and then.aborted(run.policy) is None
    # All but the liar join the repeat, and know the set from its certificate.
    run.hook = lambda sender, _, said: [] if sender == LIAR and isinstance(said, messages.Advert) else [said]
    again = run.planned.next_attempt(list(run.sites))
    run.run_attempt(again)
    assert not again.dealing.kx, "nobody has dealt"
    late_abort(run)
    assert EarlierAttempt.of(first).aborted(run.policy) is not None
    run.hook = None
    known = run.planned.known(run.policy.initial_state_hash)
    again_known = EarlierAttempt.replay(run.coordinator_wal)
    for found in (known, again_known):
        assert [one.sites for one in earlier.sums(run.policy, found)] == [tuple(run.sites)]
        assert [one.ctx for one in earlier.certificates(run.policy, found, run.sites)[0]] == [first.ctx]
    assert run.run_round(random_updates(run.policy.layout, run.sites, 2)).total is not None
    assert not any("leaves out" in str(error) for site in run.sites.values() for error in site.errors)


def test_a_set_that_one_site_has_released_and_the_others_have_aborted_is_asked_for_no_longer() -> None:
    run = race()
    late_abort(run)
    run.hook = None
    (seen,) = run.sites[RELEASED].machine.core.journal.sums
    assert seen.sites == tuple(run.sites) and any(seen.ctx)
    assert run.run_round(random_updates(run.policy.layout, run.sites, 2)).total is not None
    assert seen not in run.sites[RELEASED].machine.core.journal.sums


def test_an_abort_counts_for_its_attempt_also_if_another_had_begun_when_it_came() -> None:
    """After a restart a certificate with a line of another attempt would be refused by all, for as long as the model
    stands."""
    run = race()
    run.hook = lambda sender, _, said: [] if sender == LIAR and isinstance(said, messages.Shares) else [said]
    run.run_attempt(run.planned.next_attempt(list(run.sites)))
    late_abort(run)
    restored = restore_round(run.core, run.book, run.coordinator_wal, lambda _: run.model, load_check=lambda _: None)
    assert restored is not None
    for first, second in (EarlierAttempt.replay(run.coordinator_wal), restored.attempts):
        assert set(first.aborts) == {"site-01", "site-02", LIAR}
        assert second.aborts and all(abort.ctx == second.ctx for abort in second.aborts.values())


def test_a_plan_that_listed_nothing_and_was_not_followed_counts_for_nothing() -> None:
    run = federation(4, c=1)
    run.hook = lambda sender, _, said: [] if sender == LIAR and isinstance(said, messages.Advert) else [said]
    run.begin_round(random_updates(run.policy.layout, run.sites, 1))
    run.run_attempt(run.planned.next_attempt(list(run.sites)))
    assert run.planned.known(run.policy.initial_state_hash) == [] == EarlierAttempt.replay(run.coordinator_wal)
