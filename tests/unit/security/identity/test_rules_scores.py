"""Scores in manifests: slots by the number of hospitals that consent, and the same consent for a whole run."""

from __future__ import annotations

from pathlib import Path

import pytest

from lazaret.errors import ConfigError, ManifestRejected, PolicyViolation
from security.crypto import encoding
from security.identity import acceptance
from security.identity.manifest import Manifest
from security.identity.membership import aggregation_policy
from security.secagg.layout import SCORE, SQUARES
from tests.support.consortium_world import NOW, PLAN, PRIVACY, World

SITES = ("bern", "graz", "linz", "vienna", "wels", "zug")
NUMBERS = "\n[aggregation]\ncolluders = 1\nleast_survivors = 5\n"


def scores(*sites: str, more: str = "") -> str:
    return f"[scores]\nsites = [{', '.join(map(repr, sites))}]\n{more}".replace("'", '"')


def published(world: World, text: str) -> Manifest:
    world.write_plan(PLAN + NUMBERS + text)
    return world.publish()


def test_a_site_that_leaves_takes_its_consent_with_it_and_the_list_stays(tmp_path: Path) -> None:
    """All six consent, and five are in every sum. When one leaves, five of five still are; when two have left, the
    slots would tell too much, and the run cannot go on with them."""
    world = World.make(tmp_path, SITES)
    first = published(world, scores(*SITES))
    assert first.aggregation.layout.has(SQUARES) and all(first.scored(site) for site in SITES)
    world.authority.revoke("zug", "has left", now_ms=world.now)
    second = published(world, scores(*SITES))
    assert second.scores == first.scores and second.aggregation.layout.has(SQUARES) and "zug" not in second.sites
    assert acceptance.accept_newer(first, second) == second
    with pytest.raises(ManifestRejected, match="the scores or the privacy"):
        published(world, scores(*SITES[:5]))
    with pytest.raises(ManifestRejected, match="the scores or the privacy"):
        published(world, "")


def test_where_there_are_none(tmp_path: Path) -> None:
    world = World.make(tmp_path, SITES)
    fewer = published(world, scores(*SITES[:5]))
    assert fewer.aggregation.layout.has(SCORE) and not fewer.aggregation.layout.has(SQUARES), "three are unknown"
    assert aggregation_policy(fewer, now_ms=NOW).scorers == set(SITES[:5]), "whose scores hide each other"
    for number, text in enumerate((scores(*SITES[:4]), scores(*SITES) + PRIVACY), start=2):
        world.write_plan((PLAN + NUMBERS + text).replace("run-1", f"run-{number}"))
        manifest = world.publish()
        assert manifest.scores is not None and not manifest.aggregation.layout.has(SCORE)
        assert aggregation_policy(manifest, now_ms=NOW).scorers == frozenset()
    world.write_plan((PLAN + NUMBERS + scores("rome")).replace("run-1", "run-9"))
    with pytest.raises(ConfigError, match="rome is not enrolled"):
        world.publish()


def test_a_manifest_without_scores_has_one_form(tmp_path: Path) -> None:
    """Manifests from before keep their bytes, and nobody can write the same one in two ways."""
    world = World.make(tmp_path)
    world.write_plan(PLAN)
    manifest = world.publish()
    assert "scores" not in manifest.to_dict()
    with pytest.raises(ManifestRejected, match="left out"):
        Manifest.from_dict(encoding.loads(encoding.dumps(manifest.to_dict() | {"scores": None})))
    listed = manifest.to_dict() | {
        "scores": {"figure": "bacc", "sites": ["linz", "graz"], "patience": 0, "least_gain": "0"}
    }
    with pytest.raises((ManifestRejected, PolicyViolation), match="distinct and sorted"):
        acceptance.open_manifest(world.signed(Manifest.from_dict(listed)), world.authority.root, now_ms=NOW)
