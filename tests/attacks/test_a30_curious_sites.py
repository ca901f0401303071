"""A30: everything behind a sum is shown to all sites: masked uploads, opened seeds, opened keys. Who pools it learns
nothing beyond the sum, unless a quorum of sites has kept its shares.
"""

from __future__ import annotations

import numpy as np
import pytest

from security.crypto import masking
from security.crypto.prg import Words
from security.log import egress
from security.log.egress import LEAST_UNIFORMITY
from security.secagg import messages, thresholds
from tests.support.evil import VICTIM, EvilCoordinator, assert_recovered, assert_safe, evil


def pooled(count: int, colluders: int, **options: int) -> EvilCoordinator:
    """One site drops out, so that both kinds of secret are opened; the colluders see what the audit shows."""
    run = evil(count, colluders=colluders, **options)
    dropped = run.honest[-1]
    run.lose(messages.UploadHeader, messages.UploadFrame, by=dropped)
    run.open_round()
    attempt = run.launch(run.plan())
    run._do_coordinator(attempt.close_step())
    run.pump()
    assert attempt.publication is not None and len(attempt.publication.result.keys) == 1
    return run


def packed(run: EvilCoordinator, words: Words) -> memoryview:
    """As it travels: what an attacker sees of an upload."""
    return run.policy.layout.ring.pack(words).data


@pytest.mark.parametrize(("count", "colluders"), [(5, 1), (5, 0), (7, 2)])
def test_what_is_left_on_an_upload_is_noise(count: int, colluders: int) -> None:
    run = pooled(count, colluders, c=max(colluders, 1))
    kx = run.planned.attempts[-1].dealing.kx
    for name in run.honest[:-1]:
        residual, left = run.spoils.residual(kx, name)
        assert left and name not in left, "its self mask is opened, its masks with other honest sites are not"
        assert egress.p_value(packed(run, residual)) > 1e-4
        assert_safe(run, name)


def test_a_quorum_of_sites_opens_everything_twin() -> None:
    """The limit of it all, and why c is what it is: t sites that keep their shares need no coordinator."""
    run = pooled(5, 4 - 1, c=1)
    kx = run.planned.attempts[-1].dealing.kx
    run.spoils._open_boxes(kx)
    kept = run.spoils.shares[kx, VICTIM, "s"]
    t = run.planned.attempts[-1].context.t
    assert len(kept) == t - 1, "one colluder short"
    assert run.spoils._secret(kx, VICTIM, "s") is None
    run = pooled(6, 4, c=1)
    assert run.planned.attempts[-1].context.t == 4
    assert_recovered(run)


def test_a_quorum_no_larger_than_c_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """With t = c the colluders' own shares are enough."""
    monkeypatch.setattr(thresholds, "quorum", lambda *, n, c, m: c)
    run = evil(5, c=1)
    run.lose(messages.Survivors)
    run.open_round()
    run.launch(run.plan())
    assert_recovered(run)


def test_a_masked_upload_looks_like_noise_and_a_bare_one_does_not() -> None:
    run = evil()
    run.lose(messages.Survivors)
    updates = run.open_round()
    attempt = run.launch(run.plan())
    for name in run.sites:
        upload = run.spoils.upload(attempt.dealing.kx, name)
        assert upload is not None
        assert egress.p_value(packed(run, upload)) > LEAST_UNIFORMITY
        assert egress.p_value(packed(run, updates[name])) < LEAST_UNIFORMITY
    assert_safe(run)


def test_a_bare_upload_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masking forgets to mask: the tripwire on what leaves a site sees it, and the attacker reads the update."""
    monkeypatch.setattr(masking, "masked", lambda words, masks, workers: np.array(words))
    run = evil()
    run.lose(messages.Survivors)
    run.open_round()
    attempt = run.launch(run.plan())
    upload = run.spoils.upload(attempt.dealing.kx, VICTIM)
    assert upload is not None and egress.p_value(packed(run, upload)) < LEAST_UNIFORMITY
    assert np.array_equal(upload, run.truth[1, VICTIM])
