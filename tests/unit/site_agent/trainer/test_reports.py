"""Reports: what they say, about which image and frame, and what happens where headers are odd."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import highdicom
import numpy as np
import pydicom
import pytest

from lazaret.errors import ConfigError
from npr.data.sources import SourceName
from site_agent.trainer import reports as room
from site_agent.trainer.predict import check_store, shown_frame
from site_agent.trainer.reports import ReportedModel, Reports
from tests.support.dicom_images import GREY, drawn, saved

MODEL = ReportedModel(class_names=("nevus", "melanoma"), architecture="net", digest="ab" * 32, round=7, frame="middle")


def test_one_report_for_a_study_and_one_group_for_an_image(tmp_path: Path) -> None:
    made = Reports(model=MODEL)
    film = np.stack([GREY] * 5)
    patient = {"StudyInstanceUID": "1.2.3", "PatientID": "P1", "PatientName": "Müller"}
    first = drawn(GREY, **patient, SpecificCharacterSet="ISO_IR 100")
    second = drawn(film, **patient, SpecificCharacterSet="ISO_IR 192", modality="US")
    other = drawn(GREY, StudyInstanceUID="1.2.4", PatientID="P2")
    for number, (header, odds) in enumerate(((first, 0.25), (second, 0.75), (other, 0.5))):
        made.add(f"{number}.dcm", saved(header, tmp_path / f"{number}.dcm"), (odds, 1 - odds))
    assert made.write(tmp_path / "reports") == []
    paths = sorted((tmp_path / "reports").iterdir())
    assert len(paths) == 2 and stat.S_IMODE((tmp_path / "reports").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
    found = {pydicom.dcmread(path).StudyInstanceUID: path for path in paths}
    report = highdicom.sr.srread(found["1.2.3"])
    assert found["1.2.3"].stem == report.SOPInstanceUID and report.Modality == "SR"
    assert (report.PatientID, str(report.PatientName)) == ("P1", "Müller")
    assert (report.CompletionFlag, report.VerificationFlag, report.PreliminaryFlag) == (
        "COMPLETE", "UNVERIFIED", "PRELIMINARY"
    )  # fmt: skip
    one, two = report.content.get_image_measurement_groups()
    said = [{m.name.meaning: m.value for m in group.get_measurements()} for group in (one, two)]
    assert said == [
        {"Probability of nevus": 0.25, "Probability of melanoma": 0.75},
        {"Probability of nevus": 0.75, "Probability of melanoma": 0.25},
    ]
    chosen = [group.get_qualitative_evaluations()[0].value.meaning for group in (one, two)]
    assert chosen == ["melanoma", "nevus"]
    images = [group.source_images[0] for group in (one, two)]
    assert [image.referenced_sop_instance_uid for image in images] == [first.SOPInstanceUID, second.SOPInstanceUID]
    assert [image.referenced_frame_numbers for image in images] == [None, [3]]
    assert (b"ab" * 32) in found["1.2.3"].read_bytes()


def test_several_labels_of_an_image(tmp_path: Path) -> None:
    """Each with a probability of at least a half is predicted; there may be none."""
    made = Reports(model=replace(MODEL, many=True))
    for number, odds in enumerate(((0.9, 0.5), (0.1, 0.2))):
        path = saved(drawn(GREY, StudyInstanceUID="1.2.3", PatientID="P1"), tmp_path / f"{number}.dcm")
        made.add(path.name, path, odds)
    assert made.write(tmp_path / "reports") == []
    (path,) = (tmp_path / "reports").iterdir()
    groups = highdicom.sr.srread(path).content.get_image_measurement_groups()
    assert [[one.value.meaning for one in group.get_qualitative_evaluations()] for group in groups] == [
        ["nevus", "melanoma"], []
    ]  # fmt: skip


def test_a_study_that_makes_no_report_costs_nothing_but_its_lines(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    made = Reports(model=MODEL)
    strange = drawn(GREY, StudyInstanceUID="1.2.3", PatientName="Meier^Anna", PatientSex="M")
    strange.SOPClassUID = strange.file_meta.MediaStorageSOPClassUID = "1.2.3.4.5.6"
    made.add("strange.dcm", saved(strange, tmp_path / "strange.dcm"), (0.5, 0.5))
    made.add("good.dcm", saved(drawn(GREY), tmp_path / "good.dcm"), (0.5, 0.5))
    (tmp_path / "gone.dcm").write_bytes(b"no longer an image")
    made.add("gone.dcm", tmp_path / "gone.dcm", (0.5, 0.5))
    problems = made.write(tmp_path / "reports")
    assert [name for name, _ in problems] == ["gone.dcm", "strange.dcm"]
    assert all(line.startswith("no report: ") and "\n" not in line for _, line in problems)
    out, err = capfd.readouterr()
    assert "Meier" not in out + err + str(problems) and len(list((tmp_path / "reports").iterdir())) == 1


@pytest.mark.parametrize(
    ("patients", "message"),
    [
        (({"PatientID": "P1", "PatientName": "A"}, {"PatientID": "P2", "PatientName": "B"}), "more than one patient"),
        (({"PatientID": "", "PatientName": "A"}, {"PatientID": "P2", "PatientName": "A"}), "more than one patient"),
        (({"PatientID": "", "PatientName": "A"}, {"PatientID": "", "PatientName": "B"}), "more than one patient"),
        (({"StudyInstanceUID": "", "PatientID": "P1"}, {"StudyInstanceUID": "", "PatientID": "P2"}), "no valid UID"),
        (({"StudyInstanceUID": "1.2.x", "PatientID": "P1"}, {"StudyInstanceUID": "1.2.x"}), "no valid UID"),
    ],
)
def test_a_report_is_about_one_patient(patients: tuple[dict[str, str], ...], message: str, tmp_path: Path) -> None:
    """Where an archive has merged two by mistake, the images of one would be reported under the other's name."""
    made = Reports(model=MODEL)
    for number, more in enumerate(patients):
        path = saved(drawn(GREY, **{"StudyInstanceUID": "1.2.3"} | more), tmp_path / f"{number}.dcm")
        made.add(path.name, path, (0.25, 0.75))
    problems = made.write(tmp_path / "reports")
    assert [name for name, _ in problems] == ["0.dcm", "1.dcm"] and all(message in line for _, line in problems)
    assert not any(word in line for _, line in problems for word in ("P1", "P2", "1.2.x"))
    assert not list((tmp_path / "reports").iterdir())


def test_spaces_around_an_id_make_no_other_patient(tmp_path: Path) -> None:
    made = Reports(model=MODEL)
    for number, patient in enumerate(("P1", " P1")):
        path = saved(drawn(GREY, StudyInstanceUID="1.2.3", PatientID=patient), tmp_path / f"{number}.dcm")
        made.add(path.name, path, (0.25, 0.75))
    assert made.write(tmp_path / "reports") == []


def test_what_is_said_before_a_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_store("dicom:x?frame=first", tmp_path / "new") == "first"
    with pytest.raises(ConfigError, match="refusing to overwrite"):
        check_store("dicom:x", tmp_path)
    with pytest.raises(ConfigError, match="only DICOM images"):
        check_store("csv:x", tmp_path / "new")

    def missing() -> None:
        raise ConfigError("reports need the package highdicom")

    monkeypatch.setattr("site_agent.trainer.predict.require_highdicom", missing)
    with pytest.raises(ConfigError, match="highdicom"):
        check_store("dicom:x", tmp_path / "new")
    assert room.require_highdicom() is highdicom


@pytest.mark.parametrize(
    ("text", "frame"), [("", "middle"), ("?frame=all", "middle"), ("?frame=4", 4), ("?frame=first", "first")]
)
def test_which_frame_is_predicted(text: str, frame: object) -> None:
    assert shown_frame(SourceName.parse(f"dicom:x{text}").options) == frame
