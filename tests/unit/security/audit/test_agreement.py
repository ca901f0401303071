"""What an auditor takes from a manifest."""

from __future__ import annotations

from pathlib import Path

from security.audit.agreement import agreement_of
from tests.support.consortium_world import PRIVACY, SHARED_NOISE, World


def test_shared_noise_is_read_at_the_noise_that_the_manifest_asks_for(tmp_path: Path) -> None:
    """0.8 times this clip fits the ring, 1.0 times does not."""
    world = World.make(tmp_path)
    world.write_plan(SHARED_NOISE + PRIVACY.replace("clip = 1\n", "clip = 300\n"))
    rules = agreement_of(world.publish(), "00").rules
    assert rules is not None and rules.privacy is not None and rules.privacy.noise_floor == 0.8
    assert rules.privacy.shared is not None and rules.privacy.shared.honest == 2 and rules.privacy.steps == 1
