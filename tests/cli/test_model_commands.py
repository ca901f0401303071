"""What a hospital does with its model, on the state directory of a site that has really trained."""

from __future__ import annotations

import csv
import datetime as dt
import io
import json
import os
import re
import shutil
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from coordinator.cli import main as coordinator
from coordinator.config import TEMPLATE
from coordinator.export import _onnx
from coordinator.storage import Storage
from lazaret import files
from lazaret.errors import ConfigError
from lazaret.terminal import run_command
from npr.data.generated import ISIC_CLASSES
from npr.data.sources import open_catalogue
from npr.metrics import fit_temperature
from security.audit.agreement import keys_for
from security.audit.verify import verify
from security.clock import SystemClock
from security.identity.manifest import PluginFile, Privacy
from security.log.events import DpCommitted
from security.log.reader import LogReader
from security.secagg.state import state_hash, unflatten
from site_agent.cli import cli
from site_agent.command_process import open_record
from site_agent.config import SiteConfig
from site_agent.trainer import predictor as predictor_room
from site_agent.trainer.evaluation import figures_of
from site_agent.trainer.export import _covered, export
from site_agent.trainer.model_card import history_of, hospital_only, model_card
from site_agent.trainer.predictor import Companion, ModelPlace, Predictor, load
from tests.support.consortium_world import DAY, NOW
from tests.support.trained_site import SIZE, Trained, train


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def site_agent() -> None:
    """As a program calls it that does other things too: no process is started and this one is not isolated."""
    run_command(cli, "site-agent")


def run(*words: str | Path, entry: Callable[[], object] = site_agent) -> Done:
    """The command in this process: loading torch anew for each case would take most of the time."""
    out, err = io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = ["site-agent", *map(str, words)]
    try:
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
            entry()
    finally:
        sys.argv = before
    return Done(int(ended.value.code or 0), out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """Two rounds of three sites that predict by head and prototypes together."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield train(tmp_path_factory.mktemp("federation"))
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def offline_and_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The federation's own day; and whoever opens a connection fails the test."""

    def refuse(*_: object) -> None:
        raise AssertionError("a command that sends nothing has opened a connection")

    monkeypatch.setattr(SystemClock, "now_ms", lambda self: NOW + DAY)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve readable images in two folders, three that are damaged in different ways, and what is no image."""
    folder = tmp_path_factory.mktemp("cases")
    drawn = open_catalogue("generated:balanced=4,sites=1", image_size=48).images
    for number in range(12):
        path = folder / ("left" if number % 2 else "right") / f"{number:02}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(drawn[number]).save(path)
    whole = (folder / "right" / "00.png").read_bytes()
    (folder / "cut.png").write_bytes(whole[:200])
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "text.png").write_text("no image at all")
    (folder / "notes.txt").write_text("skipped")
    return folder


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


BROKEN = {"cut.png", "empty.jpg", "text.png"}


def test_broken_files_are_named_and_the_rest_is_finished(trained: Trained, cases: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.csv"
    done = run("predict", cases, "-o", target, "--config", trained.config, "--batch", "4")
    assert done.returncode == 1
    for name in BROKEN:
        assert f"{name}: image cannot be read" in done.stderr
    assert "12 of 15 files predicted" in done.stderr and "1 other files were skipped" in done.stderr
    rows = rows_of(target)
    assert [row["file"] for row in rows] == sorted(row["file"] for row in rows) and len(rows) == 15
    classes = [name for name in rows[0] if name.startswith("p_")]
    assert len(classes) == 8
    for row in rows:
        assert bool(row["problem"]) == (row["file"] in BROKEN)
        if not row["problem"]:
            shares = [float(row[name]) for name in classes]
            assert sum(shares) == pytest.approx(1, abs=1e-4)
            assert row["predicted"] == classes[int(np.argmax(shares))].removeprefix("p_")
            assert int(row["nearest_cluster"]) in (1, 2, 3, 4) and -1 <= float(row["nearest_cosine"]) <= 1.0001
        else:
            assert row["predicted"] == "" and row["nearest_class"] == ""
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]


def test_the_same_images_give_the_same_rows_by_table_by_file_and_in_other_batches(
    trained: Trained, cases: Path, tmp_path: Path
) -> None:
    table = tmp_path / "cases.csv"
    names = ["left/01.png", "right/02.png", "right/10.png"]
    table.write_text("image,age\n" + "".join(f"{os.path.relpath(cases / name, tmp_path)},50\n" for name in names))
    told = run("predict", table, "-o", tmp_path / "a.csv", "--config", trained.config, "--json")
    summary = json.loads(told.stdout)
    assert told.returncode == 0 and (summary["files"], summary["predicted"], summary["problems"]) == (3, 3, [])
    assert summary["calibrated"] == (summary["temperature"] is not None) and sum(summary["by_class"].values()) == 3
    one = run("predict", cases / names[0], "-o", tmp_path / "b.csv", "--config", trained.config, "--batch", "1")
    assert one.returncode == 0
    first, alone = rows_of(tmp_path / "a.csv")[0], rows_of(tmp_path / "b.csv")[0]
    for column in first:
        if column.startswith(("p_", "nearest_cosine")):
            assert float(first[column]) == pytest.approx(float(alone[column]), abs=2e-4)
        elif column != "file":
            assert first[column] == alone[column]


def test_nothing_is_overwritten_and_a_failed_run_leaves_nothing(trained: Trained, cases: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.csv"
    target.write_text("precious")
    done = run("predict", cases, "-o", target, "--config", trained.config)
    assert done.returncode == 2 and "refusing to overwrite" in done.stderr and target.read_text() == "precious"
    (tmp_path / "none").mkdir()
    empty = run("predict", tmp_path / "none", "-o", tmp_path / "b.csv", "--config", trained.config)
    assert empty.returncode == 2 and "there are no images" in empty.stderr
    nowhere = run("predict", cases, "-o", tmp_path / "no" / "b.csv", "--config", trained.config)
    assert nowhere.returncode == 2 and "folder is missing" in nowhere.stderr
    missing = run("predict", tmp_path / "nowhere", "-o", tmp_path / "b.csv", "--config", trained.config)
    assert missing.returncode == 2 and "no such folder" in missing.stderr
    assert not (tmp_path / "b.csv").exists()


def place_of(trained: Trained) -> ModelPlace:
    config = SiteConfig.read(trained.config)
    return ModelPlace.open(config, open_record(config, log=True))


def predictor_of(trained: Trained) -> Predictor:
    return Predictor.of(place_of(trained), "best")


def test_training_images_lie_at_prototypes_of_this_site(trained: Trained) -> None:
    """The explanation is made of the site's own training images: each is nearer to some prototype than noise is."""
    predictor = predictor_of(trained)
    samples = predictor.place.trainer.data.train
    _, features = predictor.deployed.predict(samples.images[:32])
    near = predictor.nearest(features)
    owners = predictor.companion.prototypes.owners
    assert {name for name, _, _ in near} <= set(predictor.class_names)
    for (name, cluster, cosine), row in zip(near, features, strict=True):
        place = int((owners == predictor.class_names.index(name)).nonzero()[0]) + cluster - 1
        every = torch.nn.functional.cosine_similarity(row[None], predictor.companion.prototypes.vectors)
        assert int(every.argmax()) == place and cosine == pytest.approx(float(every.max()), abs=1e-5)


def test_the_companion_is_made_once_for_a_model_and_never_leaves_the_vault(trained: Trained) -> None:
    path = trained.state / "models" / "best-companion.safetensors"
    place = place_of(trained)
    model = load(place, "best")
    made = Companion.make(place, model)
    place.personal.keep_model("best-companion", made.to_bytes())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    read = Companion.read(place, model)
    assert read is not None and torch.equal(read.prototypes.vectors, made.prototypes.vectors)
    assert (read.temperature, read.class_names) == (made.temperature, made.class_names)
    newest = load(place, "newest")
    assert newest.digest != model.digest and Companion.read(place, newest) is None


@pytest.fixture
def always_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a temperature helps on held-back images is tests/unit/npr/test_metrics_calibration.py's matter."""
    monkeypatch.setattr(predictor_room, "helpful_temperature", lambda *images: fit_temperature(*images[:2]))


@pytest.mark.usefixtures("always_calibrated")
def test_evaluation_has_intervals_calibration_and_the_confusion_matrix(trained: Trained) -> None:
    told = json.loads(run("evaluate", "--model", "best", "--json", "--config", trained.config).stdout)
    for side in ("validation", "test"):
        figures = told[side]
        assert np.sum(figures["confusion"]) == figures["images"] == 32
        assert np.sum(figures["confusion"], axis=1).tolist() == [4] * 8
        low, high = figures["bacc_interval"]
        assert 0 <= low <= figures["bacc"] <= high <= 1
        assert figures["bauc_interval"][0] <= figures["bauc"] <= figures["bauc_interval"][1]
        assert 0 <= figures["ece"] <= 1 and 0 <= figures["ece_calibrated"] <= 1
        assert figures["ece_calibrated"] != figures["ece"]
        assert figures["bacc"] == pytest.approx(np.mean(figures["recall_by_class"]))
    assert told["temperature"] > 0 and told["temperature_images"] == 32
    rows = [json.loads(line) for line in (trained.state / "metrics.jsonl").read_text().splitlines()]
    best = next(row for row in reversed(rows) if row.get("best"))
    assert (told["round"], told["test"]["bacc"]) == (best["round"], best["test"]["bacc"])
    shown = run("evaluate", "--model", "newest", "--config", trained.config).stdout
    assert "confusion, columns are predictions" in shown and "model newest of round 2" in shown


def with_subgroups(trained: Trained, folder: Path) -> Path:
    """A copy of the agent whose hospital keeps a table of ages, and wants to hear of two classes."""
    shutil.copytree(trained.config.parent, folder)
    data = place_of(trained).trainer.data
    units = [*data.test.units, *(data.validation.units if data.validation else ())]
    rows = "".join(f"{unit},{30 + 5 * (number % 9)}\n" for number, unit in enumerate(dict.fromkeys(units)))
    (folder / "ages.csv").write_text(f"{data.test.unit_kind},age\n{rows}")
    wanted = 'findings = ["MEL", "NV"]\nsubgroups = ["age"]\nbands = { age = [40, 60] }\ntable = "ages.csv"\n'
    config = folder / "site.toml"
    config.write_text(f'{config.read_text()}\n[evaluation]\noperating_point = "sensitivity=0.75"\n{wanted}')
    return config


def test_what_a_clinician_asks_for_is_told_drawn_and_kept(trained: Trained, tmp_path: Path) -> None:
    config = with_subgroups(trained, tmp_path / "agent")
    page = tmp_path / "page.html"
    done = run("evaluate", "--html", page, "--json", "--config", config)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [one["name"] for one in told["clinical"]] == ["MEL", "NV"] and told["clinical_side"] == "test"
    held = place_of(trained).trainer.data.validation
    assert held is not None
    for number, one in enumerate(told["clinical"]):
        point, enough = one["operating_point"], len({held.units[row] for row in np.flatnonzero(held.labels == number)})
        assert one["with_finding"] == 4 and (point is None) == (enough < 3)
        if point is not None:
            counts = one["counts"]
            assert point["sensitivity"] >= 0.75 and point["images"] == 32
            assert one["sensitivity"] == counts["tp"] / 4 and one["specificity"] == pytest.approx(counts["tn"] / 28)
        groups = {group["group"]: group["images"] for group in one["subgroups"]}
        assert set(groups) == {"below 40", "40 to below 60", "60 and above"} and sum(groups.values()) == 32
    assert stat.S_IMODE(page.stat().st_mode) == 0o600 and page.read_text().count("<svg") == 8
    kept = tmp_path / "agent" / "state" / "models" / "evaluation.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600 and "isolation" in told
    assert json.loads(kept.read_text()) == {name: value for name, value in told.items() if name != "isolation"}
    again = run("evaluate", "--html", page, "--config", config)
    assert again.returncode == 2 and "refusing to overwrite" in again.stderr


def test_operating_points_are_kept_with_the_model(trained: Trained, tmp_path: Path) -> None:
    """Chosen on the validation images; another rule in site.toml chooses anew; an export has the thresholds."""
    config = with_subgroups(trained, tmp_path / "agent")
    settings = SiteConfig.read(config)
    predictor = Predictor.of(ModelPlace.open(settings, open_record(settings, log=True)), "best")
    companion = predictor.companion
    assert companion.rule == "sensitivity=0.75"
    read = Companion.read(predictor.place, predictor.trained)
    assert read is not None and read.points == companion.points
    written = export(predictor, tmp_path / "m", onnx=False)
    points = json.loads((tmp_path / "m" / "model.json").read_text())["operating_points"]
    expected = {
        name: {"rule": companion.rule, "threshold": point.threshold}
        for name, point in zip(companion.class_names, companion.points, strict=True)
        if point is not None
    }
    assert written["files"] and points == expected and expected, "some class has three patients"
    config.write_text(config.read_text().replace("sensitivity=0.75", "youden"))
    other = SiteConfig.read(config)
    place = ModelPlace.open(other, open_record(other))
    assert Companion.read(place, predictor.trained) is None


def test_a_temperature_that_does_not_help_is_not_kept(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it helps is judged by `helpful_temperature`, and by nothing else."""
    shutil.copytree(trained.config.parent, tmp_path / "agent")
    config = SiteConfig.read(tmp_path / "agent" / "site.toml")
    kept = []
    for found in (2.5, None):
        monkeypatch.setattr(predictor_room, "helpful_temperature", lambda *_, found=found: found)
        predictor = Predictor.open(config, open_record(config), refit=True)
        kept.append((predictor.companion.temperature, predictor.deployed.temperature))
    assert kept == [(2.5, 2.5), (None, 1.0)]


def test_every_command_takes_the_same_model_and_says_which(trained: Trained, cases: Path, tmp_path: Path) -> None:
    words = ("--config", trained.config, "--json")
    evaluated = json.loads(run("evaluate", *words).stdout)
    predicted = json.loads(run("predict", cases / "left", "-o", tmp_path / "out.csv", *words).stdout)
    written = json.loads(run("export", tmp_path / "m", "--no-onnx", *words).stdout)
    sidecar = json.loads((tmp_path / "m" / "model.json").read_text())
    assert {told["model"] for told in (evaluated, predicted, written)} == {"best"}
    assert {told["round"] for told in (evaluated, predicted, written)} == {sidecar["round"]}
    assert evaluated["model_sha256"] == predicted["model_sha256"] == sidecar["model_sha256"]
    spoken = run("predict", cases / "left", "-o", tmp_path / "two.csv", "--config", trained.config).stderr
    assert f"model: the best of this site, of round {sidecar['round']}" in spoken


def test_where_no_round_was_validated_it_is_the_newest(trained: Trained, cases: Path, tmp_path: Path) -> None:
    folder = tmp_path / "agent"
    shutil.copytree(trained.config.parent, folder)
    (folder / "state" / "models" / "best.safetensors").unlink()
    done = run("predict", cases / "left", "-o", tmp_path / "out.csv", "--config", folder / "site.toml")
    assert done.returncode == 0 and "model: the newest of this site, of round 2" in done.stderr


def test_curves_are_written_as_files_and_replace_themselves(trained: Trained, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (trained.state / "metrics.jsonl").read_text().splitlines()]
    for _ in range(2):
        done = run("curves", tmp_path / "mlflow", "--track", "mlflow", "--config", trained.config)
        assert done.returncode == 0 and "for this hospital only" in done.stderr
    (curve,) = (tmp_path / "mlflow").glob("*/*/metrics/validation/bacc")
    found = [(int(line.split()[2]), float(line.split()[1])) for line in curve.read_text().splitlines()]
    assert found == [(row["round"], row["validation"]["bacc"]) for row in rows]
    done = run("curves", tmp_path / "board", "--track", "tensorboard", "--config", trained.config)
    assert done.returncode == 0 and list((tmp_path / "board" / "run-1").iterdir())


def test_training_alone_is_compared_on_the_same_images(trained: Trained, tmp_path: Path) -> None:
    folder = tmp_path / "agent"
    shutil.copytree(trained.config.parent, folder)
    words = ("--config", folder / "site.toml")
    assert "not compared with training alone" in run("evaluate", *words).stdout
    told = json.loads(run("evaluate", "--alone", *words, "--json").stdout)
    alone = told["alone"]
    assert alone["rounds"] == told["round"] and alone["test"]["images"] == told["test"]["images"]
    assert alone["test"]["bauc"] != told["test"]["bauc"]
    run("export", tmp_path / "m", "--no-onnx", *words)
    card = (tmp_path / "m" / "MODEL_CARD.md").read_text()
    assert f"Trained alone, {told['round']} rounds on the same images: bacc {alone['test']['bacc']:.3f}" in card
    other = run("evaluate", "--model", "newest", *words).stdout
    assert ("not compared" in other) == (told["round"] != 2), "figures of another number of rounds do not count"


def test_too_few_validation_images_and_it_says_so(trained: Trained, cases: Path, tmp_path: Path) -> None:
    folder = tmp_path / "agent"
    shutil.copytree(trained.config.parent, folder)
    config = folder / "site.toml"
    config.write_text(config.read_text().replace("validation = 0.25", "validation = 0"))
    (folder / "state" / "models" / "best-companion.safetensors").unlink(missing_ok=True)
    # As if the site had never held anything back: its list of sides says so too.
    listed = folder / "state" / "sides" / "list.json"
    book = json.loads(listed.read_text())
    book["rule"] = re.sub(r"validation [0-9.]+", "validation 0", book["rule"])
    book["places"] = {name: place.split(".")[0] for name, place in book["places"].items()}
    listed.write_text(json.dumps(book))
    done = run("predict", cases / "left", "-o", tmp_path / "out.csv", "--config", config)
    assert done.returncode == 0 and "not calibrated" in done.stderr


def test_a_model_stays_usable_when_the_certificate_has_ended(
    trained: Trained, cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SystemClock, "now_ms", lambda self: NOW + 500 * DAY)
    done = run("predict", cases / "left", "-o", tmp_path / "out.csv", "--config", trained.config)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def exported(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("export") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SystemClock, "now_ms", lambda self: NOW + DAY)
        done = run("export", target, "--with-prototypes", "--config", trained.config, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["checked"]["onnx"]["relative_difference"] <= 1e-4 and told["checked"]["onnx"]["images"] == 32
    return target


@pytest.mark.usefixtures("always_calibrated")
def test_prototypes_do_not_slip_into_an_export(trained: Trained, tmp_path: Path) -> None:
    """The files predict with the head alone, say so, and have a temperature of their own."""
    target = tmp_path / "model"
    done = run("export", target, "--config", trained.config)
    assert done.returncode == 0 and "with the head alone" in done.stderr
    with safe_open(target / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert "head.weight" in names and not [name for name in names if "prototypes" in name]
    about = json.loads((target / "model.json").read_text())
    assert about["predicts_by"].startswith("the head alone")
    assert "| predicts by | the head alone" in (target / "MODEL_CARD.md").read_text()
    kept = Predictor.of(place_of(trained), "best", refit=True).companion
    assert about["temperature"] != kept.temperature


def test_a_model_that_predicts_by_prototypes_alone_is_not_exported_without_them(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = place_of(trained)
    monkeypatch.setattr(place.method, "prototype_share", 1.0)
    monkeypatch.setattr(ModelPlace, "open", lambda *_: place)
    done = run("export", tmp_path / "model", "--config", trained.config)
    assert done.returncode == 2 and "stay at the site" in done.stderr and not (tmp_path / "model").exists()


def test_an_export_is_private_and_replaces_nothing(trained: Trained, exported: Path) -> None:
    assert sorted(path.name for path in exported.iterdir()) == [
        "MODEL_CARD.md",
        "model.json",
        "model.onnx",
        "model.safetensors",
    ]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in exported.iterdir())
    again = run("export", exported, "--with-prototypes", "--config", trained.config)
    assert again.returncode == 2 and "refusing" in again.stderr
    assert not [path for path in exported.parent.iterdir() if path != exported]


def test_the_onnx_file_predicts_what_predict_predicts(
    trained: Trained, exported: Path, cases: Path, tmp_path: Path
) -> None:
    """By the words of model.json alone: resize, hand over the bytes."""
    run("predict", cases / "left", "-o", tmp_path / "out.csv", "--config", trained.config)
    about = json.loads((exported / "model.json").read_text())
    assert about["input"]["shape"][1:] == [SIZE, SIZE, 3]
    session = onnxruntime.InferenceSession(exported / "model.onnx")
    for row in rows_of(tmp_path / "out.csv"):
        image = Image.open(cases / "left" / row["file"]).convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        found = session.run(["probabilities"], {"images": np.asarray(image)[None]})[0][0]
        told = [float(row[f"p_{name}"]) for name in about["classes"]]
        assert found == pytest.approx(told, abs=2e-4)


def parsed_bundle(folder: Path) -> Any:
    """By MONAI's own parser, as `python -m monai.bundle run` has it."""
    bundle = pytest.importorskip("monai.bundle", reason="the extra [monai] is not installed")
    parser = bundle.ConfigParser()
    parser.read_config(str(folder / "configs" / "inference.json"))
    parser.read_meta(str(folder / "configs" / "metadata.json"))
    parser["bundle_root"] = str(folder)
    return parser


def test_a_monai_bundle_predicts_what_predict_predicts(trained: Trained, cases: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    words = ("--with-prototypes", "--format", "monai-bundle", "--config", trained.config)
    done = run("export", folder, *words)
    assert done.returncode == 0, done.stderr
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {
        "configs/inference.json", "configs/metadata.json", "docs/README.md", "docs/model.json", "models/model.onnx",
        "models/model.safetensors",
    }  # fmt: skip
    run("predict", cases / "left", "-o", tmp_path / "out.csv", "--config", trained.config)
    parser = parsed_bundle(folder)
    names, predict = parser.get_parsed_content("classes"), parser.get_parsed_content("predict")
    for row in rows_of(tmp_path / "out.csv"):
        ours = np.array([float(row[f"p_{name}"]) for name in names])
        assert np.abs(predict(str(cases / "left" / row["file"])).numpy() - ours).max() < 1e-5
    about = parser["_meta_"]["network_data_format"]
    assert list(about["outputs"]["pred"]["channel_def"].values()) == list(ISIC_CLASSES)
    image = torch.zeros(1, about["inputs"]["image"]["num_channels"], *about["inputs"]["image"]["spatial_shape"])
    assert parser.get_parsed_content("network_def")(image).shape == (1, about["outputs"]["pred"]["num_channels"])
    from monai.bundle import run as run_bundle  # type: ignore[attr-defined]

    said = io.StringIO()
    with redirect_stdout(said):
        run_bundle(
            config_file=str(folder / "configs" / "inference.json"),
            meta_file=str(folder / "configs" / "metadata.json"),
            bundle_root=str(folder),
            dataset_dir=str(cases / "left"),
        )
    first = [line.split(",")[0] for line in said.getvalue().splitlines()]
    assert first[-6:] == sorted(map(str, (cases / "left").iterdir()))
    without = run("export", tmp_path / "other", "--no-onnx", *words)
    assert without.returncode == 2 and "as ONNX" in without.stderr and not (tmp_path / "other").exists()


def test_a_monai_bundle_of_the_coordinator_gives_the_features_that_are_shared(hub: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    done = run("export", folder, "--format", "monai-bundle", "--config", hub, entry=coordinator)
    assert done.returncode == 0, done.stderr
    run("export", tmp_path / "global.safetensors", "--onnx", "--config", hub, entry=coordinator)
    images = np.random.default_rng(0).integers(0, 256, (2, SIZE, SIZE, 3), dtype=np.uint8)
    (expected,) = onnxruntime.InferenceSession(tmp_path / "global.onnx").run(None, {"images": images})
    network = parsed_bundle(folder).get_parsed_content("network_def")
    assert np.array_equal(network(torch.from_numpy(images).permute(0, 3, 1, 2).float()).numpy(), expected)
    again = run("export", folder, "--format", "monai-bundle", "--config", hub, entry=coordinator)
    assert again.returncode == 2 and "refusing to overwrite" in again.stderr


def test_safetensors_hold_the_model_and_say_what_it_is(trained: Trained, exported: Path) -> None:
    with safe_open(exported / "model.safetensors", framework="pt") as file:
        about = json.loads(file.metadata()["lazaret"])
        names = set(file.keys())
    assert {"head.weight", "prototypes.vectors"} <= names
    assert about["classes"][0] == "MEL" and about["input"]["normalisation"]["mean"] == [0.485, 0.456, 0.406]


def test_the_card_is_told_by_manifest_and_log(trained: Trained, exported: Path) -> None:
    card = (exported / "MODEL_CARD.md").read_text()
    manifest = trained.world.manifest
    assert manifest.digest.hex() in card and manifest.model.initial_file in card
    assert "| device and precision here | processor, float32 |" in card
    assert "| rounds planned | 3 |" in card and "| hospitals in those sums | 3 to 3, median 3 |" in card
    assert "| learning_rate | 0.003 |" in card and "No differential privacy" in card
    for name, digest in json.loads((exported / "model.json").read_text())["files"].items():
        assert f"| `{name}` | `{digest}` |" in card
    heads = sorted((trained.state / "log" / "checkpoints").glob("*.note"), key=lambda path: int(path.stem))
    assert f"first {heads[-1].stem} entries" in card
    assert "not a medical device" in card
    written = dt.datetime.fromtimestamp((NOW + DAY) / 1000, dt.UTC)
    assert f"Written on {written:%Y-%m-%d} (UTC)" in card
    assert "| images | 20 to 49 | 20 to 49 |" in card and "opened for the first time: 50 to 99 training images" in card
    assert "P-" not in card and str(trained.state) not in card


def test_a_card_of_a_running_agent_is_not_in_doubt(trained: Trained, tmp_path: Path) -> None:
    """Entries after the newest checkpoint are outside of the card, and it says where it ends."""
    folder = tmp_path / "agent"
    shutil.copytree(trained.config.parent, folder)
    heads = sorted((folder / "state" / "log" / "checkpoints").glob("*.note"), key=lambda path: int(path.stem))
    sent = max(record.body["head"] for record in LogReader(folder / "state" / "log").records("egress"))
    late = [head for head in heads if int(head.stem) > sent]
    assert late and len(late) < len(heads), "heads that no message has carried"
    for head in late:
        head.unlink()
    config = SiteConfig.read(folder / "site.toml")
    verified = verify(config.state / "log", keys_for(config.state / "log", None))
    assert "UnsealedTail" in {finding.code for finding in verified.findings}
    logged = open_record(config, log=True).log
    assert logged is not None
    told = {finding.split(":")[0] for finding in logged.findings}
    assert told == {"NotWitnessed"}, "nobody was there to sign"


def test_a_log_with_findings_is_told_in_the_card(trained: Trained, tmp_path: Path) -> None:
    """Twin of the card above: one entry changed, and the card says that it rests on nothing."""
    folder = tmp_path / "agent"
    shutil.copytree(trained.config.parent, folder)
    segment = next((folder / "state" / "log" / "segments").glob("*.jsonl"))
    segment.write_text(segment.read_text().replace('"count":3', '"count":7', 1))
    done = run("export", tmp_path / "m", "--no-onnx", "--with-prototypes", "--config", folder / "site.toml")
    card = (tmp_path / "m" / "MODEL_CARD.md").read_text()
    assert done.returncode == 0 and "findings, which the card lists" in done.stderr
    assert "the statements above may be wrong" in card and "Every check of" not in card
    assert not (tmp_path / "m" / "model.onnx").exists()


def test_epsilon_in_the_card_is_the_logs(trained: Trained, exported: Path) -> None:
    """The newest booking, as the log holds it, beside a manifest that asks for privacy."""
    predictor = predictor_of(trained)
    booked = DpCommitted(
        reservation="ab" * 16,
        mechanisms=(),
        delta="0.00001",
        unit="patient",
        relation="add-or-remove-one",
        accountant="rdp",
        order="12",
        plan=None,
        epsilon_round="0.3",
        epsilon_total="2.75",
        cap="8",
    )
    promise = Privacy(epsilon="8", delta="0.00001", clip="1", noise_floor="0.8", unit="patient", least_patients=None)
    logged = predictor.place.record.log
    assert logged is not None
    manifest = predictor.place.manifest.model_copy(update={"privacy": promise})
    record = replace(predictor.place.record, manifest=manifest)
    private = replace(predictor, place=replace(predictor.place, record=record))
    history = replace(history_of(logged, 2), privacy=booked.body())
    sidecar = json.loads((exported / "model.json").read_text())
    figures = figures_of(predictor)
    card = model_card(private, sidecar, {}, figures, history)
    assert "epsilon 2.75 of at most 8 at delta 0.00001; unit patient" in card
    silent = model_card(private, sidecar, {}, figures, replace(history, privacy=None))
    assert "this log has no booking for it" in silent
    # Exact figures are in the hospital's own file instead.
    assert "| recall of" not in card and "| balanced accuracy" not in card and "hospital-only.md" in card
    assert "recall of" in hospital_only(figures) and "do not pass this file on" in hospital_only(figures)


def test_an_export_under_privacy_holds_only_what_is_booked_or_public(trained: Trained, tmp_path: Path) -> None:
    config = SiteConfig.read(trained.config)
    config.sides.mkdir(mode=0o700, exist_ok=True)
    files.write_atomically(config.sides / "key", bytes(32), mode=0o600)
    promise = Privacy(epsilon="8", delta="0.00001", clip="1", noise_floor="0.8", unit="patient", least_patients=None)
    place = place_of(trained)
    manifest = place.manifest.model_copy(update={"privacy": promise})
    private = replace(place, record=replace(place.record, manifest=manifest))
    with pytest.raises(ConfigError, match="epsilon does not cover"):
        _covered(private, "best", with_prototypes=True)
    written = export(_covered(private, "best", with_prototypes=False), tmp_path / "out", onnx=False)
    assert "hospital-only.md" in written["files"]
    sidecar = json.loads((tmp_path / "out" / "model.json").read_text())
    assert sidecar["temperature"] is None and sidecar["operating_points"] == {}
    card = (tmp_path / "out" / "MODEL_CARD.md").read_text()
    assert "| recall of" not in card and "| images |" not in card
    assert "recall of" in (tmp_path / "out" / "hospital-only.md").read_text()


@pytest.fixture(scope="module")
def hub(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A coordinator's folder after round 2, with the model that its machines came to."""
    folder, world = tmp_path_factory.mktemp("hub"), trained.world
    config = folder / "coordinator.toml"
    names = {"identity": world.base.identity("hub").folder, "state": "state", "listen": "localhost:1"}
    config.write_text(TEMPLATE.format(**names, initial=world.model_path))
    storage = Storage(folder / "state")
    storage.save_state(world.hub.model)
    row = (bytes(32), 2, bytes(32), state_hash(world.hub.model), bytes(32), b"", None)
    storage._db.execute("INSERT INTO results VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    storage.close()
    return config


def test_the_coordinator_exports_what_is_shared(trained: Trained, hub: Path, tmp_path: Path) -> None:
    target = tmp_path / "global.safetensors"
    done = run("export", target, "--onnx", "--json", "--config", hub, entry=coordinator)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["round"] == 2 and told["checked"]["onnx"]["relative_difference"] <= 1e-4
    about = json.loads((tmp_path / "global.json").read_text())
    assert about["files"] == told["files"] and set(about["files"]) == {"global.safetensors", "global.onnx"}
    assert about["manifest"]["sha256"] == trained.world.manifest.digest.hex()
    expected = unflatten(trained.world.manifest.aggregation.layout, trained.world.hub.model)
    with safe_open(target, framework="np") as file:
        assert set(file.keys()) == set(expected)
        assert all(np.array_equal(file.get_tensor(name), value) for name, value in expected.items())
    assert not any(name.startswith("head.") for name in expected)
    session = onnxruntime.InferenceSession(tmp_path / "global.onnx")
    assert [output.name for output in session.get_outputs()] == ["features"]
    (features,) = session.run(None, {"images": np.zeros((3, SIZE, SIZE, 3), np.uint8)})
    assert features.shape == (3, 256)
    again = run("export", target, "--config", hub, entry=coordinator)
    assert again.returncode == 2 and "refusing to overwrite" in again.stderr


def test_a_coordinator_runs_no_plugin_to_export(trained: Trained) -> None:
    training = trained.world.manifest.training.model_copy(
        update={"plugin": PluginFile(name="own_method.py", sha256="ab" * 32)}
    )
    manifest = trained.world.manifest.model_copy(update={"training": training})
    with pytest.raises(ConfigError, match="only hospitals run those"):
        _onnx(manifest, trained.world.model_path, trained.world.hub.model, {})


def test_a_coordinator_exports_no_model_that_lost_its_hash(hub: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    shutil.copytree(hub.parent, folder)
    (model,) = (folder / "state" / "models").glob("*.safetensors")
    content = bytearray(model.read_bytes())
    content[-1] ^= 1
    model.write_bytes(content)
    done = run("export", tmp_path / "m.safetensors", "--config", folder / "coordinator.toml", entry=coordinator)
    assert done.returncode == 2 and "does not have the hash in its name" in done.stderr
    nothing = run("export", tmp_path / "m.safetensors", "--round", "7", "--config", hub, entry=coordinator)
    assert nothing.returncode == 2 and "no result of this round" in nothing.stderr
    assert list(tmp_path.iterdir()) == [folder]
