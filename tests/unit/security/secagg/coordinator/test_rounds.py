"""Attempts that fail: abort certificates, exact repeats, blame, and rounds that are given up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lazaret.errors import PolicyViolation, VerificationFailed
from protos.loopback import COORDINATOR, Drop
from security.crypto import shamir
from security.secagg import certificate_checks, messages, statements
from security.secagg.certificates import Advert
from security.secagg.coordinator.rounds import BlameBook, abort_certificate, may_hold_uploads
from security.secagg.fields import Wire
from security.secagg.site import checks
from security.secagg.transitions import CoordinatorState, SiteState
from security.secrets import Secret
from tests.support.secagg_world import RecordedFederation, federation, random_updates, reference_sum


def silent(*kinds: type[Wire]) -> object:
    """A wire that loses every message of these kinds."""

    def hook(sender: str, receiver: str, message: Wire) -> list[Wire]:
        return [] if isinstance(message, kinds) else [message]

    return hook


def begin(run: RecordedFederation, seed: int = 1) -> dict[str, object]:
    updates = random_updates(run.policy.layout, run.sites, seed)
    run.begin_round(updates)
    return updates  # type: ignore[return-value]


def test_a_dead_attempt_frees_the_updates_for_the_next_one() -> None:
    """Two of five never upload; the abort certificate lets the same updates go into attempt 2."""
    run = federation(5)
    updates = random_updates(run.policy.layout, run.sites, 1)
    drops = {"site-03": Drop(messages.UploadHeader), "site-04": Drop(messages.UploadHeader)}
    outcome = run.run_round(updates, drops=drops)
    first = run.planned.attempts[0]
    assert first.state is CoordinatorState.DEAD and may_hold_uploads(first)
    certificate = abort_certificate(first)
    assert certificate is not None and len(certificate.lines) >= first.context.a
    assert outcome.total is None, "three of five with c = 1 hold no quorum of four"
    run.check_promises()


def test_the_second_attempt_gives_the_sum_of_the_same_updates() -> None:
    run = federation(5, c=0)
    updates = random_updates(run.policy.layout, run.sites, 1)
    dropped = {name: Drop(messages.UploadHeader) for name in ("site-02", "site-03", "site-04")}
    lost = 3

    def hook(sender: str, receiver: str, message: Wire) -> list[Wire]:
        nonlocal lost
        if isinstance(message, messages.UploadHeader) and sender in dropped and lost:
            lost -= 1
            return []
        return [message]

    run.hook = hook
    outcome = run.run_round(updates)
    assert outcome.attempts == 2 and outcome.total is not None
    assert outcome.total.tolist() == reference_sum(run.policy.layout, updates, outcome.survivors)
    plan = run.planned.attempts[1].plan
    assert [found.ctx for found in plan.aborts] == [run.planned.attempts[0].ctx]
    run.check_promises()


def test_a_plan_without_its_abort_certificate_is_refused() -> None:
    run = federation(5, c=0)
    updates = random_updates(run.policy.layout, run.sites, 1)
    lost = {"site-02", "site-03", "site-04"}

    def hook(sender: str, receiver: str, message: Wire) -> list[Wire]:
        if isinstance(message, messages.UploadHeader) and sender in lost:
            lost.discard(sender)
            return []
        return [replace(message, aborts=())] if isinstance(message, messages.Plan) else [message]

    run.hook = hook
    assert run.run_round(updates).total is None
    assert "neither an abort certificate" in str(run.sites["site-00"].errors[0])


def cheating_dealer(run: RecordedFederation, cheat: str) -> object:
    """A site that deals shares of another seed than it committed to, rightly listed, signed and boxed."""
    original = shamir.split

    def split(secret: Secret, **options: object) -> tuple[Secret, ...]:
        attempt = run.sites[cheat].machine.aggregation.attempt
        if attempt is not None and secret is attempt.seed:
            secret = Secret(bytes(32))
        return original(secret, **options)  # type: ignore[arg-type]

    return split


def test_a_cheating_dealer_is_convicted_and_the_set_repeated_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run = federation(7, c=2)
    updates = random_updates(run.policy.layout, run.sites, 1)
    monkeypatch.setattr(shamir, "split", cheating_dealer(run, "site-02"))
    outcome = run.run_round(updates, drops={"site-06": Drop(messages.UploadFrame)})
    first, second = run.planned.attempts
    assert first.state is CoordinatorState.LOST and first.opening is not None
    assert [fraud.advert.site for fraud in first.opening.frauds] == ["site-02"]
    assert run.book.excluded == {"site-02": "fraud"}
    assert second.context.repeats and list(second.context.sites) == [
        "site-00",
        "site-01",
        "site-03",
        "site-04",
        "site-05",
    ]
    assert outcome.total is not None
    assert outcome.total.tolist() == reference_sum(run.policy.layout, updates, second.context.sites)
    run.check_promises()


def test_no_honest_dealer_can_be_convicted() -> None:
    run = federation(4)
    run.run_round(random_updates(run.policy.layout, run.sites, 1))
    attempt = run.planned.attempts[0]
    assert attempt.opening is not None
    holders = sorted(attempt.opening.replies)[: attempt.context.t]
    kind = attempt.opening._kind("site-00")
    proof = attempt.opening._proof("site-00", holders, kind)
    with pytest.raises(VerificationFailed, match="do give the dealer's secret"):
        certificate_checks.check_fraud_proof(run.policy, attempt.context, proof)
    share = proof.shares[0]
    forged = replace(proof, shares=(replace(share, share=bytes(32)), *proof.shares[1:]))
    with pytest.raises(VerificationFailed, match="not the one that was dealt"):
        certificate_checks.check_fraud_proof(run.policy, attempt.context, forged)
    twice = replace(proof, shares=(share, share, *proof.shares[2:]))
    with pytest.raises(VerificationFailed, match="distinct members"):
        certificate_checks.check_fraud_proof(run.policy, attempt.context, twice)
    moved = replace(proof, shares=(replace(share, line=replace(share.line, box=b"")), *proof.shares[1:]))
    with pytest.raises(VerificationFailed):
        certificate_checks.check_fraud_proof(run.policy, attempt.context, moved)


def certified_but_not_opened(run: RecordedFederation) -> dict[str, object]:
    """An attempt whose set was certified and in which too few release."""
    updates = random_updates(run.policy.layout, run.sites, 1)
    run.begin_round(updates)
    run.hook = silent(messages.Unmask, messages.Abort)  # type: ignore[assignment]
    run.run_attempt(run.planned.next_attempt(list(run.sites)))
    assert run.planned.attempts[0].state is CoordinatorState.LOST
    run.hook = None
    return updates  # type: ignore[return-value]


def test_a_certified_set_that_was_never_opened_is_repeated_exactly() -> None:
    run = federation(5)
    updates = certified_but_not_opened(run)
    assert {site.machine.state for site in run.sites.values()} == {SiteState.RELEASED}
    attempt = run.planned.next_attempt(list(run.sites))
    assert attempt.context.repeats
    run.run_attempt(attempt)
    assert attempt.publication is not None
    assert attempt.publication.total.tolist() == reference_sum(run.policy.layout, updates, run.sites)  # type: ignore[arg-type]
    run.check_promises()


def test_an_exact_repeat_needs_everyone() -> None:
    run = federation(5)
    certified_but_not_opened(run)
    attempt = run.planned.next_attempt(list(run.sites))
    run.sites["site-04"].drop = Drop(messages.UploadFrame)
    run.run_attempt(attempt)
    assert attempt.publication is None and attempt.state is CoordinatorState.DEAD


@pytest.mark.parametrize("change", ["smaller cohort", "no certificate", "too few", "other keys", "other set"])
def test_a_repeat_that_is_not_exact_is_refused(change: str) -> None:
    run = federation(5)
    certified_but_not_opened(run)
    plan = run.planned.next_attempt(list(run.sites)).plan
    site = run.sites["site-00"].machine
    certificate = plan.repeats[0]
    if change == "smaller cohort":
        fewer = run.policy.thresholds(4)
        sizes = {"n": 4, "t": fewer.t, "a": fewer.a}
        plan = replace(plan, context=replace(plan.context, members=plan.context.members[:4], **sizes))
    elif change == "no certificate":
        plan = replace(plan, repeats=())
    elif change == "too few":
        fewer_lines = certificate.agreements[: plan.context.t - 1]
        plan = replace(plan, repeats=(replace(certificate, agreements=fewer_lines),))
    elif change == "other keys":
        plan = replace(plan, repeats=(replace(certificate, kx=bytes(32)),))
    else:
        plan = replace(plan, repeats=(replace(certificate, roots=certificate.roots[:4]),))
    with pytest.raises((PolicyViolation, VerificationFailed)):
        checks.check_plan_reuse(run.policy, site.core.journal.of_round(1), plan)


def test_strikes_double_up_to_thirty_two_and_are_forgiven() -> None:
    book = BlameBook()
    lengths = []
    for _ in range(8):
        book.missed("a")
        lengths.append(book.pause["a"])
    assert lengths == [1, 2, 4, 8, 16, 32, 32, 32]
    assert book.eligible(["a", "b"]) == ["b"]
    for _ in range(32):
        book.cohort_formed()
    assert book.eligible(["a", "b"]) == ["b"], "not within the round that it missed"
    book.new_round()
    assert book.eligible(["a", "b"]) == ["a", "b"]
    book.missed("a")
    book.took_part("a")
    assert book.eligible(["a"]) == ["a"] and not book.strikes


def test_disputes_with_more_than_c_others_name_the_liar_over_rounds() -> None:
    book = BlameBook()
    book.accuse("liar", "x", c=1)
    book.new_round()
    assert not book.excluded and book.eligible(["liar", "x", "y"]) == ["liar", "x", "y"], "nobody is left out for one"
    book.accuse("y", "liar", c=1)
    assert book.excluded == {"liar": "disputes"}
    again = BlameBook.from_dict(book.to_dict())
    assert again == book
    assert book.eligible(["liar", "x", "y"]) == ["x", "y"]
    book.clear("liar")
    assert not book.excluded and not book.accusations


def test_a_dealer_that_never_answers_is_excluded_and_one_that_answers_is_not() -> None:
    book = BlameBook()
    for _ in range(2):
        book.unanswered("x")
    book.silence.pop("x")
    book.unanswered("x")
    assert not book.excluded
    for _ in range(2):
        book.unanswered("x")
    assert book.excluded == {"x": "no answer to accusations"}
    assert book.named(["w", "x"]) == "; at fault: x (no answer to accusations)"


def test_a_site_that_was_struck_is_taken_back_before_a_round_is_lost() -> None:
    run = federation(3)
    run.book.missed("site-00")
    outcome = run.run_round(random_updates(run.policy.layout, run.sites, 1))
    assert outcome.total is not None and len(outcome.survivors) == 3


def test_rounds_end_although_c_sites_stall_in_turn() -> None:
    run = federation(7, c=2)
    for number in range(3):
        updates = random_updates(run.policy.layout, run.sites, number)
        stalls = {"site-05": Drop(Advert), "site-06": Drop(messages.Shares)}
        outcome = run.run_round(updates, drops=stalls)
        assert outcome.total is not None and outcome.attempts <= run.policy.c + 1
        assert outcome.total.tolist() == reference_sum(run.policy.layout, updates, outcome.survivors)


def test_a_wrong_share_is_blamed_on_its_sender_and_the_sum_is_right() -> None:
    run = federation(5)
    updates = random_updates(run.policy.layout, run.sites, 1)

    def hook(sender: str, receiver: str, message: Wire) -> list[Wire]:
        if sender == "site-02" and isinstance(message, messages.Unmask):
            shares = (bytes(32), *message.shares[1:])
            statement = statements.unmask(message.kx, message.survivors, shares)
            signature = run.sites[sender].machine.core.signer.sign(statement)
            return [replace(message, shares=shares, signature=signature)]
        return [message]

    run.hook = hook
    outcome = run.run_round(updates)
    assert outcome.total is not None
    assert outcome.total.tolist() == reference_sum(run.policy.layout, updates, run.sites)
    assert run.book.excluded == {"site-02": "wrong share"}


def test_two_adverts_in_one_attempt_are_held_against_their_signer() -> None:
    run = federation(4)
    updates = random_updates(run.policy.layout, run.sites, 1)

    def hook(sender: str, receiver: str, message: Wire) -> list[Wire]:
        if sender == "site-01" and isinstance(message, Advert):
            other = replace(message, commitment=bytes(32))
            signature = run.sites[sender].machine.core.signer.sign(statements.advert(run.policy, other))
            return [message, replace(other, signature=signature)]
        return [message]

    run.hook = hook
    run.run_round(updates)
    assert run.book.excluded == {"site-01": "two adverts"}
    assert COORDINATOR not in run.sites
