"""A34: whoever records the traffic breaks one of the two key agreements later, or has a weaker one used today.

A mask key needs X25519 and ML-KEM-768, and the suite is part of the context. A listed site could seal another secret
for a later member than its advert names: it is accused, or, if that member has dropped out, convicted by a proof.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from lazaret.errors import PolicyViolation, VerificationFailed
from protos.loopback import Drop
from security.crypto import key_agreement
from security.crypto.key_agreement import HybridPair, KeyPair
from security.secagg import certificate_checks, messages, statements
from security.secagg.certificates import PairFraud
from security.secagg.context import SumVerdict
from security.secagg.coordinator.rounds import repeat_certificate
from security.secagg.site import checks
from security.secagg.site.attempt import deal_root
from security.secrets import Secret
from tests.support.evil import VICTIM, EvilCoordinator, assert_recovered, assert_refused, assert_safe, evil
from tests.support.secagg_world import federation, random_updates, reference_sum


def recorded() -> EvilCoordinator:
    """One round, of which the attacker has all traffic. Then it learns every X25519 secret, and no ML-KEM secret."""
    run = evil()
    scalars: dict[bytes, Secret] = {}

    def note(message: messages.Deliver, site: str) -> messages.Deliver:
        attempt = run.machine(site).aggregation.attempt
        assert attempt is not None
        scalars[attempt.mask_pair.public] = attempt.mask_pair.scalar
        return message

    for name in run.honest:
        run.change(messages.Deliver, note, to=name)
    run.open_round()
    run.launch(run.plan())
    run.spoils.pairs |= {public: HybridPair(scalar, Secret(bytes(64))) for public, scalar in scalars.items()}
    return run


def test_a_broken_x25519_alone_opens_nothing() -> None:
    run = recorded()
    assert_safe(run)


def test_a_broken_x25519_alone_opens_nothing_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the secrets of the pairs in the mask keys, everything that was recorded opens."""
    whole = key_agreement.mask_key

    def classical(own: KeyPair, peer: bytes, pair: Secret, **named: Any) -> Secret:
        return whole(own, peer, Secret(bytes(32)), **named)

    monkeypatch.setattr(key_agreement, "mask_key", classical)
    run = recorded()
    monkeypatch.setattr(run.spoils, "_added", lambda *_: Secret(bytes(32)))
    assert_recovered(run)


def test_another_suite_is_refused() -> None:
    run = evil(wide=False)
    run.open_round()
    run.launch(run.plan(suite="x25519"))
    assert_refused(run, VICTIM, PolicyViolation, "check_plan_federation")
    assert not run.said(messages.UploadFrame)


def test_another_suite_is_refused_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even then the masks of sites that were told different suites would not cancel: the suite is in the context."""
    monkeypatch.setattr(checks, "check_plan_federation", lambda *_: None)
    run = evil(wide=False)
    run.open_round()
    plan = run.plan(suite="x25519")
    assert run.tell(VICTIM, plan) and plan.context.ctx() != run.plan().context.ctx()


# A listed site seals another secret than its advert names.

LIAR = "site-00"


def spoil_pair(run: EvilCoordinator, holder: str) -> None:
    def spoil(message: messages.Shares, site: str) -> messages.Shares:
        attempt = run.machine(site).aggregation.attempt
        assert attempt is not None
        at = attempt.context.position(holder) - 1
        peer = attempt.adverts[at]
        ends = {"source": site, "destination": holder}
        wrong = key_agreement.seal_pair(peer.mask_kem, Secret(bytes(32)), kx=message.kx, rng=run.randomness, **ends)
        lines = list(message.shares)
        lines[at] = replace(lines[at], pair=wrong)
        root = attempt.own_root = deal_root(message.kx, site, attempt.adverts, lines)
        signature = run.machine(site).core.signer.sign(statements.deal(message.kx, root))
        return replace(message, shares=tuple(lines), signature=signature)

    run.change(messages.Shares, spoil, by=LIAR)


def test_a_wrong_secret_of_a_pair_is_disputed_like_a_bad_box() -> None:
    run = evil(5, c=1, wide=False)
    spoil_pair(run, "site-02")
    updates = run.updates(1)
    outcome = run.run_round(updates)
    assert outcome.attempts == 1 and outcome.survivors == tuple(run.sites)
    assert run.book.accusations == {("site-02", LIAR)}
    (shown,) = run.said(messages.Disclosure)
    assert len(shown.pair) == 32 and outcome.total is not None
    assert outcome.total.tolist() == reference_sum(run.policy.layout, updates, outcome.survivors)


def lost_holder() -> tuple[EvilCoordinator, Any]:
    """The member that would have accused the liar drops out before it sees its box."""
    run = evil(6, c=1, wide=False)
    spoil_pair(run, "site-02")
    run.lose(messages.Deliver, to="site-02")
    updates = run.updates(1)
    outcome = run.run_round(updates)
    return run, outcome


def test_a_wrong_secret_for_a_dropout_is_proven_and_the_sum_is_saved() -> None:
    run, outcome = lost_holder()
    assert run.book.excluded == {LIAR: "fraud"}
    assert outcome.attempts == 2 and outcome.verdict is SumVerdict.GOOD
    assert outcome.survivors == ("site-01", "site-03", "site-04", "site-05")
    run.check_promises()


def test_a_wrong_secret_for_a_dropout_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the opened secret not held against the advert, the sum would be noise and nobody named."""
    monkeypatch.setattr(certificate_checks, "pair_opens", lambda *_: True)
    run, outcome = lost_holder()
    assert not run.book.excluded and outcome.verdict is not SumVerdict.GOOD


def test_no_honest_dealer_can_be_convicted_of_a_wrong_secret() -> None:
    run, _ = lost_holder()
    attempt = run.planned.attempts[0]
    assert attempt.opening is not None
    (proof,) = attempt.opening.pair_frauds
    certificate_checks.check_pair_fraud(run.policy, attempt.context, proof)
    honest, later = (
        PairFraud(
            advert=attempt.dealing.adverts[dealer],
            kx=proof.kx,
            root=attempt.dealing.roots[dealer],
            deal_signature=attempt.dealing.shares[dealer].signature,
            seed=proof.seed,
            line=attempt.opening._line(dealer, "site-02"),
        )
        for dealer in ("site-01", "site-03")
    )
    for claim in (
        honest,
        later,  # it owes an earlier member nothing, so that there is no box that could open
        replace(proof, seed=bytes(32)),
        replace(proof, line=replace(proof.line, pair=bytes(key_agreement.PAIR_BYTES))),
        replace(proof, line=replace(proof.line, kem_key=bytes(1184))),
        replace(proof, line=attempt.opening._line(LIAR, LIAR)),
        replace(proof, root=bytes(32)),
        replace(honest, line=replace(honest.line, holder="site-00")),
    ):
        with pytest.raises(VerificationFailed):
            certificate_checks.check_pair_fraud(run.policy, attempt.context, claim)
    certificate = repeat_certificate(attempt)
    assert certificate is not None and certificate.cheats == {LIAR}
    certificate_checks.check_repeat_certificate(run.policy, attempt.context, certificate)
    elsewhere = replace(certificate, pair_frauds=(replace(proof, kx=bytes(32)),))
    with pytest.raises(VerificationFailed, match="of another attempt"):
        certificate_checks.check_repeat_certificate(run.policy, attempt.context, elsewhere)


@pytest.mark.parametrize(("n", "c"), [(4, 1), (5, 1), (6, 1), (7, 2)])
def test_every_allowed_set_of_dropouts_is_recovered(n: int, c: int) -> None:
    """Encapsulators and receivers, first and last: the sum is exact whoever is lost."""
    names = [f"site-{at:02d}" for at in range(n)]
    most = n - federation(n, c=c).policy.thresholds(n).t
    for lost in [set(gone) for count in range(most + 1) for gone in combinations(names, count)]:
        run = federation(n, c=c)
        updates = random_updates(run.policy.layout, run.sites, 1)
        outcome = run.run_round(updates, drops={name: Drop(messages.UploadHeader) for name in lost})
        assert set(outcome.survivors) == set(names) - lost and outcome.total is not None
        assert outcome.total.tolist() == reference_sum(run.policy.layout, updates, outcome.survivors)
