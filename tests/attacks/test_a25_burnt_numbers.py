"""A25: one message with a round of 2^63 locks a site out for ever, by its high-water mark; or attempts without end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lazaret.errors import PolicyViolation
from security.secagg import messages, statements
from security.secagg.certificates import AbortCertificate
from security.secagg.site import checks
from security.secagg.transitions import SiteState
from tests.support.evil import VICTIM, EvilCoordinator, assert_refused, evil


def far_off_request(run: EvilCoordinator, **place: int) -> None:
    context = replace(run.plan().context, **place)
    signature = run.core.signer.sign(statements.abort_request(context.ctx()))
    run.tell(VICTIM, messages.AbortRequest(context=context, signature=signature))


FAR_OFF = [{"round": 2**63}, {"attempt": 2**31}, {"round": 1002}, {"attempt": 5}, {"attempt": 0}]


@pytest.mark.parametrize("place", FAR_OFF)
@pytest.mark.parametrize("how", ["plan", "abort request"])
def test_a_far_off_number_leaves_no_trace(how: str, place: dict[str, int]) -> None:
    run = evil(wide=False)
    run.open_round()
    written = list(run.written[VICTIM])
    if how == "plan":
        run.tell(VICTIM, run.plan(**place))
    else:
        far_off_request(run, **place)
    assert_refused(run, VICTIM, PolicyViolation, "check_plan_window" if "round" in place else "check_plan_attempts")
    assert run.written[VICTIM] == written and run.machine().core.journal.high_water == (0, 0)
    assert run.launch(run.plan()).publication is not None, "the right plan is still accepted"
    run.check_promises()


def test_a_far_off_number_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "check_plan_window", lambda *_: None)
    run = evil(wide=False)
    run.open_round()
    far_off_request(run, round=2**63)
    run.tell(VICTIM, run.plan())
    assert_refused(run, VICTIM, PolicyViolation, "check_plan_high_water")
    assert run.machine().state is SiteState.IDLE
    assert run.machine().core.journal.high_water == (2**63, 1), "no round of this run will ever be above it"


def attempts_joined(run: EvilCoordinator) -> int:
    """As many attempts of one round as the victim will join, each given up with a good abort certificate."""
    run.open_round()
    run.lose(messages.Quorum)
    certificates: list[AbortCertificate] = []
    for attempt in range(1, 20):
        made = run.launch(run.plan(attempt=attempt, aborts=certificates))
        if not run.said(messages.UploadHeader, by=VICTIM)[attempt - 1 :]:
            return attempt - 1
        certificates.append(run.aborts_of(made, run.sites))
    return 19


def test_a_round_has_c_plus_3_attempts() -> None:
    run = evil(wide=False)
    assert attempts_joined(run) == run.policy.c + 3
    assert_refused(run, VICTIM, PolicyViolation, "check_plan_attempts")
    run.check_promises()


def test_a_round_without_end_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "check_plan_attempts", lambda *_: None)
    assert attempts_joined(evil(wide=False)) == 19
