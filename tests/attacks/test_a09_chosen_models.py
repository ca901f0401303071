"""A9: a model made to print its training data into its gradients: trap weights, an extra module, altered statistics.

There is no message with which a coordinator could choose a model. The first one is pinned, each later one is computed
by the site; one that was away takes a state only with acknowledgements of more than c sites.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lazaret.errors import PolicyViolation, ToolkitError, VerificationFailed
from security.identity.membership import AuditMode
from security.secagg import certificate_checks, messages, published, statements
from security.secagg import state as states
from security.secagg.certificates import CheckCertificate
from security.secagg.site import result_checks
from security.secagg.site.journal import Journal
from security.secagg.site.machine import SiteMachine
from tests.support.evil import VICTIM, EvilCoordinator, assert_refused, assert_safe, checks_in, evil


def trap(run: EvilCoordinator) -> Any:
    return states.canonical(np.full(run.policy.layout.state_words, 0.25))


def test_the_first_model_is_pinned() -> None:
    run = evil(wide=False)
    with pytest.raises(PolicyViolation, match="not the newest one accepted"):
        SiteMachine(replace(run.machine().core, journal=Journal()), trap(run))


@pytest.mark.parametrize("field", ["state_hash", "layout_hash"])
def test_a_plan_for_a_chosen_model_or_another_layout(field: str) -> None:
    run = evil()
    run.open_round()
    run.launch(run.plan(**{field: bytes(32)}))
    check = {"state_hash": "check_plan_state", "layout_hash": "check_plan_layout"}[field]
    for name in run.honest:
        assert_refused(run, name, PolicyViolation, check)
    assert_safe(run)


def resigned(run: EvilCoordinator, result: messages.Result, **changes: Any) -> messages.Result:
    forged = replace(result, **changes)
    _, _, digest = published.result_digests(forged)
    return replace(forged, signature=run.core.signer.sign(statements.result(digest)))


def announce_another_model(run: EvilCoordinator) -> None:
    """The sum is right, the model that is said to follow from it is the attacker's."""
    chosen = states.state_hash(trap(run))
    hashes: list[bytes] = []

    def announce(result: messages.Result, site: str) -> messages.Result:
        forged = resigned(run, result, state_hash=chosen)
        hashes.append(published.result_digests(forged)[2])
        return forged

    run.change(messages.Result, announce)
    run.change(messages.SumFrame, lambda frame, site: replace(frame, result=hashes[0]))
    run.open_round()
    run.launch(run.plan())


def test_a_model_that_does_not_follow_from_the_sum() -> None:
    run = evil(wide=False)
    announce_another_model(run)
    for name in run.honest:
        assert_refused(run, name, VerificationFailed, "check_next_state")
        assert run.machine(name).core.head.round == 0
    run.check_promises()


def test_the_site_keeps_its_own_model_even_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check only says early what a site does anyway: it never takes a model from the coordinator."""
    monkeypatch.setattr(result_checks, "check_next_state", lambda *_: None)
    run = evil(wide=False)
    announce_another_model(run)
    machine = run.machine()
    assert machine.core.head.round == 1
    assert machine.core.head.state_hash == states.state_hash(machine.intake.model) != states.state_hash(trap(run))


def jump_to_the_trap(audit: AuditMode, **context: Any) -> tuple[SiteMachine, Any]:
    """A site that was away is offered the attacker's state, with no acknowledgement at all."""
    run = evil(5, wide=False, audit=audit)
    first = run.model
    run.open_round()
    attempt = run.launch(run.plan())
    assert attempt.publication is not None
    result = attempt.publication.result
    chosen = trap(run)
    changed = replace(result.context, **context)
    forged = resigned(run, result, context=changed, state_hash=states.state_hash(chosen))
    late = SiteMachine(replace(run.machine().core, journal=Journal()), first)
    late.start()
    late.receive(messages.Jump(result=forged, check=CheckCertificate(acks=())))
    late.receive(messages.StateFrame(state_hash=forged.state_hash, index=0, data=chosen.tobytes()))
    return late, chosen


@pytest.mark.parametrize(
    ("audit", "context", "check"),
    [
        (AuditMode.COVERED, {}, "check_certificate"),
        (AuditMode.SAMPLED, {}, "check_certificate"),
        (AuditMode.SAMPLED, {"t": 0}, "check_jump_context"),
        (AuditMode.SAMPLED, {"t": 1, "c": 0}, "check_jump_context"),
    ],
)
def test_a_state_that_nobody_confirms(audit: AuditMode, context: dict[str, int], check: str) -> None:
    with pytest.raises(ToolkitError) as caught:
        jump_to_the_trap(audit, **context)
    assert isinstance(caught.value, PolicyViolation | VerificationFailed)
    assert check in checks_in(caught.value)


def hold_a_state_back() -> SiteMachine:
    """A site is promised the state of round 1, goes on by sums to round 3, and only then gets what was promised."""
    run = evil(5, wide=False)
    first, told = run.model, []
    for number in range(3):
        run.run_round(run.updates(number))
        publication = run.planned.attempts[-1].publication
        assert publication is not None and run.check is not None
        told.append((publication, run.check, run.model))
    late = SiteMachine(replace(run.machine().core, journal=Journal()), first)
    late.start()
    publication, check, state = told[0]
    late.receive(messages.Jump(result=publication.result, check=check))
    for publication, check, _ in told:
        late.receive(publication.result)
        for frame in publication.sum_to(VICTIM).frames():
            late.receive(frame)
        late.receive(messages.ResultCertificate(result=publication.result_hash, check=check))
    assert late.core.head.round == 3
    late.receive(messages.StateFrame(state_hash=told[0][0].result.state_hash, index=0, data=state.tobytes()))
    return late


def test_a_state_that_was_held_back_does_not_lead_back() -> None:
    with pytest.raises(PolicyViolation, match="not newer") as caught:
        hold_a_state_back()
    assert "check_jump_context" in checks_in(caught.value)


def test_a_state_that_was_held_back_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_checks, "check_jump_context", lambda *_: None)
    assert hold_a_state_back().core.head.round == 1


def test_a_quorum_of_nobody_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled audit asks for a quorum of acknowledgements; a context that nobody checks may say that none is enough."""
    monkeypatch.setattr(result_checks, "check_jump_context", lambda *_: None)
    late, chosen = jump_to_the_trap(AuditMode.SAMPLED, t=0)
    assert late.intake.model.tobytes() == chosen.tobytes() and late.core.head.certified


def test_a_state_that_nobody_confirms_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate_checks, "check_certificate", lambda *_args, **_named: True)
    late, chosen = jump_to_the_trap(AuditMode.COVERED)
    assert late.intake.model.tobytes() == chosen.tobytes() and late.core.head.certified
    assert late.core.site == VICTIM
