"""Proofs of fraud convict a dealer by one attempt alone: pieces of two attempts put together convict nobody.

Acknowledgements and opened secrets are of what they are shown for.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from lazaret.errors import VerificationFailed
from security.identity.membership import AuditMode
from security.secagg import certificate_checks
from security.secagg.certificates import FraudProof, NamedRoot, Opened, RepeatCertificate
from security.secagg.coordinator.attempt import CoordinatorAttempt
from security.secrets import Secret
from tests.support.evil import evil
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


# Acknowledgements.


def test_a_bitmap_has_one_bit_for_each_chunk_and_no_other() -> None:
    assert certificate_checks.chunks_in(b"\x1f", 5) == set(range(5))
    for wrong in (b"\x3f", b"\x1f\x00", b""):
        with pytest.raises(VerificationFailed, match="does not fit"):
            certificate_checks.chunks_in(wrong, 5)


def test_an_acknowledgement_is_of_this_result_and_of_this_model() -> None:
    run, attempts = two_attempts()
    publication = attempts[-1].publication
    assert publication is not None
    ack = next(iter(publication.acks.values()))
    named = {"result": ack.result, "state_hash": ack.state_hash}
    certificate_checks.check_ack(run.policy, ack, **named)
    for other in ("result", "state_hash"):
        with pytest.raises(VerificationFailed, match="of another result"):
            certificate_checks.check_ack(run.policy, ack, **named | {other: bytes(32)})


def test_a_sampled_sum_needs_a_quorum_of_acknowledgements() -> None:
    policy = replace(federation(4).policy, audit=AuditMode.SAMPLED)
    seen: list[tuple[str, set[int]]] = [("site-00", set()), ("site-01", set())]
    assert not certificate_checks.covers(policy, seen, quorum=3)
    assert certificate_checks.covers(policy, [*seen, ("site-02", set())], quorum=3)


@pytest.mark.parametrize("site", ["site-00", "site-03"])
def test_a_seed_of_mask_keys_is_the_one_behind_the_keys(site: str) -> None:
    """Also of the last member, which has no secrets of pairs that would tell."""
    run = evil(wide=False)
    run.open_round()
    run.deaf = True
    run.launch(run.plan())
    attempt = run.machine(site).aggregation.attempt
    assert attempt is not None
    opens = partial(certificate_checks.opens, attempt.context, Opened.MASK_KEY)
    assert opens(attempt.mask_seed, attempt.advert) and not opens(Secret(bytes(32)), attempt.advert)
