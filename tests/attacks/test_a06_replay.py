"""A6: old messages are shown again: a plan that was given up, a whole recorded round, before and after a restart.

ABORT names CTX. Could a site join the same CTX again, its old promise never to release in it would lie beside a sum.
"""

from __future__ import annotations

import pytest

from lazaret.errors import PolicyViolation, RemoteProtocolError
from protos.loopback import sent_message
from security.secagg import messages
from security.secagg.effects import REFUSED, Ended, Persist
from security.secagg.site import checks, differences
from tests.support.evil import VICTIM, EvilCoordinator, assert_recovered, assert_refused, assert_safe, evil


def a_dead_plan_again(run: EvilCoordinator, *, restart: bool = False) -> None:
    """Everyone gives attempt 1 up; its plan is shown again and summed in secret; attempt 2 leaves the victim out."""
    run.open_round()
    run.deaf = True
    plan = run.plan()
    attempt = run.launch(plan)
    certificate = run.aborts_of(attempt, run.sites)
    if restart:
        for name in run.sites:
            run.restart_site(name)
    run.deaf = False
    run.secretly(attempt=1)
    run.secretly(run.honest[1:] + list(run.colluders), aborts=[certificate], attempt=2)


@pytest.mark.parametrize("restart", [False, True])
def test_a_plan_that_was_given_up_is_not_joined_again(restart: bool) -> None:
    run = evil(5)
    a_dead_plan_again(run, restart=restart)
    assert_refused(run, VICTIM, PolicyViolation, "check_plan_high_water")
    assert_safe(run)


def test_a_dead_plan_again_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differences, "check_same_state_sums", lambda *_: None)  # stops it as well
    monkeypatch.setattr(checks, "check_plan_high_water", lambda *_: None)
    run = evil(5)
    a_dead_plan_again(run)
    assert_recovered(run)


@pytest.mark.parametrize("restart", [False, True])
def test_a_recorded_round_changes_nothing(restart: bool) -> None:
    """Every message of round 1 comes again, in order, while round 2 is open: nothing is written, nothing is sent."""
    run = evil(wide=False)
    run.transcript = []
    run.run_round(run.updates(1))
    recorded = [sent_message(sender, data) for sender, receiver, data in run.transcript if receiver == VICTIM]
    kinds = {messages.Plan, messages.Adverts, messages.Deliver, messages.Survivors, messages.Quorum, messages.Result}
    assert kinds <= {type(message) for message in recorded}
    run.open_round(2)
    run.lose(messages.Survivors, to=VICTIM)
    run.launch(run.plan())
    if restart:
        run.restart_site(VICTIM)
    machine = run.machine()
    state, head = machine.state, machine.core.head
    refused = 0
    for message in recorded:
        try:
            effects = machine.receive(message)
        except (RemoteProtocolError, PolicyViolation):
            refused += 1
            continue
        refused += any(isinstance(effect, Ended) and effect.reason == REFUSED for effect in effects)
        assert not any(isinstance(effect, Persist) for effect in effects)
        sent = [effect for effect in effects if not isinstance(effect, Ended)]
        assert all(isinstance(effect.message, messages.Refusal) for effect in sent if hasattr(effect, "message"))
    assert refused >= len(kinds)
    assert machine.state is state and machine.core.head == head
    run.check_promises()
