"""A37: a listed site pulls the model where it is worse on the hospitals' own data. Where the manifest asks for a vote,
the model before it stands. The coordinator, on the attacker's side, shows fewer votes than there are, or two vote sets.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lazaret.errors import PolicyViolation, VerificationFailed
from security.crypto.prg import Words
from security.secagg import certificate_checks, fixed_point
from security.secagg import state as states
from security.secagg.certificates import Ack, CheckCertificate, Vote
from security.secagg.fields import Wire
from security.secagg.layout import Vector
from security.secagg.messages import Plan, ResultCertificate
from security.secagg.site import checks
from tests.support.secagg_world import RecordedFederation, federation

SITES = 5  # c = 1, a quorum is 4
ATTACKER, VICTIM = "site-04", "site-00"
GOAL = 0.5


def loss(state: Vector) -> float:
    """On every hospital's validation side: how far the model is from what they all want."""
    return float(np.abs(state - GOAL).mean())


def better(_: str, before: Vector, state: Vector) -> bool:
    return loss(state) <= loss(before) + 0.01


def updates(run: RecordedFederation, *, attacked: bool) -> dict[str, Words]:
    layout = run.policy.layout
    # Training is random: another update in each round, also on the same model.
    reach = 0.05 + 0.001 * run.round
    honest = np.clip(GOAL - run.model, -reach, reach).astype(np.float32)
    found = {name: fixed_point.encode(layout, honest, weight=8).words for name in run.sites}
    if attacked:
        away = np.where(run.model > GOAL, 1, -1).astype(np.float32)
        found[ATTACKER] = fixed_point.encode(layout, away, weight=layout.weight_cap).words
    return found


def poisoned() -> tuple[RecordedFederation, Vector]:
    run = federation(SITES, vote=better)
    run.run_round(updates(run, attacked=False))
    before = run.model
    run.run_round(updates(run, attacked=True))
    return run, before


def test_a_worse_model_is_voted_down() -> None:
    run, before = poisoned()
    assert np.array_equal(run.model, before), "the attacker accepts it; the others are more"
    heads = {(site.machine.core.head.link, site.machine.core.head.state_hash) for site in run.sites.values()}
    assert heads == {(run.prev_result, states.state_hash(before))}
    # It counts as one more update on a model that did not change, like a void sum.
    assert {len(site.machine.core.journal.uploaded) for site in run.sites.values()} == {1}
    run.run_round(updates(run, attacked=False))
    assert loss(run.model) < loss(before) and not any(site.errors for site in run.sites.values())
    run.check_promises()


def test_a_worse_model_is_voted_down_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate_checks, "accepted", lambda *_: True)
    run, before = poisoned()
    assert loss(run.model) > loss(before) + 0.1


def test_votes_against_a_model_use_up_the_permitted_updates() -> None:
    """Nobody is asked for ever more updates on one model."""
    run = federation(SITES, vote=lambda *_: False)
    for _ in range(6):
        assert run.run_round(updates(run, attacked=False)).total is not None
    assert run.run_round(updates(run, attacked=False)).total is None
    assert all("which did not change" in str(site.errors[-1]) for site in run.sites.values())


# The coordinator decides which votes it shows.


def with_votes(votes: dict[str, bool], free: set[str], forge: dict[str, tuple[str, ...]]) -> RecordedFederation:
    """One round with these votes. Who is in `forge` is shown another vote set, of the sites named there.

    :param free: sites that must have no chunk to check, so that a set without them still covers the sum.
    """
    for seed in range(60):
        run = federation(SITES, seed=b"%d" % seed, vote=lambda name, *_: votes.get(name, True))
        seen: dict[str, Ack] = {}

        def hook(sender: str, receiver: str, message: Wire, seen: dict[str, Ack] = seen) -> list[Wire]:
            if isinstance(message, Ack):
                seen[sender] = message
            if isinstance(message, ResultCertificate) and receiver in forge:
                shown = CheckCertificate(acks=tuple(seen[name] for name in forge[receiver]))
                return [replace(message, check=shown)]
            return [message]

        run.hook = hook
        run.run_round(updates(run, attacked=False))
        if not any(any(seen[name].bitmap) for name in free):
            return run
    pytest.fail("some chunk was always theirs")


def test_fewer_votes_than_a_quorum_decide_nothing() -> None:
    """Two honest sites refuse. The coordinator leaves their votes out."""
    votes = {"site-02": False, "site-03": False}
    run = with_votes(votes, set(votes), {VICTIM: (VICTIM, "site-01", ATTACKER)})
    victim = run.sites[VICTIM]
    assert isinstance(victim.errors[-1], VerificationFailed) and "fewer than the quorum" in str(victim.errors[-1])
    assert not victim.machine.core.head.certified


def test_fewer_votes_than_a_quorum_decide_nothing_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate_checks, "check_vote_count", lambda *_: None)
    monkeypatch.setattr(certificate_checks, "accepted", lambda acks, _: all(a.vote == Vote.ACCEPT for a in acks))
    votes = {"site-02": False, "site-03": False}
    run = with_votes(votes, set(votes), {VICTIM: (VICTIM, "site-01", ATTACKER)})
    assert run.sites[VICTIM].machine.core.head.certified


TWO_SETS = ("site-01", "site-02", "site-03", ATTACKER)


def two_sets() -> tuple[RecordedFederation, Plan]:
    """Four accept, and one of the other four refuses: both sets have a quorum of votes, with another outcome."""
    run = with_votes({ATTACKER: False}, {VICTIM, ATTACKER}, {VICTIM: TWO_SETS})
    victim = run.sites[VICTIM].machine.core.head
    assert victim.certified and victim.link != run.prev_result and victim.state_hash != states.state_hash(run.model)
    run.hook = None
    found = updates(run, attacked=False)
    del found[VICTIM]
    run.begin_round(found)
    return run, run.planned.next_attempt([*found]).plan


def test_two_vote_sets_do_not_come_together() -> None:
    """The next context names one of them. A site that has taken the other joins no round on it."""
    run, plan = two_sets()
    machine = run.sites[VICTIM].machine
    with pytest.raises(PolicyViolation, match="follows another result"):
        checks.check_plan_history(machine.core.head, plan.context)
    run.run_attempt(run.planned.attempts[-1])
    assert not any(site.errors for name, site in run.sites.items() if name != VICTIM), "the others go on"


def test_two_vote_sets_do_not_come_together_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the context named the result alone, the victim could not tell."""
    monkeypatch.setattr(certificate_checks, "link_after", lambda _, result, __: result)
    run = with_votes({ATTACKER: False}, {VICTIM, ATTACKER}, {VICTIM: TWO_SETS})
    victim = run.sites[VICTIM].machine.core.head
    assert victim.link == run.prev_result and victim.state_hash != states.state_hash(run.model)
