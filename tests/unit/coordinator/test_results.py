"""Where each site stands in the chain, and what it is sent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from coordinator.results import Standings
from security.identity.membership import BareMandate
from security.secagg.effects import Send, SendFrames
from security.secagg.layout import Layout
from security.secagg.messages import Jump
from tests.support.engine_world import EngineWorld

NEWCOMER = "site3"


def test_a_site_that_was_sent_nothing_is_brought_later(tmp_path: Path) -> None:
    """It begins from a newer manifest, under which no state can be shown yet; as soon as one can, it is sent."""
    world = EngineWorld(tmp_path, rounds=1)
    world.run(until=1)
    chain, standings = world.engine.chain, Standings(world.engine.chain)
    assert chain.head_check() is not None
    mandate, policy = chain._mandate, world.base.policy
    wider = Layout.of([*policy.layout.state_blocks], roster_size=9, weight_cap=1)
    chain._mandate = BareMandate(replace(policy, layout=wider), mandate.signer)
    assert not any(isinstance(one, SendFrames) for one in standings.greet(NEWCOMER, 0, b"n" * 32))
    assert standings.fetch(NEWCOMER) is None
    chain._mandate = mandate
    sent = standings.fetch(NEWCOMER)
    assert sent is not None and any(isinstance(one, Send) and isinstance(one.message, Jump) for one in sent)
    assert standings.fetch(NEWCOMER) is None, "once for each result"
    world.kill_coordinator()


def test_a_site_that_was_brought_is_not_sent_the_same_again(tmp_path: Path) -> None:
    world = EngineWorld(tmp_path, rounds=1)
    world.run(until=1)
    standings = Standings(world.engine.chain)
    assert standings.greet(NEWCOMER, 0, b"n" * 32)
    assert standings.fetch(NEWCOMER) is None
    world.kill_coordinator()
