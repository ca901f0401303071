"""A39: somebody computes the root's ECDSA key, as a quantum computer would, and signs manifests. Where the consortium
has turned on ML-DSA-65, a site that holds such a manifest takes none without the second signature.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA65PrivateKey

from lazaret.errors import ManifestRejected
from security.identity import acceptance, rules
from security.identity.acceptance import seal, sign, sign_ml_dsa
from security.identity.manifest import Manifest
from tests.support.consortium_world import World

SITE = "graz"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Version 1 has one signature, version 2 both; the site holds version 2."""
    world = World.make(tmp_path_factory.mktemp("world"))
    world.publish()
    world.identity(SITE).install_manifest(world.published(), now_ms=world.now)
    world.turn_on_ml_dsa()
    world.publish()
    world.identity(SITE).install_manifest(world.published(), now_ms=world.now)
    return world


@pytest.fixture
def world(made: World, tmp_path: Path) -> World:
    shutil.copytree(made.folder, tmp_path / "world")
    return World(tmp_path / "world", made.authority, made.clock)


def next_version(world: World, **changes: object) -> Manifest:
    """What the forger wants: here, that one round is enough for it."""
    held = world.authority.latest(now_ms=world.now)
    assert held is not None
    training = held.training.model_copy(update={"rounds": 1})
    update = {"version": held.version + 1, "previous": held.digest.hex(), "training": training}
    return held.model_copy(update={**update, **changes})


def plain(world: World) -> bytes:
    """As before ML-DSA: no key, no second signature."""
    listed = next_version(world)
    bare = [member.model_copy(update={"log_ml_dsa": None}) for member in listed.members]
    manifest = listed.model_copy(update={"root_ml_dsa": None, "coordinator": bare[0], "roster": tuple(bare[1:])})
    return seal(manifest, sign(manifest, world.key))


def own_key(world: World) -> bytes:
    """With a second key that the forger has made."""
    key = MLDSA65PrivateKey.generate()
    manifest = next_version(world, root_ml_dsa=key.public_key().public_bytes_raw().hex())
    return seal(manifest, sign(manifest, world.key), sign_ml_dsa(manifest, key))


def wrong_signature(world: World) -> bytes:
    """Under the consortium's key, which the forger does not have."""
    manifest = next_version(world)
    return seal(manifest, sign(manifest, world.key), sign_ml_dsa(manifest, MLDSA65PrivateKey.generate()))


def no_signature(world: World) -> bytes:
    manifest = next_version(world)
    return seal(manifest, sign(manifest, world.key))


FORGED = [
    (plain, "check_ml_dsa_kept"),
    (own_key, "check_ml_dsa_kept"),
    (wrong_signature, "check_ml_dsa_signature"),
    (no_signature, "check_ml_dsa_signature"),
]


@pytest.mark.parametrize("forge", [forge for forge, _ in FORGED])
def test_a_manifest_needs_both_signatures(world: World, forge: Callable[[World], bytes]) -> None:
    with pytest.raises(ManifestRejected, match="ML-DSA"):
        world.identity(SITE).install_manifest(forge(world), now_ms=world.now)
    held = world.identity(SITE).manifest(now_ms=world.now)
    assert held is not None and held.version == 2


@pytest.mark.parametrize(("forge", "check"), FORGED)
def test_a_manifest_needs_both_signatures_twin(
    world: World, forge: Callable[[World], bytes], check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance if hasattr(acceptance, check) else rules, check, lambda *_: None)
    assert world.identity(SITE).install_manifest(forge(world), now_ms=world.now).training.rounds == 1


def test_the_consortium_goes_on_with_both_signatures(world: World) -> None:
    manifest = next_version(world)
    data = seal(manifest, sign(manifest, world.key), sign_ml_dsa(manifest, world.authority.unlock_ml_dsa(None)))
    assert world.identity(SITE).install_manifest(data, now_ms=world.now).version == 3
