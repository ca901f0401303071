"""A33, the part that is nobody's fault: three sites leave in one outage and come back one after the other.

Each return is a pair of sums that differ by one site. An honest coordinator therefore lets those who left come back
together (docs/spec/secure-aggregation.md, section 11). Then the sums show the three together, and none alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator import attendance
from security.secagg.site import differences
from tests.support.engine_world import EngineWorld

LEFT = ["site6", "site7", "site8"]


def after_an_outage(folder: Path) -> tuple[list[set[str]], dict[str, float]]:
    """Rounds of nine sites: all, then without three, which come back one by one, a round apart. Returns who was in
    which sum, and the leverage on each of the three with one colluder."""
    world = EngineWorld(folder, sites=9, rounds=6)
    world.run(until=1)
    for name in LEFT:
        world.disconnect(name)
    world.run(until=2)
    for done, name in enumerate(LEFT, 3):
        world.connect(name)
        world.run(until=done)
    world.run(until=6)
    sums = [set(found) for found in reversed(world.engine.chain.cohorts(most=6))]
    return sums, {name: differences.leverage([sorted(found) for found in sums], name, c=1) for name in LEFT}


def test_who_left_together_comes_back_together(tmp_path: Path) -> None:
    sums, shown = after_an_outage(tmp_path)
    everybody = {f"site{number}" for number in range(9)}
    assert sums[0] == everybody and sums[1] == everybody - set(LEFT)
    assert sums[-1] == everybody, "nobody waits for ever"
    assert all(set(LEFT) <= found or not set(LEFT) & found for found in sums)
    assert shown == dict.fromkeys(LEFT, 0.0)


def test_twin_who_comes_back_alone_is_shown_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attendance, "held_back", lambda *_, **__: set())
    sums, shown = after_an_outage(tmp_path)
    assert [len(found) for found in sums[:5]] == [9, 6, 7, 8, 9]
    assert min(shown.values()) > differences.ALARM_LEVERAGE
