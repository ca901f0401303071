"""Images with several labels: three hospitals learn two labels that overlap, by the shipped commands over TLS.

What they have learned is measured on held-back images, and used as a hospital would: evaluated, predicted, exported.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from npr.data.generated import FINDINGS
from npr.data.sources import open_dataset
from npr.lab.cli import model as model_command
from npr.metrics import class_aucs
from scripts.local_federation.federation import FederationFolders, Party, command, stop_all
from scripts.local_federation.sums import manifest_at, read_published
from site_agent.cli import cli as site_command
from site_agent.command_process import open_record
from site_agent.config import SiteConfig
from site_agent.trainer.evaluation import as_text, scores_by_side
from site_agent.trainer.predictor import Predictor

ROUNDS = 7
SIZE = 32
SOURCE = "generated:balanced=16,sites=3"
# Every area under the ROC curve is at least this much above that of chance, 0.5.
MARGIN = 0.15
PLAN = f"""
run = "labels"
[model]
initial = "initial.safetensors"
[training]
rounds = {ROUNDS}
steps = 16
[timing]
train = 60
message = 10
upload = 20
"""
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FederationFolders]:
    """A federation whose rounds are all published and checked."""
    folder = tmp_path_factory.mktemp("federation")
    initial = folder / "initial.safetensors"
    command(
        model_command, "--architecture", "test_efficientnet", "--weights", "none", "--image-size", SIZE,
        "--classes", ",".join(FINDINGS), "--method", "fednpr-per", "--rounds", ROUNDS, "--set", "labels=many",
        "--set", "learning_rate=0.005", "--set", "batch_size=8", "-o", initial,
    )  # fmt: skip
    names = ("bcn", "vidir_molemax", "vidir_modern")
    ids = {name.replace("_", "-"): name for name in names}
    made = FederationFolders(
        folder=folder,
        plan=PLAN,
        sources=dict.fromkeys(ids, SOURCE),
        data_names=ids,
        initial=initial,
        coordinator_settings={"grace": 30.0},
        site_settings={
            "site": "threads = 1\nready_slot = 0.2",
            "coordinator": "least_wait = 0.2\nmost_wait = 1",
            "data": 'site = "{data}"\nfold = "fold"',
        },
    )
    made.prepare()
    coordinator = Party(
        "coordinator", ["coordinator", "--config", made.coordinator / "coordinator.toml"], folder / "output" / "hub",
        made.coordinator,
    )  # fmt: skip
    sites = [
        Party(name, ["site_agent", "--config", settings_of(made, name)], folder / "output" / name, made.site(name))
        for name in made.sources
    ]
    coordinator.start()
    for site in sites:
        site.start()
    try:
        coordinator.wait_for(f"the sum of round {ROUNDS} is checked", seconds=240)
    finally:
        codes = stop_all(sites, coordinator)
    assert codes == [0] * len(codes)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield made
    torch.set_num_threads(threads)


def settings_of(folders: FederationFolders, site: str) -> Path:
    return folders.site(site) / "site.toml"


def test_both_labels_are_learned_over_the_wire(folders: FederationFolders) -> None:
    results = read_published(folders.coordinator)
    assert len(results) == ROUNDS and all(len(result.survivors) == 3 for result in results)
    assert manifest_at(folders.coordinator / "identity").training.settings["labels"] == "many"
    labels, scores = [], []
    for site in folders.sources:
        config = SiteConfig.read(settings_of(folders, site))
        held, found = scores_by_side(Predictor.open(config, open_record(config), "newest"))["test"]
        labels.append(held.labels)
        scores.append(found)
    truth = np.concatenate(labels)
    assert (truth.sum(axis=1) == 2).any() and (truth.sum(axis=1) == 0).any(), "some have both labels, some neither"
    areas = class_aucs(truth, np.concatenate(scores))
    assert (areas >= 0.5 + MARGIN).all(), areas


def test_a_hospital_evaluates_predicts_and_exports(folders: FederationFolders, tmp_path: Path) -> None:
    config = settings_of(folders, "bcn")
    figures = json.loads(command(site_command, "evaluate", "--config", config, "--json"))
    shown, rows = figures["test"], as_text(figures)
    assert "confusion" not in shown and "confusion" not in rows
    for key in ("recall_by_class", "specificity_by_class", "auc_by_class"):
        assert len(shown[key]) == len(FINDINGS)
    assert shown["bauc"] == pytest.approx(np.mean(shown["auc_by_class"]))
    assert [one["name"] for one in figures["clinical"]] == list(FINDINGS)
    assert all(any(line.startswith(name) for line in rows.splitlines()) for name in FINDINGS), "a row for each label"

    drawn = open_dataset(SOURCE, fold="fold", image_size=SIZE, labels="many").site("bcn").test
    folder = tmp_path / "cases"
    folder.mkdir()
    for number in range(12):
        Image.fromarray(drawn.images[number]).save(folder / f"{number:02}.png")
    command(site_command, "predict", folder, "-o", tmp_path / "out.csv", "--config", config)
    with (tmp_path / "out.csv").open() as file:
        found = list(csv.DictReader(file))
    for row in found:
        chances = {name: float(row[f"p_{name}"]) for name in FINDINGS}
        assert row["predicted"] == ("|".join(name for name, p in chances.items() if p >= 0.5) or "-")
        assert row["nearest_class"] in {said + name for name in FINDINGS for said in ("", "no ")}
    sums = [sum(float(row[f"p_{name}"]) for name in FINDINGS) for row in found]
    assert max(sums) - min(sums) > 0.05, "probabilities of labels do not add up to one"

    command(site_command, "export", tmp_path / "model", "--with-prototypes", "--no-onnx", "--config", config)
    card = (tmp_path / "model" / "MODEL_CARD.md").read_text()
    assert "| labels of an image | any number" in card and f"| AUC of {FINDINGS[0]} |" in card
    about = json.loads((tmp_path / "model" / "model.json").read_text())
    assert about["labels"] == "many" and about["classes"] == list(FINDINGS)
