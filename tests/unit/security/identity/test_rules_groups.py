"""Groups of sites in manifests: commitments first, then secrets, and then the same groups for the whole run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lazaret.errors import ConfigError, ManifestRejected, PolicyViolation
from security.consortium.show import warnings
from security.identity import acceptance, rules
from security.identity.manifest import Manifest
from security.identity.membership import aggregation_policy
from security.secagg.groups import draw_commitment, drawn, least_sites
from security.secagg.thresholds import least_honest
from tests.support.consortium_world import NOW, PLAN, PRIVACY, World

NINE = tuple(f"site{number}" for number in range(9))
GROUPS = "\n[aggregation]\ncolluders = 1\nweight_cap = 256\ngroups = 3\n"


SHOWN = b"m" * 32


def secrets(world: World, sites: tuple[str, ...] = NINE) -> str:
    lines = (f'{name} = "{world.identity(name).draw_secret().hex()}"' for name in sites)
    return "[aggregation.secrets]\n" + "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.make(tmp_path_factory.mktemp("groups"), NINE)


@pytest.fixture(scope="module")
def both(world: World) -> tuple[Manifest, Manifest]:
    """Commitments, then secrets."""
    world.write_plan(PLAN + GROUPS)
    first = world.publish()
    world.write_plan(PLAN + GROUPS + secrets(world))
    return first, world.publish()


def test_before_the_draw_nobody_is_in_a_cohort(both: tuple[Manifest, Manifest]) -> None:
    policy = aggregation_policy(both[0], now_ms=NOW)
    assert policy.undrawn and policy.groups is None and policy.least_cohort > len(NINE)
    assert not policy.hides(NINE)
    with pytest.raises(PolicyViolation, match="not drawn yet"):
        policy.check_groups(NINE, "plan")
    assert any("no site trains until" in note for note in warnings(both[0]))


def test_all_secrets_together_give_the_groups(both: tuple[Manifest, Manifest]) -> None:
    policy = aggregation_policy(both[1], now_ms=NOW)
    assert policy.groups is not None and policy.hides(NINE) and policy.sums == 3
    assert sorted(site for group in policy.groups.members for site in group) == list(NINE)
    assert {len(group) for group in policy.groups.members} == {3}
    notes = [note for note in warnings(both[1]) if "hides among the 3 sites of its group" in note]
    assert len(notes) == 1 and "instead of among 9" in notes[0], "what it costs is said"
    acceptance.accept_newer(both[0], both[1])


def test_every_secret_changes_the_draw() -> None:
    known = {name: bytes([number]) * 32 for number, name in enumerate(NINE)}
    first = drawn(known, 3, SHOWN)
    others = [drawn(known | {name: b"x" * 32}, 3, SHOWN) for name in NINE]
    assert all(other != first for other in [*others, drawn(known, 3, bytes(32))])
    assert draw_commitment("a", b"1" * 32) != draw_commitment("b", b"1" * 32), "a commitment cannot be copied"


def changed(manifest: Manifest, *, secrets: dict[str, str] | None = None, **table: object) -> Manifest:
    groups = manifest.aggregation.groups
    assert groups is not None
    values = groups.secrets if secrets is None else secrets
    groups = groups.model_copy(update={**table, "secrets": values})
    return manifest.model_copy(update={"aggregation": manifest.aggregation.model_copy(update={"groups": groups})})


def one_wrong(manifest: Manifest) -> Manifest:
    assert manifest.aggregation.groups is not None
    return changed(manifest, secrets=manifest.aggregation.groups.secrets | {"site4": "00" * 32})


def one_missing(manifest: Manifest) -> Manifest:
    assert manifest.aggregation.groups is not None
    return changed(manifest, secrets={k: v for k, v in manifest.aggregation.groups.secrets.items() if k != "site4"})


@pytest.mark.parametrize("forge", [one_wrong, one_missing])
def test_a_secret_that_was_not_committed_to(
    world: World, both: tuple[Manifest, Manifest], forge: Callable[[Manifest], Manifest]
) -> None:
    with pytest.raises((ManifestRejected, PolicyViolation), match=r"secret of site4|too few"):
        rules.check_groups(forge(both[1]))


def test_a_secret_that_was_not_committed_to_twin(
    world: World, both: tuple[Manifest, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without commitments, whoever opens last tries secrets until the victim is in the group it wants."""
    monkeypatch.setattr(rules, "CONSISTENCY", tuple(c for c in rules.CONSISTENCY if c is not rules.check_groups))
    for trial in range(200):
        assert both[1].aggregation.groups is not None
        tried = changed(both[1], secrets=both[1].aggregation.groups.secrets | {"site4": f"{trial:064x}"})
        opened = acceptance.open_manifest(world.signed(tried), world.authority.root, now_ms=NOW)
        policy = aggregation_policy(opened, now_ms=NOW)
        if policy.sum_of("site4") == policy.sum_of("site0") == policy.sum_of("site8"):
            return
    pytest.fail("no secret of 200 put the colluder and its friend beside the victim")


def next_of(manifest: Manifest, source: Manifest) -> Manifest:
    return source.model_copy(update={"version": manifest.version + 1, "previous": manifest.digest.hex()})


def test_groups_stay_for_the_whole_run(both: tuple[Manifest, Manifest]) -> None:
    first, second = both
    acceptance.accept_newer(second, next_of(second, second))
    faults = [
        (second, changed(second, combine="trimmed-mean")),
        (second, changed(second, secrets={}, shown=None)),
        (second, changed(second, shown="11" * 32)),
        (second, first.model_copy(update={"aggregation": first.aggregation.model_copy(update={"groups": None})})),
    ]
    for before, offered in faults:
        with pytest.raises(ManifestRejected, match="changes the groups"):
            acceptance.accept_newer(before, next_of(before, offered))


def test_secrets_open_only_what_was_public_before(both: tuple[Manifest, Manifest]) -> None:
    first, second = both
    roster = tuple(m.model_copy(update={"draw": "11" * 32}) if m.id == "site4" else m for m in first.roster)
    with pytest.raises(ManifestRejected, match="not committed to before"):
        acceptance.accept_newer(other := first.model_copy(update={"roster": roster}), next_of(other, second))
    plain = first.model_copy(update={"aggregation": first.aggregation.model_copy(update={"groups": None})})
    with pytest.raises(ManifestRejected, match="not committed to before"):
        acceptance.accept_newer(plain, next_of(plain, second))
    later = second.model_copy(update={"version": first.version + 2})
    acceptance.accept_newer(first, later)  # the version between, in which nothing was opened, is not known here
    for known in (other, plain):
        with pytest.raises(ManifestRejected, match="not committed to before"):
            acceptance.accept_newer(known, later)
    with pytest.raises(ManifestRejected, match="first manifest of the run"):
        acceptance.accept_newer(None, second.model_copy(update={"version": 1, "previous": None}))
    with pytest.raises(ManifestRejected, match="first manifest of the run"):
        acceptance.accept_newer(other := first.model_copy(update={"run": "run-0"}), next_of(other, second))


# A second run, when the secrets of the first draw are known to everybody.


TRIES = 12


def beside_the_victim(world: World, *, blind: bool) -> int:
    """site4 enrols anew when all other secrets are known, and finds twelve secrets with each of which it would be
    beside its friend and the victim in the coming draw, as far as it can foresee it. Returns with how many it is."""
    wanted = {"site4", "site8", "site0"}

    def beside(parts: tuple[tuple[str, ...], ...]) -> bool:
        return any(wanted == set(part) for part in parts)

    known = {name: world.identity(name).draw_secret() for name in NINE}
    tried = (number.to_bytes(32, "big") for number in range(5000))
    fitting = [secret for secret in tried if beside(drawn(known | {"site4": secret}, 3, bytes(32)))][:TRIES]
    world.write_plan(PLAN.replace("run-1", "run-2") + GROUPS)
    shown = bytes(32) if blind else world.publish().digest
    return sum(beside(drawn(known | {"site4": secret}, 3, shown)) for secret in fitting)


@pytest.fixture
def later(tmp_path: Path) -> World:
    return World.make(tmp_path, NINE)


def test_who_enrols_after_a_draw_cannot_fit_its_secret_to_those_that_were_opened(later: World) -> None:
    assert beside_the_victim(later, blind=False) < TRIES // 2, "of 28 secrets one is good by chance"


def test_who_enrols_after_a_draw_twin(later: World) -> None:
    """Secrets alone, as if every draw followed the same manifest."""
    assert beside_the_victim(later, blind=True) == TRIES


def test_a_draw_follows_the_manifest_that_showed_the_commitments(both: tuple[Manifest, Manifest]) -> None:
    first, second = both
    assert second.aggregation.groups is not None and second.aggregation.groups.shown == first.digest.hex()
    with pytest.raises(ManifestRejected, match="not committed to before"):
        acceptance.accept_newer(first, changed(second, shown="11" * 32))
    with pytest.raises(ManifestRejected, match="with secrets alone"):
        rules.check_groups(changed(second, shown=None))
    with pytest.raises(ManifestRejected, match="with secrets alone"):
        rules.check_groups(changed(first, shown="11" * 32))


def test_secrets_before_commitments_are_not_published(tmp_path: Path) -> None:
    world = World.make(tmp_path, NINE)
    world.write_plan(PLAN + GROUPS + secrets(world))
    with pytest.raises(ConfigError, match="has shown the commitments"):
        world.publish()


def test_too_few_sites_are_refused_when_it_is_published(tmp_path: Path) -> None:
    world = World.make(tmp_path)
    world.write_plan(PLAN + GROUPS)
    with pytest.raises(PolicyViolation, match="too few for 3 groups"):
        world.publish()
    world.write_plan(PLAN + '[aggregation.secrets]\ngraz = "' + "00" * 32 + '"\n')
    with pytest.raises(ConfigError, match="no groups"):
        world.publish()


SHARED = '"dp.noise" = "shared"\n"dp.rate" = 1\n"dp.steps" = 1\n"dp.engine" = "fast"\n"dp.trainable" = "head"\n'


def test_noise_that_all_sites_share_is_not_in_the_sum_of_a_group(world: World) -> None:
    """It would be booked as the noise of three honest sites, and a group's sum has that of two."""
    assert least_honest(roster=9, c=1, m=3) == 3 > least_sites(c=1, m=3) - 1
    world.write_plan(PLAN.replace("steps = 50", "steps = 1") + SHARED + PRIVACY + GROUPS)
    with pytest.raises(ConfigError, match="the sums of groups are opened apart"):
        world.publish()


def test_a_round_needs_sites_of_every_group(both: tuple[Manifest, Manifest]) -> None:
    policy = aggregation_policy(both[1], now_ms=NOW)
    assert both[0].least_cohort == both[1].least_cohort == policy.least_cohort == 9
