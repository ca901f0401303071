"""A site and those who sign its checkpoints."""

from __future__ import annotations

from pathlib import Path

from security.log.note import KeyType, NoteSigner, checkpoint_of
from security.secagg import relay
from security.secagg.relay import HeadSignature
from tests.support.consortium_world import PLAN
from tests.support.site_world import MORE, SiteWorld

OBSERVER = NoteSigner.from_seed("ethics.lesions/witness", bytes(range(32)), KeyType.COSIGNER)


def test_an_observers_signature_is_kept_and_nothing_is_offered_to_it(tmp_path: Path) -> None:
    world = SiteWorld(tmp_path, plan=PLAN + MORE + f'[audit]\nwitnesses = ["{OBSERVER.key}"]\n')
    world.start_all()
    agent = world.agents["graz"]
    note = agent.log.checkpoint()
    signature = OBSERVER.cosign(note.text, world.clock.now_ms() // 1000)
    size = checkpoint_of(note).size
    world.hub.send(
        "graz", relay.Cosignature(origin=agent.log.origin, size=size, signature=HeadSignature.of(signature))
    )
    world.hub.pump()
    assert agent.session.phase == "live"
    assert [entry["cosigner"] for entry in world.entries("graz", "cosigned")] == [OBSERVER.key.name]
    assert list(agent.witnessing.last_head()) == []


def test_the_last_head_is_offered_to_those_who_are_still_listed(tmp_path: Path) -> None:
    """A name that is on no roster any more is in no message."""
    world = SiteWorld(tmp_path)
    world.start_all()
    witnessing = world.agents["graz"].witnessing
    witnessing._held = {"linz": 0, "left": 0}
    assert [head.witness for head in witnessing.last_head()] == ["linz"]
