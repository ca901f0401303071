"""What a hospital permits: every rule refuses by its own name, and nothing else does."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest

from lazaret.errors import NotNow, PolicyViolation
from security.identity.manifest import Manifest
from site_agent.contribution import weight_of
from site_agent.policy import Range, SitePolicy, check_standing
from site_agent.run import site_membership
from tests.support.consortium_world import DAY, PLAN, PRIVACY, World

NOON = dt.datetime(2027, 1, 15, 12, 0)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    world = World.make(tmp_path_factory.mktemp("policy"))
    world.write_plan(PLAN)
    return world.publish()


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    world = World.make(tmp_path_factory.mktemp("private"))
    world.write_plan(PLAN + PRIVACY)
    return world.publish()


def test_a_round_for_which_too_few_certificates_are_left_is_not_trained_for(tmp_path: Path) -> None:
    """Also by a site whose own certificate is good: the others' would be missing in the cohort."""
    world = World.make(tmp_path)
    world.write_plan(PLAN)
    for site in ("linz", "vienna"):
        world.authority.renew(world.key, site, None, now_ms=world.now, days=10)
    manifest = world.publish()

    def look(days: float) -> None:
        now = world.now + int(days * DAY)
        check_standing(site_membership(world.identity("graz"), manifest, "graz", now_ms=now), now_ms=now)

    look(0)
    with pytest.raises(NotNow, match="1 sites have one, 3 are needed"):
        look(11)
    with pytest.raises(NotNow, match="1 sites have one, 3 are needed"):
        look(10 - manifest.timing.train / 86_400 / 2)  # good now, and not until the end of the round


def test_an_empty_policy_permits_what_the_consortium_signed(manifest: Manifest) -> None:
    SitePolicy().check_order(manifest, 1, done=0, now=NOON)
    SitePolicy().check_cohort(3)
    SitePolicy().check_bytes(10**12)


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        (SitePolicy(methods=("fedavg",)), "methods"),
        (SitePolicy(architectures=("efficientnet_b0",)), "architectures"),
        (SitePolicy(settings={"learning_rate": Range(most=0.0001)}), "settings.learning_rate"),
        (SitePolicy(settings={"batch_size": Range(least=65)}), "settings.batch_size"),
        (SitePolicy(settings={"momentum": Range(most=1)}), "settings.momentum"),
        (SitePolicy(require_privacy=True), "require_privacy"),
        (SitePolicy(hours="20:00-06:00"), "hours"),
        (SitePolicy(most_bytes_per_round=10), "most_bytes_per_round"),
    ],
)
def test_each_rule_refuses_by_its_name(manifest: Manifest, policy: SitePolicy, rule: str) -> None:
    with pytest.raises(PolicyViolation) as caught:
        policy.check_order(manifest, 1, done=0, now=NOON)
    assert caught.value.where == f"[policy] {rule}"


@pytest.mark.parametrize(
    "policy",
    [
        SitePolicy(methods=("fednpr-per",)),
        SitePolicy(architectures=("tiny",)),
        SitePolicy(settings={"learning_rate": Range(least=0.0001, most=0.001), "batch_size": Range(most=64)}),
        SitePolicy(hours="08:00-20:00"),
        SitePolicy(hours="20:00-13:00"),
        SitePolicy(require_covered_audit=True),
        SitePolicy(most_epsilon=0.1),
    ],
)
def test_what_lies_within_the_rules_is_permitted(manifest: Manifest, policy: SitePolicy) -> None:
    policy.check_order(manifest, 5, done=4, now=NOON)


def test_a_sum_that_is_only_sampled_can_be_refused(manifest: Manifest) -> None:
    sampled = manifest.model_copy(update={"audit": manifest.audit.model_copy(update={"mode": "sampled"})})
    SitePolicy().check_federation(sampled)
    with pytest.raises(PolicyViolation, match="only sampled") as caught:
        SitePolicy(require_covered_audit=True).check_federation(sampled)
    assert caught.value.where == "[policy] require_covered_audit"


def test_delta_has_a_ceiling(private: Manifest) -> None:
    assert private.privacy is not None
    delta = float(private.privacy.delta)
    SitePolicy(most_delta=delta).check_federation(private)
    with pytest.raises(PolicyViolation, match="is above") as caught:
        SitePolicy(most_delta=delta / 2).check_federation(private)
    assert caught.value.where == "[policy] most_delta"


def test_epsilon_has_a_ceiling(private: Manifest) -> None:
    SitePolicy(most_epsilon=8, require_privacy=True).check_federation(private)
    with pytest.raises(PolicyViolation, match="is above 4"):
        SitePolicy(most_epsilon=4).check_federation(private)


def test_rounds_end(manifest: Manifest) -> None:
    policy = SitePolicy(most_rounds=2)
    policy.check_order(manifest, 7, done=1, now=NOON)
    with pytest.raises(PolicyViolation, match="has trained 2 rounds"):
        policy.check_order(manifest, 7, done=2, now=NOON)
    with pytest.raises(PolicyViolation, match="run of 5 rounds"):
        SitePolicy().check_order(manifest, 1000, done=0, now=NOON)


def test_small_cohorts_are_refused() -> None:
    SitePolicy(least_cohort=4).check_cohort(4)
    with pytest.raises(PolicyViolation, match="cohort of 3"):
        SitePolicy(least_cohort=4).check_cohort(3)


def test_weights_tell_as_much_as_the_manifest_wants() -> None:
    assert [weight_of(n, "samples", 100) for n in (1, 77, 1000)] == [1, 77, 100]
    assert [weight_of(n, "bucketed", 4096) for n in (1, 2, 3, 65, 64, 5000)] == [1, 2, 4, 128, 64, 4096]
    assert [weight_of(n, "uniform", 100) for n in (1, 1000)] == [1, 1]
