"""What is kept for people: attempts as the engine's own effects tell them, and the slots of real sums."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from coordinator.round_history import Figures
from security.secagg import messages
from security.secagg.fixed_point import decode, encode
from security.secagg.layout import Clips, Layout
from tests.support.engine_world import EngineWorld


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
