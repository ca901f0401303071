"""A23: the victim's upload is called late; its mask key is opened for the others' sum, and then the upload is there.

What is left on it is the self mask. Its seed was never opened, and the shares of it are gone.
"""

from __future__ import annotations

from typing import Any

import pytest

from security.log import egress
from security.secagg import messages
from security.secagg.site.attempt import OpenAttempt
from security.secrets import Secret
from tests.support.evil import VICTIM, EvilCoordinator, assert_recovered, assert_safe, evil
from tests.support.secagg_world import reference_sum


def called_late() -> tuple[EvilCoordinator, Any]:
    run = evil(5)
    run.lose(messages.UploadHeader, messages.UploadFrame, by=VICTIM)
    run.open_round()
    attempt = run.launch(run.plan())
    run._do_coordinator(attempt.close_step())
    run.pump()
    return run, attempt


def test_a_late_upload_stays_under_its_self_mask() -> None:
    run, attempt = called_late()
    assert attempt.publication is not None
    others = [name for name in run.sites if name != VICTIM]
    truth = {name: run.truth[1, name] for name in others}
    assert attempt.publication.total[:99].tolist() == reference_sum(run.policy.layout, truth, others)[:99]
    residual, left = run.spoils.residual(attempt.dealing.kx, VICTIM)
    assert left == {VICTIM}, "every pair mask is off"
    assert egress.p_value(run.policy.layout.ring.pack(residual).data) > 1e-3
    assert_safe(run)
    for name in run.honest:
        kept = run.machine(name).aggregation.attempt
        assert kept is None, "nothing is left to answer with"


def test_a_late_upload_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Had the sites also given the seed's shares of a site that dropped out, its upload would lie open."""

    def both(self: OpenAttempt, survivors: object) -> Secret:
        return Secret(b"".join(share.reveal() for site in self.context.sites for share in self.held[site]))

    monkeypatch.setattr(OpenAttempt, "reply", both)
    run, _ = called_late()
    assert_recovered(run)
