"""Shared noise in manifests: it fits the ring at the manifest's least noise, perhaps not with more."""

from __future__ import annotations

from pathlib import Path

import pytest

from lazaret.errors import ConfigError, ManifestRejected
from security.identity import acceptance, rules
from tests.support.consortium_world import PRIVACY, SHARED_NOISE, World

LIMIT = PRIVACY.replace("clip = 1\n", "clip = 300\n")  # 0.8 times this fits the ring of 32 bits, 1.0 times does not


def test_the_least_noise_is_what_must_fit(tmp_path: Path) -> None:
    world = World.make(tmp_path)
    world.write_plan(SHARED_NOISE + LIMIT)
    first = world.publish()
    with pytest.raises(ConfigError, match="too small"):
        rules.private_schedule(first, multiplier=1.0)
    second = world.publish()
    assert acceptance.accept_newer(first, second) is second


def test_a_run_keeps_its_ring_units(tmp_path: Path) -> None:
    world = World.make(tmp_path)
    world.write_plan(SHARED_NOISE + LIMIT)
    world.publish()
    world.write_plan(SHARED_NOISE.replace("weight_cap = 256", "weight_cap = 512") + LIMIT)
    with pytest.raises(ManifestRejected, match="the privacy of run"):
        world.publish()
