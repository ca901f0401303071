"""Proofs of fraud convict a dealer by one attempt alone: pieces of two attempts put together convict nobody."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lazaret.errors import VerificationFailed
from security.secagg import certificate_checks
from security.secagg.certificates import FraudProof, NamedRoot, Opened, RepeatCertificate
from security.secagg.coordinator.attempt import CoordinatorAttempt
from tests.support.secagg_world import RecordedFederation, federation, random_updates

DEALER = "site-00"


def two_attempts() -> tuple[RecordedFederation, list[CoordinatorAttempt]]:
    """Two honest rounds, with every share that was released in them."""
    run, attempts = federation(4), []
    for seed in (1, 2):
        run.run_round(random_updates(run.policy.layout, run.sites, seed))
        attempts.append(run.planned.attempts[-1])
    return run, attempts


def claimed(attempt: CoordinatorAttempt) -> FraudProof:
    """What a coordinator would send if the honest dealer's shares did not fit."""
    assert attempt.opening is not None
    holders = sorted(attempt.opening.replies)[: attempt.context.t]
    return attempt.opening._proof(DEALER, holders, Opened.SEED)


def repeat_of(attempt: CoordinatorAttempt, proof: FraudProof) -> RepeatCertificate:
    assert attempt.survivors is not None and attempt.quorum is not None
    roots = tuple(NamedRoot(site=line.site, root=line.root) for line in attempt.survivors.uploads)
    return RepeatCertificate(
        ctx=attempt.ctx,
        kx=attempt.dealing.kx,
        deals=attempt.dealing.deals,
        roots=roots,
        agreements=attempt.quorum.agreements,
        frauds=(proof,),
        pair_frauds=(),
    )


def check(run: Any, attempt: CoordinatorAttempt, proof: FraudProof) -> None:
    certificate_checks.check_repeat_certificate(run.policy, attempt.context, repeat_of(attempt, proof))


def test_an_honest_dealer_is_not_convicted_by_its_own_shares() -> None:
    run, (first, _) = two_attempts()
    with pytest.raises(VerificationFailed, match="do give the dealer's secret"):
        check(run, first, claimed(first))


def test_shares_of_another_attempt_prove_nothing() -> None:
    run, (first, second) = two_attempts()
    mixed = replace(claimed(second), advert=claimed(first).advert)
    with pytest.raises(VerificationFailed, match="fraud proof is of another attempt"):
        check(run, first, mixed)


def test_an_advert_of_another_attempt_proves_nothing() -> None:
    run, (first, second) = two_attempts()
    mixed = replace(claimed(first), advert=claimed(second).advert)
    with pytest.raises(VerificationFailed, match="advert is of another attempt"):
        check(run, first, mixed)


def test_a_share_that_was_not_dealt_proves_nothing() -> None:
    run, (first, _) = two_attempts()
    proof = claimed(first)
    wrong = replace(proof.shares[0], share=bytes(32))
    with pytest.raises(VerificationFailed, match="not the one that was dealt"):
        check(run, first, replace(proof, shares=(wrong, *proof.shares[1:])))


def test_a_share_that_counts_twice_proves_nothing() -> None:
    run, (first, _) = two_attempts()
    proof = claimed(first)
    with pytest.raises(VerificationFailed, match="not distinct members"):
        check(run, first, replace(proof, shares=(proof.shares[0],) * len(proof.shares)))
