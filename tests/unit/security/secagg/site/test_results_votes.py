"""Votes at a site: one on each result, through restarts; none without a look at the model; and whose votes count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lazaret.errors import ConfigError, VerificationFailed
from security.secagg import certificate_checks, statements
from security.secagg.certificates import Ack, CheckCertificate, Vote
from security.secagg.effects import Send
from security.secagg.fields import Wire
from security.secagg.messages import Jump, ResultCertificate
from security.secagg.site.journal import Journal
from security.secagg.site.machine import SiteMachine
from tests.support.secagg_world import RecordedFederation, federation, random_updates

FIRST = "site-00"


def voting(**votes: bool) -> tuple[RecordedFederation, list[Ack]]:
    """Four sites, and every acknowledgement that was sent."""
    run, said = federation(4, vote=lambda name, *_: votes.get(name.replace("-", "_"), True)), list[Ack]()

    def hook(_: str, __: str, message: Wire) -> list[Wire]:
        if isinstance(message, Ack):
            said.append(message)
        return [message]

    run.hook = hook
    return run, said


def one_round(run: RecordedFederation, number: int = 1) -> None:
    run.run_round(random_updates(run.policy.layout, run.sites, number))


def test_a_site_that_has_not_looked_does_not_vote() -> None:
    run, said = voting()
    run.vote = None
    one_round(run)
    assert not said
    machine = run.sites[FIRST].machine
    effects = machine.vote(machine.core.head.result, accept=False)
    (sent,) = [effect.message for effect in effects if isinstance(effect, Send)]
    assert isinstance(sent, Ack) and sent.vote == Vote.REFUSE
    assert machine.vote(machine.core.head.result, accept=True) == (), "said once"
    assert machine.vote(bytes(32), accept=True) == (), "of another result"


def test_a_vote_stays_through_a_restart() -> None:
    """The site has changed its mind meanwhile; two votes of one site would make two vote sets."""
    minds = iter([False, True, True])
    run, said = voting()
    run.vote = lambda name, *_: next(minds) if name == FIRST else True
    keep, run.hook = run.hook, lambda s, r, m: [] if isinstance(m, Ack) and not said.append(m) else [m]
    one_round(run)
    published = run.planned.attempts[-1].publication
    assert published is not None and keep is not None
    run.restart_site(FIRST)
    for message in (published.result, *published.sum_to(FIRST).frames()):
        run._send("coordinator", FIRST, message)
    run.pump()
    votes = [ack.vote for ack in said if ack.site == FIRST]
    assert len(votes) >= 2 and set(votes) == {Vote.REFUSE}


def test_a_restart_before_the_vote_asks_again() -> None:
    run, said = voting(site_01=False)
    vote, run.vote = run.vote, None
    one_round(run)
    published = run.planned.attempts[-1].publication
    assert published is not None and not said
    run.vote = vote
    run.restart_site("site-01")
    for message in (published.result, *published.sum_to("site-01").frames()):
        run._send("coordinator", "site-01", message)
    run.pump()
    for _ in range(4):  # the chunks that it checks come one after the other
        run.pump()
    assert {(ack.site, ack.vote) for ack in said} == {("site-01", Vote.REFUSE)}


def certified(run: RecordedFederation) -> tuple[CheckCertificate, dict[str, object]]:
    assert run.check is not None
    result = run.planned.attempts[-1].publication
    assert result is not None
    told = {"result": result.result_hash, "state_hash": result.result.state_hash, "quorum": result.result.context.t}
    return run.check, told


def test_a_site_takes_one_vote_set_on_a_result() -> None:
    """Another set of the same votes, or of two votes of one site, would be another link, or another outcome."""
    run, said = voting(site_03=False)
    one_round(run)
    core = run.sites[FIRST].machine.core
    taken = core.head
    accepting = tuple(sorted((ack for ack in said if ack.vote == Vote.ACCEPT), key=lambda ack: ack.site))
    other = CheckCertificate(acks=accepting)
    assert taken.certified and certificate_checks.link_after(run.policy, taken.result, other) != taken.link
    assert run.sites[FIRST].machine.receive(ResultCertificate(result=taken.result, check=other)) == ()
    assert core.head == taken


def test_whose_votes_count() -> None:
    run, _ = voting()
    one_round(run)
    check, told = certified(run)
    assert certificate_checks.check_certificate(run.policy, check, **told)  # type: ignore[arg-type]
    idle = next(ack for ack in check.acks if not any(ack.bitmap))  # without it the sum is still covered
    gone = frozenset({run.policy.entry(idle.site).cert})
    left = replace(run.policy, revoked=gone)
    with pytest.raises(VerificationFailed, match="not listed any more"):
        certificate_checks.check_certificate(left, check, **told)  # type: ignore[arg-type]
    plain = replace(run.policy, vote=False)
    with pytest.raises(VerificationFailed, match="without the vote that is due, or with one"):
        certificate_checks.check_certificate(plain, check, **told)  # type: ignore[arg-type]
    silent = replace(check.acks[0], vote=Vote.NONE)
    statement = statements.ack(silent.result, silent.state_hash, silent.bitmap)
    silent = replace(silent, signature=statements.Signer(silent.site, run.keys[silent.site]).sign(statement))
    changed = replace(check, acks=(silent, *check.acks[1:]))
    with pytest.raises(VerificationFailed, match="without the vote"):
        certificate_checks.check_certificate(run.policy, changed, **told)  # type: ignore[arg-type]
    turned = replace(check, acks=(replace(check.acks[0], vote=Vote.REFUSE), *check.acks[1:]))
    with pytest.raises(VerificationFailed, match="signature"):
        certificate_checks.check_certificate(run.policy, turned, **told)  # type: ignore[arg-type]


def test_nobody_jumps_to_a_state_that_was_voted_down() -> None:
    run, _ = voting(site_01=False, site_02=False)
    first = run.model
    one_round(run)
    check, _ = certified(run)
    published = run.planned.attempts[-1].publication
    assert published is not None
    late = SiteMachine(replace(run.sites[FIRST].machine.core, journal=Journal()), first)
    with pytest.raises(VerificationFailed, match="voted against"):
        late.receive(Jump(result=published.result, check=check))


def test_a_vote_needs_one_history_and_no_privacy() -> None:
    run, _ = voting()
    for changes in ({"strict": False}, {"single_history": False}, {"dp_active": True}):
        with pytest.raises(ConfigError, match="a vote needs"):
            replace(run.policy, **changes)  # type: ignore[arg-type]
