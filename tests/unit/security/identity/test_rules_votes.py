"""Votes in manifests: off unless asked for, and refused where they would be unsafe."""

from __future__ import annotations

import pytest

from lazaret.errors import ManifestRejected, PolicyViolation
from security.identity import acceptance
from security.identity.membership import aggregation_policy
from tests.support.consortium_world import NOW, PLAN, PRIVACY, World

STRICT = "[audit]\nstrict = true\nvote_drop = 0.05\n"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.make(tmp_path_factory.mktemp("votes"))


def test_there_is_no_vote_unless_the_consortium_asks_for_one(world: World) -> None:
    world.write_plan(PLAN)
    assert not aggregation_policy(world.publish(), now_ms=NOW).vote
    world.write_plan(PLAN.replace("run-1", "run-2") + STRICT)
    manifest = world.publish()
    assert manifest.audit.vote_drop == "0.05" and aggregation_policy(manifest, now_ms=NOW).vote


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (PLAN + STRICT.replace("true", "false"), "strict"),
        (PLAN + "[aggregation]\nsingle_history = false\n" + STRICT, "single_history"),
        (PLAN + STRICT + PRIVACY, "privacy"),
    ],
)
def test_what_a_vote_needs(world: World, plan: str, reason: str) -> None:
    """Without one history two vote sets could both be followed; under DP each vote would have to be booked."""
    world.write_plan(plan.replace("run-1", "run-5"))
    with pytest.raises(PolicyViolation, match=f"a vote needs .*{reason}"):
        world.publish()


def test_a_vote_begins_or_ends_with_a_run(world: World) -> None:
    world.write_plan(PLAN.replace("run-1", "run-3"))
    plain = world.publish()
    world.write_plan(PLAN.replace("run-1", "run-3") + STRICT)
    with pytest.raises(ManifestRejected, match="the vote"):
        world.publish()
    world.write_plan(PLAN.replace("run-1", "run-4") + STRICT)
    acceptance.accept_newer(plain, world.publish())
