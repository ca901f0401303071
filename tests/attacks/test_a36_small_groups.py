"""A36: groups whose sums are opened apart. The coordinator lets all but one site of a group drop out of the sum, which
is large enough as a whole: the sum of that group is then one site's vector.
"""

from __future__ import annotations

import numpy as np
import pytest

from lazaret.errors import PolicyViolation
from protos.loopback import Drop, RoundOutcome
from security.identity.membership import AggregationPolicy
from security.secagg import messages
from security.secagg.groups import Groups
from security.secagg.site import checks
from tests.support.evil import VICTIM, EvilCoordinator, assert_refused, evil
from tests.support.secagg_world import names

SPLIT = tuple(tuple(names(9)[number::3]) for number in range(3))
BESIDE = [site for site in SPLIT[0] if site != VICTIM]


def alone_in_its_group(monkeypatch: pytest.MonkeyPatch) -> tuple[EvilCoordinator, RoundOutcome]:
    monkeypatch.setattr(AggregationPolicy, "hides", lambda *_: True)  # a coordinator does what it likes
    run = evil(9, wide=False, c=1, groups=Groups(SPLIT, c=1, m=3))
    return run, run.run_round(run.updates(1), drops=dict.fromkeys(BESIDE, Drop(messages.UploadHeader)))


def test_no_site_agrees_to_a_small_group(monkeypatch: pytest.MonkeyPatch) -> None:
    run, outcome = alone_in_its_group(monkeypatch)
    assert outcome.total is None
    for name in run.honest:
        if name not in BESIDE:
            assert_refused(run, name, PolicyViolation, "check_groups")
    run.check_promises()


def test_no_site_agrees_to_a_small_group_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "check_groups", lambda *_: None)
    run, outcome = alone_in_its_group(monkeypatch)
    assert outcome.total is not None and len(outcome.survivors) == 7
    shown = outcome.total.reshape(3, run.policy.layout.words)[0]
    assert np.array_equal(shown, run.truth[1, VICTIM]), "the sum of its group is its update"
