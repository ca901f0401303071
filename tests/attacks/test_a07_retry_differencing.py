"""A7: the coordinator finishes an attempt in secret, calls it failed, and asks for another one without the victim.

The difference of the two sums is the victim's update, exactly. An update goes into another attempt only if the first
one is proven dead or is repeated exactly, and into another round never.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from lazaret.errors import PolicyViolation, VerificationFailed
from security.secagg import certificate_checks, messages, statements
from security.secagg import context as hashes
from security.secagg.certificates import NamedRoot, RepeatCertificate
from security.secagg.context import RepeatOf
from security.secagg.coordinator.rounds import repeat_certificate
from security.secagg.site import checks, differences
from security.secagg.site.attempt import PendingUpdate
from tests.support.evil import VICTIM, EvilCoordinator, assert_recovered, assert_refused, assert_safe, evil


def others(run: EvilCoordinator) -> list[str]:
    return [name for name in run.sites if name != VICTIM]


def again_without_the_victim(run: EvilCoordinator) -> None:
    run.open_round()
    run.secretly()
    run.secretly(others(run))


def test_no_certificate_no_second_attempt() -> None:
    run = evil(5)
    again_without_the_victim(run)
    for name in run.honest[1:]:
        assert_refused(run, name, PolicyViolation, "check_plan_reuse")
    assert_safe(run)


def test_no_certificate_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differences, "check_same_state_sums", lambda *_: None)  # stops it as well
    monkeypatch.setattr(checks, "check_plan_reuse", lambda *_: None)
    run = evil(5)
    again_without_the_victim(run)
    assert_recovered(run)


def one_abort_too_few(run: EvilCoordinator) -> None:
    """n = 5, c = 1, t = 4, a = 3: three honest sites release, the fourth aborts, the colluder does both."""
    run.lose(messages.Quorum, to="site-03")
    run.open_round()
    attempt = run.secretly()
    certificate = run.aborts_of(attempt, run.sites)
    assert len(certificate.lines) == 2, "who has released does not abort"
    run.secretly(others(run), aborts=[certificate])


def test_one_abort_too_few() -> None:
    run = evil(5)
    one_abort_too_few(run)
    assert_refused(run, "site-01", VerificationFailed, "check_abort_certificate")
    assert_safe(run)


def test_one_abort_too_few_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differences, "check_same_state_sums", lambda *_: None)  # stops it as well
    monkeypatch.setattr(certificate_checks, "check_abort_certificate", lambda *_: None)
    run = evil(5)
    one_abort_too_few(run)
    assert_recovered(run)


def repeat_of_a_set_nobody_certified(run: EvilCoordinator) -> None:
    """The set less the victim is claimed to be the one that was agreed to."""
    run.open_round()
    attempt = run.secretly()
    certified = repeat_certificate(attempt)
    assert certified is not None
    roots = tuple(line for line in certified.roots if line.site != VICTIM)
    claimed = replace(certified, roots=roots)
    survivors = _survivors(claimed, roots)
    named = (RepeatOf(ctx=attempt.ctx, survivors=survivors),)
    run.secretly(others(run), repeats=[claimed], context_repeats=named)


def _survivors(claimed: RepeatCertificate, roots: tuple[NamedRoot, ...]) -> bytes:
    return hashes.survivors_digest(claimed.kx, claimed.deals, [(line.site, line.root) for line in roots])


def test_a_set_that_nobody_certified_is_not_repeated() -> None:
    run = evil(5)
    repeat_of_a_set_nobody_certified(run)
    assert_refused(run, "site-01", VerificationFailed, "check_agreements")
    assert_safe(run)


def test_a_set_that_nobody_certified_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate_checks, "check_agreements", lambda *_args, **_named: None)
    run = evil(5)
    repeat_of_a_set_nobody_certified(run)
    assert_recovered(run)


def repeat_with_a_smaller_cohort(run: EvilCoordinator) -> None:
    """The right certificate, but the cohort is not the certified set."""
    run.open_round()
    attempt = run.secretly()
    certified = repeat_certificate(attempt)
    assert certified is not None
    named = (RepeatOf(ctx=attempt.ctx, survivors=attempt.survivors_hash()),)
    run.secretly(others(run), repeats=[certified], context_repeats=named)


def test_a_repeat_is_of_the_whole_set() -> None:
    run = evil(5)
    repeat_with_a_smaller_cohort(run)
    assert_refused(run, "site-01", PolicyViolation, "check_plan_repeats_set")
    assert_safe(run)


def test_a_repeat_of_a_part_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "check_plan_repeats_set", lambda *_: None)
    run = evil(5)
    repeat_with_a_smaller_cohort(run)
    assert_recovered(run)


@pytest.mark.parametrize("fault", ["under other keys", "of another set"])
def test_a_repeat_is_of_this_attempts_keys_and_set(fault: str) -> None:
    """Even if all its members had signed another set, or the same one under other keys: this site has not."""
    run = evil(5, wide=False)
    run.open_round()
    attempt = run.secretly()
    certified = repeat_certificate(attempt)
    assert certified is not None
    survivors = bytes(32)
    if fault == "under other keys":
        certified = replace(certified, kx=bytes(32))
        survivors = _survivors(certified, certified.roots)
        agreed = statements.agree(certified.kx, survivors)
        keys = {name: run.machine(name).core.signer for name in run.sites}
        signed = (replace(line, signature=keys[line.site].sign(agreed)) for line in certified.agreements)
        certified = replace(certified, agreements=tuple(signed))
    run.secretly(repeats=[certified], context_repeats=(RepeatOf(ctx=attempt.ctx, survivors=survivors),))
    refused = assert_refused(run, VICTIM, VerificationFailed, "check_plan_reuse")
    assert fault in str(refused)


def the_same_update_in_the_next_round(run: EvilCoordinator) -> None:
    """Round 1 is summed in secret and called lost; sites whose seed is the same in every round train the same again."""
    updates = run.open_round()
    run.secretly()
    run.round += 1
    run.planned.start = replace(run.planned.start, round=run.round)
    run.planned.before, run.planned.attempts = run.planned.known(run.planned.start.state_hash), []
    for name, words in updates.items():
        run.truth[run.round, name] = words
        pending = PendingUpdate(
            round=run.round,
            state_hash=run.planned.start.state_hash,
            config_hash=run.config_hash,
            words=words,
        )
        try:
            run._do_site(name, run.machine(name).load_update(pending))
        except PolicyViolation as error:
            run.sites[name].errors.append(error)
    run.secretly(others(run))


def test_the_same_update_in_the_next_round_is_refused() -> None:
    run = evil(5)
    the_same_update_in_the_next_round(run)
    assert_refused(run, "site-01", PolicyViolation, "check_fresh_update")
    assert_safe(run)


def test_the_same_update_in_the_next_round_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds differ, the vectors do not: the attacker solves for them as if they were one round."""
    monkeypatch.setattr(differences, "check_same_state_sums", lambda *_: None)  # stops it as well
    monkeypatch.setattr(checks, "check_fresh_update", lambda *_: None)
    run = evil(5)
    the_same_update_in_the_next_round(run)
    for context in run.spoils.contexts.values():
        object.__setattr__(context, "round", 1)
    assert_recovered(run)


def test_another_update_in_the_same_round_is_refused() -> None:
    run = evil(5, wide=False)
    updates = run.open_round()
    pending = run.sites[VICTIM].update
    assert pending is not None
    with pytest.raises(PolicyViolation, match="already has another update"):
        run.machine().load_update(replace(pending, words=updates["site-01"]))
