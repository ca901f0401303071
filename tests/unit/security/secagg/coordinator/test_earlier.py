"""What a coordinator keeps of an attempt after its round, and what it shows of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lazaret.errors import VerificationFailed
from security.crypto.signing import SigningKey
from security.identity.membership import AggregationPolicy
from security.rng import CountedRandomness
from security.secagg import messages, records, statements
from security.secagg.certificates import AbortCode
from security.secagg.coordinator import earlier
from security.secagg.coordinator.earlier import EarlierAttempt
from security.secagg.fields import Wire
from tests.support.secagg_world import RecordedFederation, federation, random_updates


def interrupted(kind: type[Wire], *, aborts: int = 4) -> tuple[RecordedFederation, EarlierAttempt]:
    """An attempt of four sites in which nobody is shown messages of this kind; so many sites abort it."""
    run = federation(4, c=1)
    refuse = list(run.sites)[aborts:]
    run.hook = lambda sender, _, said: (
        [] if isinstance(said, kind) or (sender in refuse and isinstance(said, messages.Abort)) else [said]
    )
    run.begin_round(random_updates(run.policy.layout, run.sites, 1))
    run.run_attempt(run.planned.next_attempt(list(run.sites)))
    run.hook = None
    (known,) = run.planned.known(run.policy.initial_state_hash)
    return run, known


def without(policy: AggregationPolicy, *names: str) -> AggregationPolicy:
    """A manifest under which these sites have other keys."""
    keys = {name: SigningKey.generate(CountedRandomness(name.encode())).verify_key for name in names}
    certs = {name: name.encode().ljust(32) for name in names}
    renewed = (replace(e, cert=certs[e.site], key=keys[e.site]) if e.site in names else e for e in policy.roster)
    return replace(policy, roster=tuple(renewed))


def test_aborts_settle_it_and_signatures_of_keys_that_have_changed_do_not_count() -> None:
    run, known = interrupted(messages.Deliver)
    assert known.settled(run.policy) and known.certified(run.policy) is None
    dead = known.aborted(without(run.policy, "site-01"))
    assert dead is not None and [line.site for line in dead.lines] == ["site-00", "site-02", "site-03"]
    assert known.aborted(without(run.policy, "site-01", "site-02")) is None
    assert earlier.sums(run.policy, [known]) == ()


def test_a_set_that_was_agreed_to_settles_it() -> None:
    run, known = interrupted(messages.Unmask, aborts=0)
    one = known.certified(run.policy)
    assert one is not None and known.aborted(run.policy) is None
    (listed,) = earlier.sums(run.policy, [known])
    assert (listed.round, listed.sites) == (1, tuple(run.sites))
    assert known.certified(without(run.policy, "site-01", "site-02")) is None


def test_it_is_shown_to_members_until_a_plan_with_it_was_taken() -> None:
    run, known = interrupted(messages.Deliver)
    (dead,), repeats = earlier.certificates(run.policy, [known], run.sites)
    assert dead.ctx == known.ctx and repeats == []
    assert earlier.certificates(run.policy, [known], ["another"]) == ([], [])
    members = replace(known.plan.context, attempt=2)
    later = EarlierAttempt(plan=replace(known.plan, context=members, aborts=(dead,)), kx=b"shown")
    assert earlier.certificates(run.policy, [known, later], run.sites) == ([], [])


@pytest.mark.parametrize("kind", [messages.Deliver, messages.Quorum, messages.Unmask])
def test_the_records_give_it_again(kind: type[Wire]) -> None:
    run, known = interrupted(kind, aborts=2)
    (again,) = EarlierAttempt.replay(r for r in run.coordinator_wal if not isinstance(r, records.DealShown))
    whole, known.agreements = known.agreements, {site: known.agreements[site] for site in again.agreements}
    assert len(again.agreements) in (0, known.context.t), "of a quorum, those that made it"
    assert replace(again, deals=b"") == replace(known, deals=b"") and again.agreements.items() <= whole.items()
    assert again.certified(run.policy) == known.certified(run.policy)
    assert EarlierAttempt.replay(run.coordinator_wal[:1]) == [], "nobody has dealt"


def test_a_late_abort_counts_if_the_site_has_signed_it() -> None:
    run, known = interrupted(messages.Deliver, aborts=2)
    assert not known.settled(run.policy)
    statement = statements.abort(known.ctx, AbortCode.REQUESTED)
    other, own = (run.sites[name].machine.core.signer.sign(statement) for name in ("site-03", "site-02"))
    forged = messages.Abort(site="site-02", ctx=known.ctx, code=AbortCode.REQUESTED, signature=other)
    with pytest.raises(VerificationFailed):
        known.take(run.policy, forged)
    signed = replace(forged, signature=own)
    assert len(known.take(run.policy, signed)) == 1 and known.settled(run.policy)
    assert known.take(run.policy, signed) == ()
    with pytest.raises(VerificationFailed, match="was not there"):
        known.take(run.policy, replace(signed, site="another"))


def test_a_site_whose_share_is_public_needs_one_abort_more() -> None:
    run, known = interrupted(messages.Deliver, aborts=3)
    assert all(known.frees(site, run.policy) for site in run.sites)
    known.public.add(("site-01", "site-00"))
    assert not known.frees("site-00", run.policy) and known.frees("site-01", run.policy)
    known.aborts.clear()
    assert known.frees("site-00", run.policy), "where there is no certificate of aborts, this is not the reason"
