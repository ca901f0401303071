"""The laboratory with several labels of an image: trained, chosen, judged, and what is refused before anything runs."""

from __future__ import annotations

import numpy as np
import pytest

from lazaret.errors import ConfigError, PolicyViolation
from npr.data.generated import FINDINGS
from npr.lab.cell import run_cell
from npr.lab.choices import settle
from npr.lab.plan import Cell, DataSettings, ModelSettings, Settings
from npr.lab.request import PRESETS, make_plan
from npr.lab.store import ResultStore
from npr.lab.summary import _recall

SETTINGS = Settings(
    data=DataSettings(source="generated:scale=0.005,sites=3", image_size=16),
    model=ModelSettings(architecture="test_efficientnet"),
    rounds=1,
    evaluate_every=1,
    train={"batch_size": 8, "labels": "many"},
)


def test_a_cell_from_training_to_the_table(tmp_path):
    store = ResultStore(tmp_path)
    cell = Cell(method="fednpr-per", seed=0, fold="fold")
    store.record(cell, run_cell(SETTINGS, cell, store.directory(cell), on_round=lambda *_: None))
    settle(SETTINGS, [cell], store)
    result = store.result(cell)
    assert result["classes"] == list(FINDINGS)
    parts = set(result["validation"]["personal"])
    assert {"head", "prototypes", "0.75 head + 0.25 prototypes"} <= parts
    assert not any("refit" in part for part in parts), "it is fitted to one class of each image"
    final = result["final"]["personal"]["head"]
    assert np.array(final["confusion"]).shape == (4, 4)
    assert _recall([final]) == pytest.approx(100 * final["pooled_recall"])
    assert not (store.directory(cell) / "maps.npz").exists()


@pytest.mark.parametrize(
    ("asked", "error", "what"),
    [
        ({"methods": ["fedavg", "fedrs"]}, ConfigError, "method = 'fedrs': it scales the logits of absent classes"),
        ({"train": {"labels": "many", "dp.epsilon": 8.0, "assign": "nearest"}}, PolicyViolation, "labels = 'many'"),
        ({"grids": {None: {"labels": ["one", "many"]}}, "train": {}}, ConfigError, "all rows have the same labels"),
        ({"tuned": {None: {"labels": ["one", "many"]}}, "train": {}}, ConfigError, "all rows have the same labels"),
    ],
)
def test_refused_before_anything_is_opened(asked, error, what):
    given = {"methods": ["fedavg"], "train": {"labels": "many"}, **asked}
    with pytest.raises(error, match=what):
        make_plan(PRESETS["quick"], **given)
