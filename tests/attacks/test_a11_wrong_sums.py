"""A11: a published sum that is not the sum of the uploads: one coordinate changed, a site doubled, or a fork.

An alarm would have to pass the coordinator, who drops it. Hence the other way round: no aggregation without a
certificate that every chunk was added up again by more than c sites.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lazaret.errors import PolicyViolation, RemoteProtocolError, VerificationFailed
from protos import loopback
from security.crypto import masking
from security.crypto.prg import Words
from security.crypto.ring import DEFAULT_BITS, Ring
from security.identity.membership import AuditMode
from security.rng import CountedRandomness
from security.secagg import certificate_checks, messages, published, statements
from security.secagg import state as states
from security.secagg.certificates import Ack, CheckCertificate
from security.secagg.coordinator.attempt import CoordinatorAttempt
from security.secagg.coordinator.publication import Publication, build_result
from security.secagg.site import checks, result_checks
from security.secagg.site.result_checks import CheckedHeader, assigned_chunks
from security.secagg.site.results import Intake, WrongSumEvidence
from security.secagg.transitions import SiteState
from security.secrets import Secret
from tests.support.evil import VICTIM, EvilCoordinator, assert_refused, evil

CHUNK = 2


def forged(run: EvilCoordinator, attempt: CoordinatorAttempt, total: Words) -> Publication:
    """A result over another sum, consistent in everything the coordinator signs."""
    assert attempt.opening and attempt.survivors and attempt.quorum
    secrets = attempt.opening.open()
    assert secrets is not None
    outcome = states.next_state(run.policy.layout, run.model, total, survivors=len(run.sites))
    attempt.model = outcome.state
    root = masking.words_root(total, run.policy.layout.ring)
    result = build_result(
        run.core.signer, attempt.dealing, attempt.survivors, attempt.quorum, secrets, sum_root=root, outcome=outcome
    )
    return Publication(run.policy, result, attempt.uploads, total)


def publish(run: EvilCoordinator, published: Publication, sites: Any) -> None:
    for name in sites:
        run._send("coordinator", name, published.result)
        for frame in published.sum_to(name).frames():
            run._send("coordinator", name, frame)
    run.pump()


def wrong_round(change: Callable[[Words], None], **options: Any) -> tuple[EvilCoordinator, CoordinatorAttempt]:
    """A round whose sum is changed after it was opened; only good acknowledgements are ever relayed."""
    run = evil(**options)
    run.open_round()
    attempt = run.secretly()
    assert attempt.publication is not None
    total = attempt.publication.total.copy()
    change(total)
    attempt.publication = forged(run, attempt, total)
    publish(run, attempt.publication, run.sites)
    run.model, run.prev_result = attempt.model, attempt.publication.result_hash
    run.core.movements = attempt.publication.result.movements
    run.check = attempt.publication.certificate()
    return run, attempt


def one_coordinate(total: Words) -> None:
    total[CHUNK * Ring(DEFAULT_BITS).frame_words + 7] += 1_000


def doubled(total: Words) -> None:
    np.add(total, total, out=total)


def next_aggregation(run: EvilCoordinator) -> None:
    updates = {name: words for name, words in run.updates(2).items() if run.machine(name).state is SiteState.IDLE}
    run.begin_round(updates)
    run.launch(run.plan(run.sites))


@pytest.mark.parametrize("change", [one_coordinate, doubled])
def test_a_wrong_sum_gets_no_certificate(change: Callable[[Words], None]) -> None:
    run, _ = wrong_round(change)
    assert run.check is None
    finders = [name for name in run.honest if run.machine(name).state is SiteState.HALTED]
    assert finders
    for name in finders:
        assert_refused(run, name, result_checks.WrongSum, "check_chunk_sum")
    next_aggregation(run)
    others = [name for name in run.honest if name not in finders]
    for name in others:
        assert_refused(run, name, VerificationFailed, "check_plan_certificate")
    assert len({said.kx for said in run.said(messages.UploadFrame)}) == 1, "no upload after the first round"
    run.check_promises()


def test_a_wrong_sum_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without adding up again the wrong model is certified, and the next aggregation starts from it."""
    monkeypatch.setattr(result_checks, "check_chunk_sum", lambda *_: None)
    run, attempt = wrong_round(one_coordinate)
    assert run.check is not None
    right = attempt.uploads.total()
    good = states.next_state(run.policy.layout, evil().model, right, survivors=len(run.sites)).state
    for name in run.honest:
        assert run.machine(name).intake.model.tobytes() == run.model.tobytes() != good.tobytes()
    next_aggregation(run)
    assert len({said.site for said in run.said(messages.Agree) if said.site in run.honest}) == len(run.honest)


def test_an_unchecked_sum_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum is wrong and known to be wrong by those who looked; the others go on with it."""
    monkeypatch.setattr(checks, "check_plan_certificate", lambda *_: None)
    run, _ = wrong_round(one_coordinate)
    assert run.check is None
    next_aggregation(run)
    misled = [name for name in run.honest if run.machine(name).state is SiteState.ADVERTISED]
    assert misled and all(run.machine(name).intake.model.tobytes() == run.model.tobytes() for name in misled)


def shown_wrong_sum(run: EvilCoordinator, *, looked_at: bool) -> tuple[CoordinatorAttempt, Publication, int]:
    """The victim gets a sum that differs in one chunk, which it will look at or will not."""
    run.open_round()
    attempt = run.secretly()
    right = attempt.publication
    assert right is not None
    for change, chunk in itertools.product(range(1_000, 1_020), range(run.policy.chunks)):
        total = right.total.copy()
        total[chunk * Ring(DEFAULT_BITS).frame_words + 1] += change
        other = forged(run, attempt, total)
        header = CheckedHeader(other.result, attempt.dealing.kx, other.result_hash)
        chosen = assigned_chunks(run.policy, header, VICTIM, run.machine().core.storage_key)
        if (chunk in chosen) is looked_at:
            break
    attempt.publication = other
    publish(run, other, [VICTIM])
    return attempt, right, chunk


def fork(run: EvilCoordinator) -> None:
    """The victim gets a sum that differs in a chunk it will not look at; everybody else gets the right one."""
    attempt, right, _ = shown_wrong_sum(run, looked_at=False)
    other = attempt.publication
    assert other is not None
    model = states.next_state(run.policy.layout, run.model, right.total, survivors=len(run.sites)).state
    attempt.publication, attempt.model = right, model
    publish(run, right, [name for name in run.sites if name != VICTIM])
    order = messages.AuditOrder(result=right.result_hash, absent=(VICTIM,))
    run.tell_all(order, [name for name in run.sites if name != VICTIM])
    run.model, run.prev_result, run.check = model, right.result_hash, right.certificate()
    assert run.check is not None
    assert run.machine().core.head.result == other.result_hash != right.result_hash
    updates = run.updates(2)
    mine = updates.pop(VICTIM)
    run.begin_round(updates)
    pending = replace(run.sites["site-01"].update, state_hash=run.machine().core.head.state_hash, words=mine)  # type: ignore[type-var]
    run._do_site(VICTIM, run.machine().load_update(pending))  # type: ignore[arg-type]
    run.launch(run.plan())


FORK_CHECKS = ["check_plan_history", "check_plan_state", "check_plan_certificate"]


@pytest.mark.parametrize("left", FORK_CHECKS)
def test_a_forked_site_is_in_no_later_sum(left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rules refuse it, each by itself: another history, another model, no acknowledgement of its own."""
    for check in FORK_CHECKS:
        if check != left:
            monkeypatch.setattr(checks, check, lambda *_: None)
    run = evil()
    fork(run)
    kind = VerificationFailed if left == "check_plan_certificate" else PolicyViolation
    assert_refused(run, VICTIM, kind, left)
    run.check_promises()


def test_a_forked_site_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all three off, a site that stands on another model takes part in the next sum."""
    for check in FORK_CHECKS:
        monkeypatch.setattr(checks, check, lambda *_: None)
    run = evil()
    fork(run)
    assert run.said(messages.UploadHeader, by=VICTIM)[-1].kx == run.said(messages.Agree, by=VICTIM)[-1].kx
    assert len(run.said(messages.Agree, by=VICTIM)) == 2


def test_sampled_audit_detects_as_often_as_it_says() -> None:
    """One bad chunk of five, four sites that look at one each: somebody sees it with 1 - (4/5)^4."""
    run, attempt = wrong_round(lambda total: None, audit=AuditMode.SAMPLED)
    assert attempt.publication is not None and run.policy.chunks == 5
    header = CheckedHeader(attempt.publication.result, attempt.dealing.kx, attempt.publication.result_hash)
    randomness, trials = CountedRandomness(b"draws"), 2000
    seen = sum(
        any(CHUNK in assigned_chunks(run.policy, header, name, Secret(randomness.bytes(32))) for name in run.sites)
        for _ in range(trials)
    )
    theory = 1 - (4 / 5) ** 4
    assert seen / trials > theory - 4 * (theory * (1 - theory) / trials) ** 0.5


def test_a_piece_of_another_length_is_refused() -> None:
    """A colluder signs the root of a vector in odd pieces; who adds it up must refuse it, not fall over."""
    run = evil()
    run.lose(messages.ChunkPiece)
    run.open_round()
    attempt = run.launch(run.plan())
    assert attempt.publication is not None
    # Who looks at which chunk follows from the hash of the result: one in 32 times a given site looks at none.
    audits = {name: run.machine(name).intake.audit for name in run.honest}
    name, wanted = next((name, audit.todo) for name, audit in audits.items() if audit is not None and audit.todo)
    piece = messages.ChunkPiece(
        result=attempt.publication.result_hash, chunk=wanted[0], site="site-03", data=b"\0\0\0\0", path=()
    )
    with pytest.raises(RemoteProtocolError, match="wrong length"):
        run.machine(name).receive(piece)


def test_the_proof_of_a_wrong_sum_holds_for_anybody_and_not_in_odd_pieces() -> None:
    run, _ = wrong_round(one_coordinate)
    finder = next(name for name in run.honest if run.machine(name).state is SiteState.HALTED)
    audit = run.machine(finder).intake.audit
    assert audit is not None
    proof = WrongSumEvidence.parse(WrongSumEvidence.of(audit).file())
    proof.verify(run.policy)
    first = proof.pieces[0]
    for data in (first.data[:-1], first.data[:-3], first.data[:-12], first.data[:1] * len(first.data)):
        pieces = (replace(first, data=data), *proof.pieces[1:])
        with pytest.raises(VerificationFailed):
            replace(proof, pieces=pieces).verify(run.policy)


# The same result again, with the chunk that would tell held back.


def shown_again(run: EvilCoordinator, times: int = 20) -> list[int]:
    """A wrong sum in sampled mode: pieces of the bad chunk never arrive, and the result comes again and again."""
    sent: list[int] = []

    def hold_back(piece: messages.ChunkPiece, _: str) -> messages.ChunkPiece | None:
        return None if piece.chunk == sent[-1] else piece

    run.change(messages.ChunkPiece, lambda piece, site: None)
    attempt, _, bad = shown_wrong_sum(run, looked_at=True)
    sent.append(bad)
    run.rules.clear()
    run.change(messages.ChunkPiece, hold_back)
    assert attempt.publication is not None
    for _ in range(times):
        publish(run, attempt.publication, [VICTIM])
    return [request.chunk for request in run.said(messages.ChunkRequest, by=VICTIM)]


def test_a_result_that_is_shown_again_draws_no_other_chunk() -> None:
    run = evil(audit=AuditMode.SAMPLED)
    asked = shown_again(run)
    assert len(asked) == 21 and len(set(asked)) == 1
    assert not run.said(Ack, by=VICTIM), "a sum that it has not checked is not acknowledged"
    run.restart_site(VICTIM)
    assert run.machine().core.head.round == 1, "the result was accepted, and is not certified"


def test_a_restart_draws_no_other_chunk_either() -> None:
    run = evil(audit=AuditMode.SAMPLED)
    run.lose(messages.ChunkPiece)
    run.open_round()
    attempt = run.launch(run.plan())
    for _ in range(10):
        run.restart_site(VICTIM)
        run.pump()
        assert attempt.publication is not None
        publish(run, attempt.publication, [VICTIM])
    asked = [request.chunk for request in run.said(messages.ChunkRequest, by=VICTIM)]
    assert len(asked) >= 11 and len(set(asked)) == 1


def test_a_result_that_is_shown_again_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn afresh each time: sooner or later it is another chunk, and the wrong sum is acknowledged."""
    draws = CountedRandomness(b"afresh")
    monkeypatch.setattr(Intake, "_known_header", lambda self, result: self.audit.header)
    original = result_checks.drawn_chunks
    run = evil(audit=AuditMode.SAMPLED)
    begin = Intake._begin_audit

    def afresh(self: Intake, download: Any) -> Any:
        if self.audit is not None:
            monkeypatch.setattr(
                result_checks, "drawn_chunks", lambda key, *rest: original(Secret(draws.bytes(32)), *rest)
            )
            self.audit = None
        return begin(self, download)

    monkeypatch.setattr(Intake, "_begin_audit", afresh)
    shown_again(run)
    assert run.said(Ack, by=VICTIM)


def spoiled(result: messages.Result) -> messages.Result:
    """The same R: it does not cover the signatures."""
    lines = tuple(replace(line, signature=bytes(64)) for line in result.agreements)
    return replace(result, agreements=lines, signature=bytes(64))


def evidence_after_a_spoiled_header(run: EvilCoordinator) -> WrongSumEvidence:
    """The coordinator knows that it is found, and shows the header once more with bad signatures."""
    run.lose(messages.ChunkPiece)
    attempt, _, _ = shown_wrong_sum(run, looked_at=True)
    run.rules.clear()
    assert attempt.publication is not None
    result = attempt.publication.result
    attempt.publication.result = spoiled(result)
    publish(run, attempt.publication, [VICTIM])
    assert run.machine().state is SiteState.HALTED
    audit = run.machine().intake.audit
    assert audit is not None
    return WrongSumEvidence.parse(WrongSumEvidence.of(audit).file())


def test_the_header_that_was_checked_first_is_the_evidence() -> None:
    run = evil()
    evidence_after_a_spoiled_header(run).verify(run.policy)


def test_the_header_that_was_checked_first_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_shown(self: Intake, result: messages.Result) -> CheckedHeader:
        kx, _, digest = published.result_digests(result)
        self.audit = None
        return CheckedHeader(result, kx, digest)

    monkeypatch.setattr(Intake, "_known_header", last_shown)
    run = evil()
    with pytest.raises(VerificationFailed):
        evidence_after_a_spoiled_header(run).verify(run.policy)


def test_after_a_restart_a_header_with_bad_signatures_is_refused() -> None:
    run = evil()
    run.lose(messages.ChunkPiece)
    attempt, _, _ = shown_wrong_sum(run, looked_at=True)
    run.deaf = True
    run.restart_site(VICTIM)
    run.pump()
    assert attempt.publication is not None
    with pytest.raises(VerificationFailed):
        run.machine().receive(spoiled(attempt.publication.result))


# One colluder, many acknowledgements.


def certified_by_one(run: EvilCoordinator) -> messages.ResultCertificate:
    """A forged sum with c + 1 acknowledgements of it, all of them by the one colluder."""
    attempt, _, _ = shown_wrong_sum(run, looked_at=False)
    publication = attempt.publication
    assert publication is not None
    everything = certificate_checks.bitmap_of(range(run.policy.chunks), run.policy.chunks)
    colluder = run.colluders[0]
    state_hash = publication.result.state_hash
    statement = statements.ack(publication.result_hash, state_hash, everything)
    ack = Ack(
        site=colluder,
        result=publication.result_hash,
        state_hash=state_hash,
        bitmap=everything,
        signature=run.signer(colluder).sign(statement),
    )
    check = CheckCertificate(acks=(ack,) * (run.policy.c + 1))
    return messages.ResultCertificate(result=publication.result_hash, check=check)


def test_acknowledgements_of_one_site_count_once() -> None:
    run = evil()
    forged_certificate = certified_by_one(run)
    with pytest.raises(VerificationFailed, match="acknowledges twice"):
        run.machine().receive(forged_certificate)
    assert not run.machine().core.head.certified


def test_acknowledgements_of_one_site_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate_checks, "check_distinct_acks", lambda *_: None)
    run = evil()
    run.machine().receive(certified_by_one(run))
    assert run.machine().core.head.certified, "a sum that nobody has checked is certified"


# Three sites, of which one colludes: what c = 1 is for there, since the quorum is three in any case.


def certified_by_one_of_three(run: EvilCoordinator) -> messages.ResultCertificate:
    many = certified_by_one(run)
    assert many.check is not None
    return replace(many, check=CheckCertificate(acks=many.check.acks[:1]))


def test_one_of_three_sites_certifies_nothing_alone() -> None:
    run = evil(3)
    with pytest.raises(VerificationFailed, match="do not cover the result"):
        run.machine().receive(certified_by_one_of_three(run))
    assert not run.machine().core.head.certified


def test_one_of_three_sites_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """With c = 0, as less than a third would be, one acknowledgement of each chunk is enough."""
    monkeypatch.setattr(loopback, "default_colluders", lambda _: 0)
    run = evil(3)
    run.machine().receive(certified_by_one_of_three(run))
    assert run.machine().core.head.certified, "by the colluder alone"
