"""Curves as files: TensorBoard's own reader and MLflow's own store find every figure in them, and nothing twice."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import yaml

from npr.tracking import TRACKERS, MlflowFiles, TensorBoardFiles, TrackedRun, open_tracker

POINTS = [(1, {"loss": 0.75, "validation/global/head/mean_bacc": 0.5}), (2, {"loss": 0.25}), (300, {"loss": 1e-5})]
RUN = TrackedRun(
    name="fedavg-0", points=POINTS, settings={"method": "fedavg", "options/mu": "0.1"}, written_ms=1_800_000_000_123
)
AGAIN = TrackedRun(name="fedavg-0", points=[(1, {"loss": 0.5})], written_ms=1_800_000_000_123)


def scalars(folder: Path) -> list[tuple[int, str, float]]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    (file,) = folder.iterdir()
    first, *events = LegacyEventFileLoader(str(file)).Load()  # it checks every checksum
    assert first.file_version == "brain.Event:2" and all(event.wall_time == 1_800_000_000.123 for event in events)
    return [(event.step, value.tag, value.simple_value) for event in events for value in event.summary.value]


def test_tensorboard_reads_every_point(tmp_path: Path) -> None:
    tracker = TensorBoardFiles(tmp_path)
    tracker.write(RUN)
    expected = [(step, name, pytest.approx(value)) for step, figures in POINTS for name, value in figures.items()]
    assert scalars(tmp_path / "fedavg-0") == expected
    tracker.write(AGAIN)
    assert scalars(tmp_path / "fedavg-0") == [(1, "loss", 0.5)], "a run that is written again replaces itself"


def test_a_checksum_is_the_published_one() -> None:
    """CRC-32C of `123456789` is e3069283 (RFC 3720 has the polynomial); TFRecord rotates it and adds a constant."""
    from npr.tracking import _checksum

    crc = 0xE3069283
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    assert int.from_bytes(_checksum(b"123456789"), "little") == masked


def test_mlflow_files_have_its_layout(tmp_path: Path) -> None:
    tracker = MlflowFiles(tmp_path, "study")
    tracker.write(AGAIN)
    tracker.write(RUN)
    (home,) = tmp_path.iterdir()
    about = yaml.safe_load((home / "meta.yaml").read_text())
    assert (about["name"], about["experiment_id"], about["lifecycle_stage"]) == ("study", home.name, "active")
    (run,) = (path for path in home.iterdir() if path.is_dir())
    said = yaml.safe_load((run / "meta.yaml").read_text())
    assert (said["run_id"], said["run_name"], said["experiment_id"]) == (run.name, "fedavg-0", home.name)
    lines = [line.split() for line in (run / "metrics" / "loss").read_text().splitlines()]
    assert [(int(step), float(value)) for _, value, step in lines] == [(1, 0.75), (2, 0.25), (300, 1e-5)]
    assert (run / "params" / "options" / "mu").read_text() == "0.1"


def test_mlflow_reads_every_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracking = pytest.importorskip("mlflow.tracking", reason="mlflow-skinny is not installed")
    open_tracker("mlflow", tmp_path, experiment="study").write(RUN)
    client = tracking.MlflowClient(tracking_uri=tmp_path.as_uri())
    experiment = client.get_experiment_by_name("study")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "fedavg-0" and run.data.params == dict(RUN.settings)
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(step, figures["loss"]) for step, figures in POINTS]
    assert run.data.metrics["validation/global/head/mean_bacc"] == 0.5


@pytest.mark.parametrize("kind", TRACKERS)
def test_only_the_owner_reads_figures(tmp_path: Path, kind: str) -> None:
    open_tracker(kind, tmp_path, experiment="study").write(RUN)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert written and {stat.S_IMODE(path.stat().st_mode) for path in written} == {0o600}
