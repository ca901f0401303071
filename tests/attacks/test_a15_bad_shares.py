"""A15: a colluder sends wrong shares, deals shares of something else, or deals two lists, to spoil rounds and to have
honest sites blamed for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lazaret.errors import VerificationFailed
from protos.loopback import COORDINATOR
from security.crypto import shamir
from security.secagg import certificate_checks, messages, statements
from security.secagg import context as hashes
from security.secagg.context import SumVerdict
from security.secagg.coordinator.uploads import CoordinatorCore, Dealing
from security.secagg.messages import Shares
from security.secrets import Secret
from tests.support.evil import EvilCoordinator, assert_refused, evil
from tests.support.secagg_world import reference_sum

LIAR = "site-06"


def spoiled(**options: Any) -> EvilCoordinator:
    """Seven sites, of which the last two collude; here the coordinator is the honest one."""
    return evil(7, colluders=2, c=2, wide=False, **options)


def wrong_shares() -> tuple[EvilCoordinator, Any, Any]:
    """The liar's answer comes among the first t, and two honest ones after it."""
    run = spoiled()
    held: list[tuple[str, messages.Unmask]] = []
    lied: list[bool] = []

    def lie(message: messages.Unmask, site: str) -> messages.Unmask:
        lied.append(True)
        for late, answer in held:
            run._send(late, COORDINATOR, answer)
        shares = (bytes(32), *message.shares[1:])
        statement = statements.unmask(message.kx, message.survivors, shares)
        return replace(message, shares=shares, signature=run.signer(LIAR).sign(statement))

    def later(message: messages.Unmask, site: str) -> messages.Unmask | None:
        if lied:
            return message
        held.append((site, message))
        return None

    run.change(messages.Unmask, lie, by=LIAR)
    run.change(messages.Unmask, later, by="site-00")
    run.change(messages.Unmask, later, by="site-01")
    updates = run.updates(1)
    return run, updates, run.run_round(updates)


def test_a_wrong_share_is_its_senders() -> None:
    run, updates, outcome = wrong_shares()
    assert run.book.excluded == {LIAR: "wrong share"}
    assert outcome.attempts == 1 and outcome.total is not None
    assert outcome.total.tolist() == reference_sum(run.policy.layout, updates, outcome.survivors)
    run.check_promises()


def test_a_wrong_share_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unchecked, it makes the dealer look like the cheat: an honest site is excluded for fraud."""
    monkeypatch.setattr(certificate_checks, "check_share_hash", lambda *_args, **_named: None)
    run, _, _ = wrong_shares()
    assert run.book.excluded == {"site-00": "fraud"}


def wrong_dealing(monkeypatch: pytest.MonkeyPatch) -> tuple[EvilCoordinator, Any, Any]:
    """The liar deals shares of another seed than it committed to, rightly listed, signed and boxed."""
    run = spoiled()
    split = shamir.split

    def cheat(secret: Secret, **options: Any) -> tuple[Secret, ...]:
        attempt = run.machine(LIAR).aggregation.attempt
        if attempt is not None and secret is attempt.seed:
            secret = Secret(bytes(32))
        return split(secret, **options)

    monkeypatch.setattr(shamir, "split", cheat)
    updates = run.updates(1)
    return run, updates, run.run_round(updates)


def test_a_cheating_dealer_is_proven_and_the_sum_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    run, updates, outcome = wrong_dealing(monkeypatch)
    assert run.book.excluded == {LIAR: "fraud"}
    assert outcome.attempts == 2 and outcome.total is not None
    assert LIAR not in outcome.survivors
    assert outcome.total.tolist() == reference_sum(run.policy.layout, updates, outcome.survivors)
    run.check_promises()


def test_a_cheating_dealer_is_proven_from_lists_that_are_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator keeps no boxes once all have uploaded; the proof against a dealer has them."""
    kept: dict[bytes, tuple[Shares, ...]] = {}
    asked: list[bytes] = []
    fix, begin = Dealing.fix_shares, CoordinatorCore.__init__

    def keep(self: Dealing, ordered: tuple[Shares, ...]) -> None:
        kept[self.kx] = ordered
        fix(self, ordered)

    def load(number: int, kx: bytes) -> tuple[Shares, ...]:
        asked.append(kx)
        return kept[kx]

    monkeypatch.setattr(Dealing, "fix_shares", keep)
    monkeypatch.setattr(CoordinatorCore, "__init__", lambda self, **given: begin(self, **given, load_deals=load))
    run, updates, outcome = wrong_dealing(monkeypatch)
    assert len(asked) == 1 and run.book.excluded == {LIAR: "fraud"}
    assert outcome.total is not None
    assert outcome.total.tolist() == reference_sum(run.policy.layout, updates, outcome.survivors)
    away = run.planned.attempts[-1].dealing.shares.values()
    assert not any(line.box or line.pair for shares in away for line in shares.shares)


def test_a_cheating_dealer_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were an opened secret not held against its commitment, the sum would be noise and nobody named."""
    monkeypatch.setattr(certificate_checks, "opens", lambda *_args, **_named: True)
    run, updates, outcome = wrong_dealing(monkeypatch)
    assert outcome.verdict is SumVerdict.VOID and not run.book.excluded
    assert outcome.total is not None
    assert outcome.total.tolist() != reference_sum(run.policy.layout, updates, outcome.survivors)


def test_no_honest_dealer_can_be_convicted() -> None:
    run = spoiled()
    run.run_round(run.updates(1))
    attempt = run.planned.attempts[0]
    assert attempt.opening is not None
    holders = sorted(attempt.opening.replies)[: attempt.context.t]
    proof = attempt.opening._proof("site-00", holders, attempt.opening._kind("site-00"))
    bent = replace(proof, shares=(replace(proof.shares[0], share=bytes(32)), *proof.shares[1:]))
    for claim in (proof, bent, replace(proof, shares=proof.shares[1:]), replace(proof, root=bytes(32))):
        with pytest.raises(Exception, match=r"give the dealer's secret|not the one|needed|verify"):
            certificate_checks.check_fraud_proof(run.policy, attempt.context, claim)


SECOND = ("site-03", "site-04")


def two_lists() -> EvilCoordinator:
    """The liar deals twice, both times rightly; the coordinator hands boxes of the second list to two honest sites."""
    run = spoiled()
    second: list[Shares] = []

    def deal_again(message: Shares, site: str) -> Shares:
        attempt = run.machine(LIAR).aggregation.attempt
        assert attempt is not None
        first = attempt.own_root, dict(attempt.held)
        second.append(attempt.deal(run.randomness))
        attempt.own_root, attempt.held = first
        return message

    def other_list(message: messages.Deliver, site: str) -> messages.Deliver:
        attempt = run.planned.attempts[-1]
        dealing = Dealing(run.policy, attempt.context)
        dealing.fix_adverts(attempt.dealing.shown())
        lists = attempt.dealing.shares | {LIAR: second[-1]}
        dealing.fix_shares(tuple(lists[name] for name in attempt.context.sites))
        return dealing.deliver_to(site)

    run.change(Shares, deal_again, by=LIAR)
    for name in SECOND:
        run.change(messages.Deliver, other_list, to=name)
    run.open_round()
    attempt = run.planned.next_attempt(list(run.sites))
    run.run_attempt(attempt)
    return run


def test_two_lists_are_caught_before_anyone_agrees_to_both() -> None:
    run = two_lists()
    assert len({said.deals for said in run.said(messages.UploadHeader)}) == 2
    for name in SECOND:
        assert_refused(run, name, VerificationFailed, "check_upload_roots")
    assert not {said.site for said in run.said(messages.Agree)} & set(SECOND)
    assert not run.book.excluded, "nobody honest is blamed"
    run.check_promises()


def test_two_lists_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the lists no part of what uploads sign, honest holders of the second list would be convicted of lying."""
    monkeypatch.setattr(hashes, "deals_digest", lambda kx, roots: hashes.digest(b"unbound", kx))
    run = two_lists()
    assert run.book.excluded == dict.fromkeys(SECOND, "wrong share")
