"""Predictions as DICOM structured reports (TID 1500, Measurement Report), one for each study: `predict --store`.

A report refers to the images that were read, and says for each the probability of every class and the class with the
highest (or each label with at least 0.5, where an image may have several). It is marked preliminary and unverified:
nobody has looked at it. It names the patient as the images do, so the folder is as private as they are. `archive-send`
carries it to the archive, in a process that has a network.
"""

from __future__ import annotations

import hashlib
import io
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pydicom
from pydicom.sr.codedict import codes
from pydicom.uid import UID, generate_uid

from lazaret import files, software
from lazaret.errors import ConfigError, DataError
from npr.data.dicom_pixels import Frame, as_data_error, frame_count, frame_index, read_header

_SCHEME: Final = "99LAZARET"  # private: "99" and a name of our own (DICOM PS3.3 section 8.2)
_MEANING: Final = 64  # letters of a code's meaning
# May be empty in a report, and may be missing in images that were made anonymous.
_PATIENT_AND_STUDY: Final = (
    "PatientID", "PatientName", "PatientBirthDate", "PatientSex", "AccessionNumber", "StudyID", "StudyDate",
    "StudyTime", "ReferringPhysicianName",
)  # fmt: skip
_DESCRIPTION: Final = "Predictions of a research model, not verified"


def require_highdicom() -> Any:
    """:raises ConfigError: if the extra is not installed."""
    try:
        import highdicom
    except ImportError as error:
        hint = "pip install 'lazaret[dicom]', or leave --store out"
        raise ConfigError("reports need the package highdicom", hint=hint) from error
    return highdicom


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedModel:
    """What a report says about the model that made it.

    :ivar frame: which frame of an image with several was shown to it.
    :ivar many: an image may have several labels: those with a probability of at least 0.5 are predicted.
    """

    class_names: tuple[str, ...]
    architecture: str
    digest: str
    round: int
    frame: Frame
    many: bool = False


@dataclass(kw_only=True)
class Reports:
    """Collects predictions, and writes them."""

    model: ReportedModel
    predicted: list[tuple[str, Path, tuple[float, ...]]] = field(default_factory=list)

    def add(self, name: str, path: Path, probabilities: Sequence[float]) -> None:
        """:param name: of the file, on this machine's screen."""
        self.predicted.append((name, path, tuple(float(p) for p in probabilities)))

    def write(self, folder: Path) -> list[tuple[str, str]]:
        """One file for each study, in a new folder that only this user may enter. Returns the files whose study has no
        report, with the reason."""
        folder.mkdir(mode=0o700)
        studies: dict[str, list[tuple[str, pydicom.Dataset, tuple[float, ...]]]] = defaultdict(list)
        problems = []
        for name, path, probabilities in self.predicted:
            try:
                header = read_header(path, name, pixels=False)
                with as_data_error("header cannot be read", name, ""):
                    studies[str(header.StudyInstanceUID)].append((name, header, probabilities))
            except DataError as error:
                problems.append((name, f"no report: {error.message}"))
        for study, images in studies.items():
            try:
                _check_one_patient(study, [header for _, header, _ in images], images[0][0])
                # highdicom checks what it copies, and says what is odd about it with the value.
                with as_data_error("the study's headers do not make a report", images[0][0], ""):
                    report = self._report(images)
                    content = io.BytesIO()
                    report.save_as(content, enforce_file_format=True)
                files.write_atomically(folder / f"{report.SOPInstanceUID}.dcm", content.getvalue(), mode=0o600)
            except DataError as error:
                problems += [(name, f"no report: {error.message}") for name, _, _ in images]
        return problems

    def _report(self, images: Sequence[tuple[str, pydicom.Dataset, tuple[float, ...]]]) -> Any:
        sr = require_highdicom().sr
        headers = [header for _, header, _ in images]
        for name in _PATIENT_AND_STUDY:
            if name not in headers[0]:
                setattr(headers[0], name, None)
        groups = [self._group(number, header, row) for number, (_, header, row) in enumerate(images, start=1)]
        observer = sr.ObserverContext(
            observer_type=codes.DCM.Device,
            observer_identifying_attributes=sr.DeviceObserverIdentifyingAttributes(
                uid=_uid_of(self.model.digest), name="Lazaret", model_name=self.model.architecture[:_MEANING]
            ),
        )
        content = sr.MeasurementReport(
            observation_context=sr.ObservationContext(observer_device_context=observer),
            procedure_reported=codes.SCT.ImagingProcedure,
            imaging_measurements=groups,
        )
        return sr.ComprehensiveSR(
            evidence=headers,
            content=content,
            series_instance_uid=generate_uid(prefix=None),
            series_number=9000,
            sop_instance_uid=generate_uid(prefix=None),
            instance_number=1,
            manufacturer="Lazaret",
            manufacturer_model_name=self.model.architecture[:_MEANING],
            software_versions=software.version(),
            series_description=_DESCRIPTION,
            specific_character_set="ISO_IR 192",
            is_complete=True,
            is_final=False,
            is_verified=False,
        )

    def _group(self, number: int, header: pydicom.Dataset, probabilities: tuple[float, ...]) -> Any:
        """What is said about one image."""
        sr, names = require_highdicom().sr, self.model.class_names
        frames = frame_count(header, "")
        shown = [frame_index(self.model.frame, frames, "") + 1] if frames > 1 else None
        image = sr.SourceImageForMeasurementGroup(header.SOPClassUID, header.SOPInstanceUID, shown)
        least = 0.5 if self.model.many else max(probabilities)
        predicted = [name for name, value in zip(names, probabilities, strict=True) if value >= least]
        best = predicted if self.model.many else predicted[:1]
        return sr.MeasurementsAndQualitativeEvaluations(
            tracking_identifier=sr.TrackingIdentifier(uid=generate_uid(prefix=None), identifier=f"image {number}"),
            algorithm_id=sr.AlgorithmIdentification(
                name="Lazaret",
                version=software.version(),
                parameters=[f"model SHA-256 {self.model.digest}", f"round {self.model.round}"],
            ),
            measurements=[
                sr.Measurement(name=_code(f"Probability of {name}"), value=round(value, 6), unit=codes.UCUM.NoUnits)
                for name, value in zip(names, probabilities, strict=True)
            ],
            qualitative_evaluations=[
                sr.QualitativeEvaluation(name=_code("Predicted class"), value=_code(name)) for name in best
            ],
            source_images=[image],
        )


def _check_one_patient(study: str, headers: Sequence[pydicom.Dataset], where: str) -> None:
    """A report has one patient's name. Archives merge two by mistake, and images without a study are of anybody.

    :raises DataError: where the images name more than one.
    """
    if not UID(study).is_valid:
        raise DataError("the study has no valid UID", where=where)
    with as_data_error("header cannot be read", where, ""):
        ids = {str(header.get("PatientID") or "").strip() for header in headers}
        named = {str(header.get("PatientName") or "").strip() for header in headers} if ids == {""} else ids
    if len(named) > 1:
        raise DataError("the images of its study name more than one patient", where=where)


def _code(meaning: str) -> Any:
    """A code of our own for a text of ours: the same text has the same code everywhere."""
    value = hashlib.sha256(meaning.encode()).hexdigest()[:16]
    return require_highdicom().sr.CodedConcept(value, _SCHEME, meaning[:_MEANING])


def _uid_of(digest: str) -> str:
    """The model as an observer: one UID for one model (DICOM PS3.5 annex B.2)."""
    return f"2.25.{int.from_bytes(hashlib.sha256(digest.encode()).digest()[:16], 'big')}"
