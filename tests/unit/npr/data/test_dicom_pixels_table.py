"""Every modality x frames x photometric interpretation x transfer syntax, and the table of them in docs/data.md.

Each image is drawn here, packed by an encoder, read, and compared with what was drawn. A new row of the table is a row
of `READ` or `REFUSED`; the page must have the table that these make.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pydicom
import pytest
from openjpeg.utils import encode_array
from PIL import Image
from pydicom.encaps import encapsulate
from pydicom.pixels import convert_color_space
from pydicom.uid import (
    HTJ2K,
    JPEG2000,
    MPEG2MPML,
    MPEG4HP41,
    UID,
    ExplicitVRBigEndian,
    HTJ2KLossless,
    HTJ2KLosslessRPCL,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGExtended12Bit,
    JPEGLossless,
    JPEGLosslessSV1,
    JPEGLSLossless,
    JPEGLSNearLossless,
    RLELossless,
)

from lazaret.errors import DataError
from npr.data.dicom_pixels import MODALITIES, DicomView, Window, render
from tests.support.dicom_images import GREY, HTJ2K_STREAM, PLAIN, drawn, packed, saved

PAGE = Path(__file__).parents[4] / "docs/data.md"
ROWS, COLUMNS = GREY.shape
# Smooth, as photographs are: a lossy encoder is not to be judged by noise.
RED = np.linspace(40, 220, COLUMNS)[None].repeat(ROWS, 0)
COLOUR = np.stack([RED, RED[:, ::-1], np.linspace(60, 200, ROWS)[:, None].repeat(COLUMNS, 1)], -1).astype(np.uint8)
EIGHT_BITS = (JPEGBaseline8Bit, JPEGExtended12Bit)

GREYS, PALETTE = ("MONOCHROME1", "MONOCHROME2"), "PALETTE COLOR"
# Its own colour transforms: reversible, or not.
BY_JPEG_2000 = ("YBR_RCT", "YBR_ICT")
EVERY = dict.fromkeys((*GREYS, "RGB", "YBR_FULL", "YBR_FULL_422", PALETTE), 0)
PHOTOMETRIC = (*EVERY, *BY_JPEG_2000)
HIGH_THROUGHPUT = (HTJ2KLossless, HTJ2KLosslessRPCL, HTJ2K)
# The largest error of 255 that a pixel may have, by transfer syntax and photometric interpretation. What is missing is
# a pair that the standard does not have (PS3.5 section 8.2), or that no encoder at hand makes.
NO_SUBSAMPLING = {name: 0 for name in EVERY if name != "YBR_FULL_422"}
READ: dict[UID, dict[str, int]] = {
    **dict.fromkeys(PLAIN, EVERY),
    RLELossless: NO_SUBSAMPLING,
    JPEGLossless: NO_SUBSAMPLING,
    JPEGLosslessSV1: NO_SUBSAMPLING,
    JPEGLSLossless: NO_SUBSAMPLING,
    JPEG2000Lossless: NO_SUBSAMPLING | {"YBR_RCT": 0},
    **dict.fromkeys(HIGH_THROUGHPUT, dict.fromkeys(GREYS, 0)),
    JPEGBaseline8Bit: {**dict.fromkeys(GREYS, 3), "RGB": 3, "YBR_FULL": 6, "YBR_FULL_422": 8},
    JPEGExtended12Bit: dict.fromkeys(GREYS, 3),
    JPEGLSNearLossless: {**dict.fromkeys(GREYS, 3), "RGB": 3, "YBR_FULL": 8},
    JPEG2000: {**dict.fromkeys(GREYS, 4), "RGB": 4, "YBR_FULL": 8, "YBR_RCT": 0, "YBR_ICT": 4},
}
REFUSED = {
    JPEGExtended12Bit: "lossy JPEG of 12 bits is not read",
    MPEG2MPML: "compression is not read",
    MPEG4HP41: "compression is not read",
    UID("1.2.840.10008.1.2.4.94"): "compression is not read",
    UID("1.2.826.0.1.3680043.2.682.1.40"): "compression is not read (private)",
}


def picture(syntax: UID, photometric: str) -> np.ndarray:
    """The stored values."""
    if photometric == PALETTE or (photometric in GREYS and syntax in EIGHT_BITS):
        return (GREY // 8).astype(np.uint8)
    return GREY if photometric in GREYS else COLOUR


def coloured(header: pydicom.Dataset, syntax: UID) -> None:
    """Both bytes of an entry differ: an entry that is read the wrong way round is another colour."""
    for times, name in enumerate(("Red", "Green", "Blue"), start=1):
        header.add_new(f"{name}PaletteColorLookupTableDescriptor", "US", [256, 0, 16])
        shown = np.arange(256) * times % 256
        entries = (256 * shown + np.minimum(shown + 60, 255)).astype(">u2" if syntax == ExplicitVRBigEndian else "<u2")
        setattr(header, f"{name}PaletteColorLookupTableData", entries.tobytes())


def subsampled(header: pydicom.Dataset) -> None:
    """Two luminances, then the chrominances that they share (PS3.3 C.7.6.3.1.2)."""
    pairs = np.frombuffer(header.PixelData, np.uint8).reshape(-1, 2, 3)
    header.PixelData = np.stack([pairs[:, 0, 0], pairs[:, 1, 0], pairs[:, 0, 1], pairs[:, 0, 2]], 1).tobytes()
    header.PhotometricInterpretation = "YBR_FULL_422"


def photographed(header: pydicom.Dataset, values: np.ndarray, photometric: str, syntax: UID, frames: int) -> None:
    """Lossy JPEG as cameras and ultrasound devices write it."""
    sampling = {"subsampling": 1 if photometric == "YBR_FULL_422" else 0, "keep_rgb": photometric == "RGB"}
    stream = io.BytesIO()
    Image.fromarray(values).save(stream, "JPEG", quality=98, **(sampling if values.ndim == 3 else {}))
    encapsulated(header, stream.getvalue(), syntax, frames)


def transformed(header: pydicom.Dataset, values: np.ndarray, photometric: str, syntax: UID, frames: int) -> None:
    """The colour transforms of JPEG 2000 itself: reversible, or not."""
    lossy = {"signal_noise_ratios": [60]} if photometric == "YBR_ICT" else {}
    encapsulated(header, encode_array(values, photometric_interpretation=1, use_mct=True, **lossy), syntax, frames)
    header.PhotometricInterpretation = photometric


def encapsulated(header: pydicom.Dataset, stream: bytes, syntax: UID, frames: int) -> None:
    header.PixelData = encapsulate([stream + b"\0" * (len(stream) % 2)] * frames)
    header["PixelData"].is_undefined_length = True
    header.file_meta.TransferSyntaxUID = syntax


def made(syntax: UID, photometric: str, frames: int) -> pydicom.Dataset:
    values = picture(syntax, photometric)
    one_sample = values.ndim == 2
    # Whoever packs a grey image need not know how it is shown, and not every encoder does.
    first = "MONOCHROME2" if one_sample else "RGB" if photometric in BY_JPEG_2000 else photometric.replace("_422", "")
    header = drawn(values, photometric=first, bits=8 * values.dtype.itemsize, frames=frames)
    if photometric == "YBR_FULL_422" and syntax in PLAIN:
        subsampled(header)
    if syntax in HIGH_THROUGHPUT:
        encapsulated(header, HTJ2K_STREAM, syntax, frames)
    elif photometric in BY_JPEG_2000:
        transformed(header, values, photometric, syntax, frames)
    elif syntax in EIGHT_BITS:
        photographed(header, values, photometric, syntax, frames)
    else:
        header = packed(header, syntax)
    if one_sample or syntax in EIGHT_BITS:
        header.PhotometricInterpretation = photometric
    if photometric == PALETTE:
        coloured(header, syntax)
    return header


def expected(syntax: UID, photometric: str) -> np.ndarray:
    values = picture(syntax, photometric)
    if photometric == PALETTE:
        return np.stack([values.astype(int) * times % 256 for times in (1, 2, 3)], -1)
    if values.ndim == 2:
        shown = np.rint(values / (255 if values.dtype == np.uint8 else 1800) * 255).clip(0, 255)
        return 255 - shown if photometric == "MONOCHROME1" else shown
    if photometric in ("RGB", *BY_JPEG_2000) or syntax in EIGHT_BITS:  # whose own colour space the encoder has chosen
        return values
    if photometric == "YBR_FULL_422":
        values = values.copy()
        values[:, 1::2, 1:] = values[:, ::2, 1:]
    return convert_color_space(values, "YBR_FULL", "RGB")


@pytest.mark.parametrize("syntax", READ, ids=lambda uid: uid.keyword)
def test_every_modality_number_of_frames_and_photometric_interpretation(syntax, tmp_path):
    read = 0
    for photometric, error in READ[syntax].items():
        wanted = expected(syntax, photometric)
        top = 255 if picture(syntax, photometric).dtype == np.uint8 else 1800
        for frames in (1, 3):
            header = pydicom.dcmread(saved(made(syntax, photometric, frames), tmp_path / "a.dcm"))
            assert header.file_meta.TransferSyntaxUID == syntax and int(header.get("NumberOfFrames", 1)) == frames
            header.RescaleSlope, header.RescaleIntercept = 1, 0
            for modality in MODALITIES:
                header.Modality = modality
                found = render(header, DicomView(window=Window(level=top / 2, width=top)), "a")
                worst = np.abs(found.astype(int) - wanted.astype(int)).max()
                assert worst <= error, (photometric, frames, modality, worst)
                read += 1
    assert read == len(READ[syntax]) * 2 * len(MODALITIES)


@pytest.mark.parametrize("syntax", REFUSED, ids=lambda uid: uid.keyword or "private")
def test_what_is_not_read_is_refused_in_one_line_that_names_the_row(syntax):
    for modality in MODALITIES:
        header = drawn(GREY, bits=12, modality=modality)
        encapsulated(header, b"\0" * 64, syntax, 1)
        with pytest.raises(DataError, match=re.escape(REFUSED[syntax])) as caught:
            render(header, DicomView(), "t.csv row 3")
        assert "t.csv row 3" in str(caught.value) and "\n" not in str(caught.value)


def table() -> str:
    """What the tests above read, as the page shows it."""
    rows = [f"| transfer syntax | {' | '.join(PHOTOMETRIC)} |", "|---" * (len(PHOTOMETRIC) + 1) + "|"]
    for syntax, errors in READ.items():
        name = f"{syntax.name}, 8 bits" if syntax == JPEGExtended12Bit else syntax.name
        cells = (("exact" if error == 0 else f"within {error}") for error in (errors.get(p) for p in PHOTOMETRIC))
        cells = ["-" if p not in errors else cell for p, cell in zip(PHOTOMETRIC, cells, strict=True)]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    for syntax in REFUSED:
        name = "private" if syntax.is_private else syntax.name
        name += ", 12 bits" if syntax == JPEGExtended12Bit else ""
        rows.append(f"| {name} | {' | '.join(['refused'] * len(PHOTOMETRIC))} |")
    return "\n".join(rows)


def test_the_page_has_the_table_of_these_tests():
    found = re.search(r"<!-- made by test_dicom_pixels_table -->\n(.*?)\n\n", PAGE.read_text(), re.DOTALL)
    assert found and found[1] == table()
    assert f"{', '.join(MODALITIES[:-1])} and {MODALITIES[-1]}" in PAGE.read_text()
