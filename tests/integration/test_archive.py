"""A real archive (Orthanc) both ways: 40 studies fetched, cut and killed half-way, trained on, predicted, reported.

Every command that speaks with the archive, and `predict`, is a process of its own, isolated as at a hospital.
"""

from __future__ import annotations

import csv
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import highdicom
import numpy as np
import pydicom
import pytest
import torch
from pydicom.uid import generate_uid

from lazaret.errors import DataError
from npr.data.generated import ISIC_CLASSES
from npr.data.sources import open_catalogue
from site_agent.config import SiteConfig
from tests.support.archive import LOGIN, Gate, Orthanc
from tests.support.consortium_world import DAY, NOW
from tests.support.dicom_images import drawn
from tests.support.isolated import ROOT
from tests.support.trained_site import PLAN, Trained, train

STUDIES, IMAGES = 40, 2
PATIENT = "Müller^Änne"
# The console script's entry, on the federation's own day.
SCRIPT = f"""
from security.clock import SystemClock
SystemClock.now_ms = lambda self: {NOW + DAY}
from site_agent.cli import main
main()
"""


@dataclass
class Hospital:
    orthanc: Orthanc
    gate: Gate
    folder: Path
    studies: list[str]
    images: dict[str, bytes]
    secret: list[str]

    def labels(self) -> Path:
        table = self.folder / "labels.csv"
        rows = [f"{study},{ISIC_CLASSES[n % 8]}" for n, study in enumerate(self.studies)]
        table.write_text("StudyInstanceUID,label\n" + "\n".join(rows) + "\n")
        return table

    def configure(self, config: Path) -> None:
        """Training data from the archive, and how it is reached."""
        login = config.parent / "pacs.login"
        login.touch(mode=0o600)
        login.write_text(LOGIN)
        lines = [line for line in config.read_text().splitlines() if not line.startswith(("site = ", "[archive]"))]
        source = f'source = "dicomweb:{self.gate.url}?labels={self.labels()}&window=900/1800"'
        text = "\n".join(source if line.startswith("source = ") else line for line in lines)
        paths = {"ca": self.gate.folder / "ca.pem", "certificate": self.gate.folder / "client.pem", "login_file": login}
        keys = "\n".join(f'{name} = "{path}"' for name, path in paths.items())
        config.write_text(f"{text}\n\n[archive]\n{keys}\n")


@pytest.fixture(scope="module")
def hospital(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hospital]:
    folder = tmp_path_factory.mktemp("hospital")
    orthanc = Orthanc(folder / "orthanc")
    gate = Gate(folder / "gate", orthanc.port)
    studies, images, secret = [], {}, list[str]()
    draw = np.random.default_rng(3)
    for number in range(STUDIES):
        study = generate_uid()
        studies.append(study)
        for _ in range(IMAGES):
            values = (draw.integers(0, 300, (32, 32)) + 200 * (number % 8)).astype(np.uint16)
            header = drawn(
                values,
                modality="MR",
                StudyInstanceUID=study,
                PatientID=f"PAT-{number:04}",
                AccessionNumber=f"ACC-{number:04}",
                SpecificCharacterSet="ISO_IR 100",
                PatientName=PATIENT,
                StudyDate="20261118",
            )
            content = BytesIO()
            header.save_as(content, enforce_file_format=True)
            images[header.SOPInstanceUID] = content.getvalue()
            orthanc.ask("POST", "/instances", content.getvalue())
        secret += [study, f"PAT-{number:04}", f"ACC-{number:04}"]
    yield Hospital(orthanc, gate, folder, studies, images, [*secret, *images, "Müller", LOGIN.split(":")[1]])
    gate.stop()
    orthanc.stop()


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-c", SCRIPT, *map(str, words)]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words), capture_output=True, text=True, env=environment(), timeout=120, check=False
    )


def killed(gate: Gate, after: int, *words: str | Path) -> str:
    """The command, killed while the archive keeps it waiting behind so many images or reports. Returns its output."""
    gate.asked, gate.hold_after = 0, after
    gate.holding = threading.Event()
    process = subprocess.Popen(
        command(*words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
    )
    assert gate.holding.wait(120)
    process.send_signal(signal.SIGKILL)  # its child, which has the connection, ends with it
    told, _ = process.communicate(timeout=20)
    gate.hold_after = None
    return str(told)


@pytest.mark.timeout(600)  # several processes with torch, one after the other, also on a busy machine
def test_from_the_archive_and_back(hospital: Hospital, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, every = hospital.gate, STUDIES * IMAGES
    site = {}

    def fetched_first(config: Path) -> None:
        """Killed half-way, then every seventh answer cut in the middle; in between there is no data set."""
        hospital.configure(config)
        cache = config.parent / "archive"
        told = killed(gate, every // 2, "archive-fetch", "--config", config)
        here = {path.stem: path for path in cache.rglob("*.dcm")}
        assert len(here) == every // 2
        before = {name: path.stat().st_mtime_ns for name, path in here.items()}
        with pytest.raises(DataError, match="image file is missing"):
            open_catalogue(SiteConfig.read(config).data.source, image_size=8)
        gate.asked, gate.cut_every = 0, 7
        done = run("archive-fetch", "--config", config, "--json")
        gate.cut_every = None
        assert done.returncode == 0, done.stderr
        summary = json.loads(done.stdout)
        assert (summary["files"], summary["studies"], summary["fetched"]) == (every, STUDIES, every - every // 2)
        assert summary["isolation"]["exception"] and not summary["isolation"]["keys_readable"]
        assert gate.asked > every - every // 2  # some were asked for twice
        for path in (*cache.rglob("*"), cache):
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
        now = {path.stem: path for path in cache.rglob("*.dcm")}
        assert {name: path.read_bytes() for name, path in now.items()} == hospital.images
        assert all(now[name].stat().st_mtime_ns == when for name, when in before.items())  # not fetched again
        site["told"] = told + done.stdout + done.stderr

    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    trained = train(
        tmp_path / "federation", rounds=1, plan=PLAN.replace("steps = 60", "steps = 4"), prepare=fetched_first
    )
    torch.set_num_threads(threads)
    told = site["told"] + predicted_and_reported(hospital, trained, tmp_path)
    assert not [word for word in hospital.secret if word in told.replace(str(tmp_path), "")]
    erased = run("archive-erase", "--config", trained.config)
    assert f"{every} files erased" in erased.stderr and not (trained.config.parent / "archive").exists()


def predicted_and_reported(hospital: Hospital, trained: Trained, folder: Path) -> str:
    cache, reports, table = trained.config.parent / "archive", folder / "reports", folder / "out.csv"
    words = ("--config", trained.config)
    predicted = run("predict", cache, "-o", table, "--store", reports, *words, "--json")
    assert predicted.returncode == 0, predicted.stderr
    about = json.loads(predicted.stdout)
    assert about["predicted"] == STUDIES * IMAGES and not about["unreported"]
    assert not about["isolation"]["connection_possible"] and not about["isolation"]["keys_readable"]
    assert len(list(reports.glob("*.dcm"))) == STUDIES and stat.S_IMODE(reports.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in reports.iterdir()} == {0o600}
    # Sent: killed half-way, the second time is the rest.
    told = killed(hospital.gate, STUDIES // 2, "archive-send", reports, *words)
    sent = run("archive-send", reports, *words, "--json")
    assert sent.returncode == 0, sent.stderr
    assert json.loads(sent.stdout)["sent"] == STUDIES - STUDIES // 2
    with table.open(newline="", encoding="utf-8") as file:
        rows = {Path(row["file"]).stem: row for row in csv.DictReader(file)}
    valid_in_the_archive(hospital, rows, about)
    return told + sent.stdout + sent.stderr


def valid_in_the_archive(hospital: Hospital, rows: dict[str, dict[str, str]], about: dict[str, Any]) -> None:
    """One report for each study; each says what the table says about each image, under the patient's own name."""
    query = json.dumps({"Level": "Instance", "Query": {"Modality": "SR"}}).encode()
    found = json.loads(hospital.orthanc.ask("POST", "/tools/find", query))
    assert len(found) == STUDIES
    seen = set[str]()
    for name in found:
        content = hospital.orthanc.ask("GET", f"/instances/{name}/file")
        header = pydicom.dcmread(BytesIO(content))
        number = hospital.studies.index(header.StudyInstanceUID)
        assert (header.PatientID, str(header.PatientName)) == (f"PAT-{number:04}", PATIENT)
        assert (header.VerificationFlag, header.PreliminaryFlag) == ("UNVERIFIED", "PRELIMINARY")
        report = highdicom.sr.srread(BytesIO(content))
        groups = report.content.get_image_measurement_groups()
        assert len(groups) == IMAGES
        for group in groups:
            (image,) = group.source_images
            row = rows[image.referenced_sop_instance_uid]
            seen.add(image.referenced_sop_instance_uid)
            values = {m.name.meaning.removeprefix("Probability of "): m.value for m in group.get_measurements()}
            assert values == {
                name: pytest.approx(float(row[f"p_{name}"]), abs=2e-6) for name in ISIC_CLASSES
            }
            (chosen,) = group.get_qualitative_evaluations()
            assert chosen.value.meaning == row["predicted"]
            assert about["model_sha256"].encode() in content
        read_by_another(content)
    assert seen == set(hospital.images)


def read_by_another(content: bytes) -> None:
    """DCMTK, which checks the relations between content items as PS3.3 gives them for this kind of report."""
    done = subprocess.run(["dsrdump", "-"], input=content, capture_output=True, timeout=20, check=False)
    told = [line for line in done.stderr.splitlines() if b"does not support this Specific Character Set" not in line]
    assert done.returncode == 0 and not told
    assert b"Imaging Measurement Report" in done.stdout
