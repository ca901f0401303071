"""Models that a cell leaves predict as they did when they were trained: each kind its own."""

import numpy as np
import pytest

from lazaret.errors import DataError
from npr.lab.cell import build_federation, load_data
from npr.lab.models import MODELS, TrainedCell, save_models
from npr.lab.plan import Cell, DataSettings, ModelSettings, Settings

SETTINGS = Settings(
    data=DataSettings(source="generated:scale=0.001,sites=3", image_size=16),
    model=ModelSettings(architecture="test_efficientnet"),
    rounds=2,
    train={"batch_size": 8, "learning_rate": 0.01},
)


def scores(predictions):
    return np.concatenate([p.scores for p in predictions])


@pytest.mark.parametrize("method", ["fedavg", "fednpr-per", "fedrep"])
def test_saved_models_are_the_trained_ones(method, tmp_path):
    cell, dataset = Cell(method=method, seed=0, fold="fold"), load_data(SETTINGS, "fold")
    federation = build_federation(SETTINGS, cell, dataset)
    for _ in range(SETTINGS.rounds):
        federation.run_round()
    kinds = federation.method.reports
    before = {"local": scores(federation.evaluate("local", "validation"))}
    save_models(federation, tmp_path / MODELS, {"cell": cell.key})
    expected = {kind: scores(federation.evaluate(kind, "validation")) for kind in kinds if kind != "local"} | before
    found = TrainedCell(build_federation(SETTINGS, cell, dataset), tmp_path).validate()
    assert found.keys() == set(kinds)
    for kind in kinds:
        assert scores(found[kind]["head"]) == pytest.approx(expected[kind], abs=1e-6), kind
    other = next(kind for kind in kinds if kind != "local")
    assert np.abs(expected[other] - expected["local"]).max() > 1e-4, "the twin: one saved as the other would be seen"


def test_models_that_are_gone_are_missed_by_name(tmp_path):
    cell, dataset = Cell(method="fedavg", seed=0, fold="fold"), load_data(SETTINGS, "fold")
    with pytest.raises(DataError, match="trained models are gone"):
        TrainedCell(build_federation(SETTINGS, cell, dataset), tmp_path)
