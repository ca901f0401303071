"""Two federations of the same name, and the manifest of the first."""

from __future__ import annotations

import pytest

from security.identity.manifest import Manifest
from tests.support.consortium_world import World


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.make(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def manifest(world: World) -> Manifest:
    return world.publish()


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Another federation of the same name and with the same members, under another root."""
    other = World.enrolled(tmp_path_factory.mktemp("theirs"))
    other.publish()
    return other
