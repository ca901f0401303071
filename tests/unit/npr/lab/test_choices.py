"""Choices are made on the validation side and fixed before test images are read; and what happens without that."""

import json
from pathlib import Path

import numpy as np
import pytest

from lazaret.errors import ConfigError
from npr.lab import cell as cells
from npr.lab import choices
from npr.lab.cell import load_data, run_cell, train_digest
from npr.lab.choices import Choices, choose, judge, open_test, settle
from npr.lab.models import BEST_SITE
from npr.lab.plan import Cell, DataSettings, LabPlan, ModelSettings, Settings
from npr.lab.store import ResultStore
from npr.metrics import Predictions, load_predictions, save_predictions

SETTINGS = Settings(
    data=DataSettings(source="generated:scale=0.001,sites=3", image_size=16),
    model=ModelSettings(architecture="test_efficientnet"),
    rounds=1,
    train={"batch_size": 8},
)
FOLD = "fold"


def made(*rates, method="fedavg", seed=0):
    return [Cell(method=method, seed=seed, fold=FOLD, tuned=(("learning_rate", rate),)) for rate in rates]


@pytest.fixture
def store(tmp_path):
    return ResultStore(tmp_path)


def trained(store, wanted):
    for cell in wanted:
        store.record(cell, run_cell(SETTINGS, cell, store.directory(cell), on_round=lambda *_: None))
    return wanted


def test_the_three_sides_hold_different_patients():
    dataset = load_data(SETTINGS, FOLD, with_test=True)
    for site in dataset.sites:
        sides = [set(side.units) for side in (site.train, site.test, site.validation)]
        assert all(sides[0]) and not (sides[0] & sides[1] or sides[0] & sides[2] or sides[1] & sides[2])
    assert all(len(site.test) == 0 for site in load_data(SETTINGS, FOLD).sites)


def test_one_module_alone_opens_the_test_side():
    root = Path(choices.__file__).parents[2]
    opening = [path for path in (root / "npr").rglob("*.py") if "with_test=True" in path.read_text()]
    assert [path.name for path in opening] == ["choices.py"]


def test_no_test_image_is_read_before_the_choice_is_fixed(store, monkeypatch):
    asked = []
    original = cells.load_data
    monkeypatch.setattr(choices, "load_data", lambda *a, **k: asked.append(k) or original(*a, **k))
    (cell,) = trained(store, made(0.01))
    folder = store.directory(cell)
    with pytest.raises(ConfigError, match="nothing is chosen yet"):
        judge(store.out, SETTINGS, cell, folder)
    assert not asked and not list(folder.glob("test-*"))
    settle(SETTINGS, [cell], store)
    assert asked == [{"with_test": True}] and "final" in store.result(cell)
    (folder / "judged.json").stat()
    with pytest.raises(ConfigError, match="read once"):
        open_test(store.out, SETTINGS, cell, folder)


def test_values_that_were_not_chosen_are_never_judged(store):
    wanted = trained(store, made(0.01, 0.0001))
    settle(SETTINGS, wanted, store)
    (choice,) = Choices(store.out).all
    chosen, other = sorted(wanted, key=lambda cell: cell.tuned != choice.tuned)
    assert "final" in store.result(chosen) and "final" not in store.result(other)
    assert not list(store.directory(other).glob("test-*"))
    with pytest.raises(ConfigError, match="were not chosen"):
        open_test(store.out, SETTINGS, other, store.directory(other))


def test_twin_with_the_check_off_test_images_choose_the_value(store, monkeypatch):
    """What the check is for: were test images readable first, the value that is best on them alone is reported."""
    wanted = trained(store, made(0.01, 0.0001))
    as_it_is = choices.open_test
    monkeypatch.setattr(choices, "open_test", lambda out, s, cell, folder: load_data(s, cell.fold, with_test=True))
    monkeypatch.setattr(Choices, "of", lambda self, cell: choices.Choice(
        variant="fedavg", fold=FOLD, tuned=cell.tuned, model="global", predictor="head", validation=0.0, seeds=(0,),
        candidates=1,
    ))
    figures = {}
    for cell in wanted:
        final = judge(store.out, SETTINGS, cell, store.directory(cell))["final"]
        figures[cell.tuned] = final["global"]["head"]["pooled_auc"]
        (store.directory(cell) / choices.JUDGED).unlink()
    best, other = sorted(wanted, key=lambda cell: -figures[cell.tuned])
    assert figures[best.tuned] > figures[other.tuned], "a look at the test images tells the values apart"

    monkeypatch.undo()
    for path in store.directory(best).glob("validation-*"):  # on the validation side the same value is useless
        save_predictions(path, [wrong(p) for p in load_predictions(path)])
    settle(SETTINGS, wanted, store)
    assert choices.open_test is as_it_is and Choices(store.out).of(best).tuned == other.tuned
    with pytest.raises(ConfigError, match="were not chosen"):
        judge(store.out, SETTINGS, best, store.directory(best))
    assert "final" not in store.result(best)


def wrong(predictions):
    labels, scores = predictions.labels, np.zeros_like(predictions.scores)
    scores[np.arange(len(labels)), (labels + 1) % scores.shape[1]] = 1.0
    return Predictions(
        site=predictions.site, labels=labels, scores=scores, units=predictions.units, ids=predictions.ids,
        fold=predictions.fold, seed=predictions.seed,
    )


def test_a_fixed_choice_is_not_changed_and_takes_no_late_values(store):
    (cell,) = trained(store, made(0.01))
    settle(SETTINGS, [cell], store)
    known = Choices(store.out)
    with pytest.raises(ConfigError, match="fixed already"):
        known.fix(known.all[0])
    with pytest.raises(ConfigError, match="made without it"):
        known.require_open(made(0.1))
    known.require_open(made(0.01, seed=1))  # another seed is judged by the same choice


def test_later_seeds_are_trained_with_the_chosen_values_alone(store):
    wanted = trained(store, made(0.01, 0.0001))
    settle(SETTINGS, wanted, store)
    known = Choices(store.out)
    (chosen,) = (cell.tuned for cell in wanted if cell.tuned == known.all[0].tuned)
    later = made(0.01, 0.0001, 0.1, seed=1)
    kept = known.without_losers([*wanted, *later], store)
    assert [cell for cell in kept if cell.seed == 0] == wanted
    assert [cell.tuned for cell in kept if cell.seed == 1] == [chosen, later[2].tuned]
    with pytest.raises(ConfigError, match="made without it"):
        known.require_open(cell for cell in kept if cell.seed == 1)  # a value that nobody tried


def test_the_choice_waits_for_all_cells_of_its_row_and_fold(store):
    wanted = made(0.01, 0.0001)
    trained(store, wanted[:1])
    settle(SETTINGS, wanted, store)
    assert not Choices(store.out).all
    store.record_failure(wanted[1], "diverged")
    settle(SETTINGS, wanted, store)
    assert Choices(store.out).all[0].tuned == wanted[0].tuned


def test_the_best_on_the_validation_side_is_chosen_and_the_simplest_of_equals(store):
    (cell,) = trained(store, made(0.01))
    folder = store.directory(cell)
    for kind in ("global", "local"):
        for part in ("head", "prototypes", "refit"):
            path = folder / f"validation-{kind}-{part}.npz"
            spoil = perfect if (kind, part) == ("local", "refit") else wrong
            save_predictions(path, [spoil(p) for p in load_predictions(path)])
    choice = choose([cell], store.directory)
    assert (choice.model, choice.predictor, choice.validation) == ("local", "refit", 1.0)
    assert choice.candidates == 2 * 13 and choice.seeds == (0,)


def perfect(predictions):
    scores = np.eye(predictions.num_classes, dtype=np.float32)[predictions.labels]
    return Predictions(
        site=predictions.site, labels=predictions.labels, scores=scores, units=predictions.units, ids=predictions.ids,
        fold=predictions.fold, seed=predictions.seed,
    )


def test_models_of_other_images_are_refused(store):
    (cell,) = trained(store, made(0.01))
    path = store.directory(cell) / "trained.json"
    record = json.loads(path.read_text())
    assert record["train"] == train_digest(load_data(SETTINGS, FOLD))
    path.write_text(json.dumps(record | {"train": "0" * 64}))
    with pytest.raises(ConfigError, match="other images"):
        run_cell(SETTINGS, cell, store.directory(cell), on_round=lambda *_: None)


def test_baselines_are_rows_like_others(store):
    """Frozen features by a refitted head, one place for all images, and the best single site's model everywhere."""
    wanted = [Cell(method=name, seed=0, fold=FOLD) for name in ("frozen", "central", "local")]
    trained(store, wanted)
    settle(SETTINGS, wanted, store)
    finals = {cell.method: store.result(cell)["final"] for cell in wanted}
    assert set(finals["frozen"]["local"]) >= {"prototypes", "refit"} and "head" not in finals["frozen"]["local"]
    assert set(finals["central"]) == {"global"} and set(finals["local"]) == {"local", BEST_SITE}
    assert set(finals["local"][BEST_SITE]) == {"head"}
    images = {final["images"] for final in (finals["frozen"]["local"]["refit"], finals["central"]["global"]["head"])}
    assert len(images) == 1, "all of them are judged on the same test images"
    assert LabPlan(settings=SETTINGS, cells=tuple(wanted))
