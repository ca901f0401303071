"""What is kept for people: attempts as the engine's own effects tell them, and the slots of real sums."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from coordinator.effects import PUBLISHED
from coordinator.round_history import Figures, ReadOnlyHistory
from lazaret.errors import ConfigError
from security.secagg import messages
from security.secagg.certificates import Ack
from security.secagg.clips import Clips
from security.secagg.fixed_point import decode, encode
from security.secagg.layout import Layout
from tests.support.engine_world import EngineWorld

ROOT = Path(__file__).parents[3]
PACKAGES = ("benchmarks", "coordinator", "lazaret", "npr", "protos", "scripts", "security", "site_agent")


def attempts(folder: Path) -> list[tuple[object, ...]]:
    with sqlite3.connect(folder / "coordinator.sqlite") as db:
        query = "SELECT round, attempt, members, cohort, survivors, outcome FROM attempts ORDER BY round, attempt"
        return db.execute(query).fetchall()


def test_every_attempt_has_a_row_and_its_end(tmp_path: Path) -> None:
    world = EngineWorld(tmp_path, sites=5, rounds=2)
    world.silent = {("site4", messages.Shares)}
    world.run(until=2)
    world.kill_coordinator()
    everybody, four = "site0 site1 site2 site3 site4", "site0 site1 site2 site3"
    found = attempts(tmp_path)
    assert found[0] == (1, 1, 5, everybody, None, "sites missing at S2")
    assert found[1] == (1, 2, 4, four, four, "published")
    assert found[-1][5] == "published"
    assert all(row[5] is not None for row in found)


def test_survivors_are_those_whose_upload_was_whole(tmp_path: Path) -> None:
    world = EngineWorld(tmp_path, sites=5, rounds=1)
    world.silent = {("site4", messages.UploadHeader)}
    world.run(until=1)
    world.kill_coordinator()
    assert attempts(tmp_path)[0][4:] == ("site0 site1 site2 site3", "published")


@pytest.mark.parametrize("told", [False, True])
def test_figures_are_the_slots_of_the_sum_and_nothing_of_its_update(told: bool) -> None:
    blocks = [Clips(learning_rate=0.01, steps=10).weights("w", (8,))]
    slots = {"loss_exponent": 6, "hits_maximum": 64} if told else {}
    layout = Layout.of(blocks, roster_size=3, weight_cap=64, **slots)
    words = [
        encode(
            layout,
            np.full(8, 0.001 * number, dtype=np.float32),
            weight=10 * number,
            loss=2.5 * number if told else None,
            hits=number if told else None,
        ).words
        for number in (1, 2, 3)
    ]
    total = np.sum(words, axis=0, dtype=layout.dtype)
    figures = Figures.of(layout, total)
    assert figures is not None
    assert figures.weight == 60
    assert figures.loss == (pytest.approx(15.0, rel=1e-4) if told else None)
    assert figures.hits == (6 if told else None)
    decoded = decode(layout, total)
    assert (decoded.weight, decoded.loss, decoded.hits) == (figures.weight, figures.loss, figures.hits)
    assert Figures.of(layout, np.zeros_like(total)) is None


# The reader from outside.


def test_a_history_is_read_beside_the_process_that_writes_it(tmp_path: Path) -> None:
    """In a folder whose name means something in an address; nothing can be written through it."""
    folder = tmp_path / "state of 100% ?mode=rwc #1"
    world = EngineWorld(folder, rounds=2)
    with ReadOnlyHistory(world.storage.path) as history:
        assert [row.outcome for row in history.rounds()] == [None] and history.links() == []
        before = history.version()
        world.run(until=2)
        assert history.version() != before
        assert [(row.number, row.outcome) for row in history.rounds()] == [(1, PUBLISHED), (2, PUBLISHED)]
        assert history.links() == world.storage.history.links() and history.completed() == 2
        with pytest.raises(ConfigError, match="cannot read the database: attempt to write a readonly database"):
            history._ask("DELETE FROM rounds")
    world.kill_coordinator()


def test_a_folder_without_a_database_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.sqlite"
    with pytest.raises(ConfigError, match="no database yet") as raised, ReadOnlyHistory(path) as history:
        history.rounds()
    assert raised.value.where == str(path) and raised.value.hint
    assert list(tmp_path.iterdir()) == []


def test_the_chain_on_disk_is_the_one_in_memory(tmp_path: Path) -> None:
    """Storage computes the hash of a result from the record; the engine has it from the publication."""
    world = EngineWorld(tmp_path, rounds=3)
    world.run(until=3)
    assert len(world.engine.chain.links) == 3
    assert world.storage.history.links() == world.engine.chain.links
    world.kill_coordinator()


def test_a_sum_waits_for_its_check_until_the_certificate_is_there(tmp_path: Path) -> None:
    world = EngineWorld(tmp_path, rounds=1)
    world.silent = {(name, Ack) for name in world.names[1:]}
    world.run(until=1)
    found = world.storage.history.unchecked_sum()
    assert found is not None and (found.round, found.acknowledged) == (1, {world.names[0]})
    world.silent = set()
    for name in world.names:
        world.restart_site(name)
    for _ in range(5000):
        if not world.engine.check.open:
            break
        if not world.step():
            world.clock.advance(300)
            world.do_coordinator(world.engine.tick())
    assert world.storage.history.unchecked_sum() is None
    world.kill_coordinator()


def test_one_module_asks_the_database_and_one_writes_to_it() -> None:
    """Tables and columns are named where they are made, where they are written and where they are read."""
    sources = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    assert len(sources) > 100
    opens = {str(path.relative_to(ROOT)) for path in sources if "sqlite3" in path.read_text()}
    assert opens == {f"coordinator/{name}.py" for name in ("database", "round_history", "storage")}
    asks = {path.name for path in sources if re.search(r"\bSELECT\b.*\bFROM\b", path.read_text())}
    assert asks == {"round_history.py", "storage.py"}
    storage = (ROOT / "coordinator" / "storage.py").read_text()
    # Those that are there are parts of updates.
    assert not re.findall(r'execute\("SELECT', storage)
