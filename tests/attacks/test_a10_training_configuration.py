"""A10: "one step on one image, with a huge learning rate", for the victim alone or for all.

The attacker's configuration makes the others' updates zero and the victim's a picture. Sites train, and join an
aggregation, only under a configuration that the consortium listed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lazaret.errors import PolicyViolation
from security.secagg import fixed_point, messages, statements
from security.secagg.site import checks
from tests.support.evil import VICTIM, EvilCoordinator, assert_recovered, assert_refused, assert_safe, evil

CHOSEN = b"one image, one step, rate one...".ljust(32, b".")[:32]


def one_image_for_all() -> EvilCoordinator:
    run = evil()
    run.config_hash = CHOSEN
    layout = run.policy.layout
    zero = fixed_point.encode(layout, np.zeros(layout.state_words, dtype=np.float32), weight=1).words
    updates = {name: words if name == VICTIM else zero for name, words in run.updates(1).items()}
    run.begin_round(updates)
    run.spoils.inputs |= {(1, name): words for name, words in updates.items() if name != VICTIM}
    run.launch(run.plan())
    return run


def test_a_configuration_that_is_not_listed() -> None:
    run = one_image_for_all()
    for name in run.honest:
        assert_refused(run, name, PolicyViolation, "check_plan_config")
    assert_safe(run)


def test_a_configuration_that_is_not_listed_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "check_plan_config", lambda *_: None)
    assert_recovered(one_image_for_all())


def test_another_configuration_for_one_site() -> None:
    run = evil()

    def change(plan: messages.Plan, site: str) -> messages.Plan:
        context = replace(plan.context, config_hash=CHOSEN)
        return replace(plan, context=context, signature=run.core.signer.sign(statements.plan(context)))

    run.change(messages.Plan, change, to=VICTIM)
    run.open_round()
    run.launch(run.plan())
    assert_refused(run, VICTIM, PolicyViolation, "check_plan_config")
    assert_safe(run)


def test_a_listed_configuration_that_the_update_was_not_trained_under() -> None:
    run = evil(wide=False)
    run.machine().core.mandate.policy = replace(run.policy, config_hashes=run.policy.config_hashes | {CHOSEN})
    run.open_round()
    run.launch(run.plan(config_hash=CHOSEN))
    assert_refused(run, VICTIM, PolicyViolation, "check_plan_config")
    run.check_promises()
