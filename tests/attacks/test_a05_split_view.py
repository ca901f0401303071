"""A5: two sets of survivors, each shown to half of the sites, to have a victim's seed from one half and its key from
the other. Two quorums of a legal size share an honest site, and an honest site agrees once.

Every reachable state of one attempt is explored in tests/property/test_secagg_exploration.py.
"""

from __future__ import annotations

import pytest

from lazaret.errors import PolicyViolation, RemoteProtocolError, VerificationFailed
from security.secagg import context as hashes
from security.secagg import messages, statements
from security.secagg.certificates import Signed
from security.secagg.site import checks
from security.secagg.site.attempt import unmask_message
from tests.support.evil import VICTIM, EvilCoordinator, assert_recovered, assert_refused, assert_safe, evil

HALVES = {"with": ("site-00", "site-01"), "without": ("site-02", "site-03")}


def two_views(run: EvilCoordinator) -> None:
    """site-04 colludes: it agrees to both sets and gives what it has for both."""
    run.lose(messages.Survivors)
    run.open_round()
    attempt = run.launch(run.plan())
    everyone = attempt.survivors
    if everyone is None:
        return
    kx, deals = attempt.dealing.kx, attempt.dealing.deals
    run.deaf, run.rules = True, []
    kept = run.machine("site-04").aggregation.attempt
    assert kept is not None
    for half, members in HALVES.items():
        uploads = tuple(line for line in everyone.uploads if half == "with" or line.site != VICTIM)
        survivors = hashes.survivors_digest(kx, deals, [(line.site, line.root) for line in uploads])
        shown = messages.Survivors(kx=kx, uploads=uploads)
        signed = [said for said in run.tell_all(shown, members) if isinstance(said, messages.Agree)]
        lines = [Signed(site=said.site, signature=said.signature) for said in signed]
        lines.append(Signed(site="site-04", signature=run.signer("site-04").sign(statements.agree(kx, survivors))))
        run.tell_all(messages.Quorum(kx=kx, survivors=survivors, agreements=tuple(lines)), members)
        reply = kept.reply([line.site for line in uploads])
        run.spoils.hear("site-04", unmask_message(run.signer("site-04"), kx, survivors, reply))


def test_neither_half_has_a_quorum() -> None:
    run = evil(5)
    two_views(run)
    for name in run.honest:
        assert_refused(run, name, VerificationFailed, "check_quorum")
    assert not run.said(messages.Unmask), "no share has left an honest site"
    assert_safe(run)


def test_a_smaller_quorum_in_the_plan_is_refused() -> None:
    run = evil(5)
    run.lenient(c=0)
    two_views(run)
    assert_refused(run, VICTIM, PolicyViolation, "check_plan_thresholds")
    assert_safe(run)


def test_two_quorums_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """t = 3 of 5 as if nobody colluded: both sets are certified, and the victim's seed and key are both opened."""
    monkeypatch.setattr(checks, "check_plan_thresholds", lambda *_: None)
    run = evil(5)
    run.lenient(c=0)
    two_views(run)
    assert_recovered(run)


@pytest.mark.parametrize("padding", ["the colluder twice", "a stranger", "an honest name"])
def test_agreements_are_counted_by_member(padding: str) -> None:
    """Three signatures do not become a quorum of four by repeating or inventing one."""
    run = evil(5, wide=False)
    two_views(run)
    site = run.machine("site-00")
    memory = next(iter(site.core.journal.attempts.values()))
    assert memory.agreed is not None and memory.kx is not None
    statement = statements.agree(memory.kx, memory.agreed.survivors)
    mine = run.signer("site-04").sign(statement)
    agree = [
        Signed(site=said.site, signature=said.signature) for said in run.said(messages.Agree) if said.site < "site-02"
    ]
    name = {"the colluder twice": "site-04", "a stranger": "zz", "an honest name": "site-03"}[padding]
    lines = (*agree, Signed(site="site-04", signature=mine), Signed(site=name, signature=mine))
    quorum = messages.Quorum(kx=memory.kx, survivors=memory.agreed.survivors, agreements=lines)
    with pytest.raises(RemoteProtocolError):
        site.receive(quorum)
    run.check_promises()
