"""Decoding one frame: colour by plane, streams that are not what the header says, frames in pieces."""

from __future__ import annotations

import signal
import subprocess
import sys
import tracemalloc
import zlib
from io import BytesIO

import numpy as np
import pydicom
import pytest
from PIL import Image
from pydicom.data import get_testdata_file
from pydicom.encaps import encapsulate, generate_frames, get_frame
from pydicom.pixels import pixel_array
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGLosslessSV1,
    JPEGLSLossless,
    RLELossless,
)

from lazaret.errors import DataError
from npr.data import dicom_decoding
from npr.data.dicom_decoding import decoded
from npr.data.dicom_pixels import DicomView, Window, read_header, render
from tests.support.dicom_images import COLUMNS, GREY, ROWS, drawn, packed, saved

COLOUR = np.stack([GREY % 251, (GREY // 7) % 241, 255 - GREY % 253], axis=-1).astype(np.uint8)
WIDE = Window(level=900, width=1800)


def shown(header, tmp_path, view=None) -> np.ndarray:
    return render(read_header(saved(header, tmp_path / "a.dcm"), "a"), view or DicomView(), "a")


def spread(values, low, high) -> np.ndarray:
    return np.rint(np.clip((np.asarray(values, float) - low) / (high - low), 0, 1) * 255).astype(np.uint8)


@pytest.mark.parametrize("syntax", [RLELossless, JPEGLSLossless, JPEG2000Lossless, JPEGLosslessSV1])
def test_compressed_colour_is_by_pixel_whatever_the_header_says(syntax, tmp_path):
    header = packed(drawn(COLOUR, modality="US", photometric="RGB", bits=8), syntax)
    header.PlanarConfiguration = 1
    assert np.array_equal(shown(header, tmp_path), COLOUR)


@pytest.mark.parametrize(
    "name",
    [
        "693_J2KI.dcm",
        "GDCMJ2K_TextGBR.dcm",
        "J2K_pixelrep_mismatch.dcm",
        "JPEGLSNearLossless_16.dcm",
        "MR_small_jpeg_ls_lossless.dcm",
        "SC_rgb_dcmtk_+eb+cy+s4.dcm",
        "SC_rgb_jls_lossy_line.dcm",
        "SC_rgb_jpeg_app14_dcmd.dcm",
        "SC_rgb_jpeg_gdcm.dcm",
    ],
)
def test_files_of_other_programs_are_what_pydicom_reads(name):
    header = pydicom.dcmread(get_testdata_file(name, download=False))
    assert np.array_equal(decoded(header, 0), pixel_array(header, index=0))


def test_colour_by_plane(tmp_path):
    header = drawn(COLOUR, modality="US", photometric="RGB", bits=8, frames=3, PlanarConfiguration=1)
    header.PixelData = COLOUR.transpose(2, 0, 1).tobytes() * 3
    assert np.array_equal(shown(header, tmp_path), COLOUR)


@pytest.mark.parametrize("syntax", [JPEGLSLossless, JPEG2000Lossless, JPEGLosslessSV1, JPEGBaseline8Bit])
@pytest.mark.parametrize("size", [(COLUMNS, ROWS), (ROWS // 2, COLUMNS), (2 * ROWS, COLUMNS)])
def test_a_size_that_the_stream_does_not_have_is_refused(syntax, size, tmp_path):
    """Some decoders would scramble the image, and GDCM would end the process."""
    if syntax == JPEGBaseline8Bit:
        stream = BytesIO()
        Image.fromarray((GREY // 8).astype(np.uint8)).save(stream, "JPEG")
        header = with_stream(drawn((GREY // 8).astype(np.uint8), bits=8), stream.getvalue())
        header.file_meta.TransferSyntaxUID = syntax
    else:
        header = packed(drawn(GREY), syntax)
    assert shown(header, tmp_path).shape == GREY.shape
    header.Rows, header.Columns = size
    with pytest.raises(DataError, match=r"pixels cannot be read \(ValueError\)"):
        shown(header, tmp_path)


def test_a_deflated_file_that_holds_more_than_memory_is_refused_before_it_is_inflated(tmp_path, monkeypatch):
    path = saved(packed(drawn(GREY), DeflatedExplicitVRLittleEndian), tmp_path / "a.dcm")
    data = path.read_bytes()
    start = 144 + int.from_bytes(data[140:144], "little")
    inflated = zlib.decompress(data[start:], -zlib.MAX_WBITS)
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    # An element of 64 MB of zeros (an unknown private one) behind the pixels: 65 kB of a file.
    more = b"\xe3\x7f\x10\x00UN\0\0" + (2**26).to_bytes(4, "little") + bytes(2**26)
    path.write_bytes(data[:start] + packer.compress(inflated + more) + packer.flush())
    assert path.stat().st_size < 10**5 and read_header(path, "row 2").Rows == GREY.shape[0]
    monkeypatch.setattr(dicom_decoding, "MOST_INFLATED", 2**24)
    tracemalloc.start()
    with pytest.raises(DataError, match=f"row 2: it inflates to more than {2**24} bytes"):
        read_header(path, "row 2")
    assert tracemalloc.get_traced_memory()[1] < 2**23, "before it is inflated whole"
    tracemalloc.stop()
    path.write_bytes(data[:start] + b"\xff" * 50)
    with pytest.raises(DataError, match="not a DICOM file"):
        read_header(path, "row 2")


def test_an_empty_offset_table_and_frames_in_pieces(tmp_path):
    header = packed(drawn(np.stack([GREY, GREY // 2, GREY // 4])), JPEGLSLossless)
    frames = list(generate_frames(header.PixelData, number_of_frames=3))
    for pieces in (1, 3):
        header.PixelData = encapsulate(frames, fragments_per_frame=pieces, has_bot=False)
        header["PixelData"].is_undefined_length = True
        found = shown(header, tmp_path, DicomView(window=WIDE, frame=2))
        assert np.array_equal(found, spread(GREY // 2, 0, 1800))


def test_bits_above_those_that_are_stored_are_not_of_the_image(tmp_path):
    """Old devices keep overlays there, and some write no sign into them."""
    view = DicomView(window=Window(level=0, width=4096))
    signed = GREY.astype(np.int16) - 900
    for values, written in ((GREY, GREY | 0x8000), (signed, signed.astype(np.uint16) & 0x0FFF)):
        header = drawn(values, bits=12)
        header.PixelData = written.astype("<u2").tobytes()
        assert np.array_equal(shown(header, tmp_path, view), spread(values, -2048, 2048))


def with_stream(header, stream: bytes):
    header.PixelData = encapsulate([stream + b"\0" * (len(stream) % 2)])
    header["PixelData"].is_undefined_length = True
    return header


def lossless() -> list:
    """Grey, and colour with an Adobe marker."""
    return [
        packed(drawn(GREY), JPEGLosslessSV1),
        packed(drawn(COLOUR, modality="US", photometric="RGB", bits=8), JPEGLosslessSV1),
    ]


# A segment of a version of JFIF that does not exist.
ODD = b"\xff\xe0\x00\x10JFIF\x00\x02" + bytes(8)


def test_no_damaged_head_of_a_lossless_stream_reaches_gdcm():
    """Every byte before the pixels, in four ways: an image or one error. GDCM would end this process."""
    refused = 0
    for header in lossless():
        stream = get_frame(header.PixelData, 0, number_of_frames=1)
        scan = stream.index(b"\xff\xda")
        heads = [
            stream[:place] + bytes([stream[place] ^ change]) + stream[place + 1 :]
            for place in range(scan + 2 + stream[scan + 3])
            for change in (0x01, 0x10, 0x80, 0xFF)
        ]
        among = [stream[:-20] + bytes([0xFF, marker]) + stream[-18:] for marker in (0xC4, 0xC3, 0xDA, 0xDB, 0xEE)]
        for damaged in (*heads, *among, stream[:2] + ODD + stream[2:]):
            try:
                assert render(with_stream(header, damaged), DicomView(), "a").shape[:2] == (ROWS, COLUMNS)
            except DataError:
                refused += 1
    assert refused > 400


def cut_off(cut: int):
    """JPEG-LS without its last bytes."""
    header = packed(drawn(COLOUR, modality="US", photometric="RGB", bits=8), JPEGLSLossless)
    return with_stream(header, get_frame(header.PixelData, 0, number_of_frames=1)[:-cut])


@pytest.mark.timeout(20)
def test_a_stream_that_was_cut_off_is_refused():
    for cut in range(3, 40):
        with pytest.raises(DataError, match=r"pixels cannot be read \(ValueError\)"):
            render(cut_off(cut), DicomView(), "a")


# Without `check_lossless` and `check_end`.
UNCHECKED = """
import sys
from pathlib import Path
from npr.data import dicom_decoding
from npr.data.dicom_pixels import DicomView
dicom_decoding.check_lossless = dicom_decoding.check_end = lambda *_, **__: None
print("begins", flush=True)
DicomView().read(Path(sys.argv[1]), "a", 8)
"""


def unchecked(path) -> subprocess.Popen:
    script = [sys.executable, "-c", UNCHECKED, str(path)]
    process = subprocess.Popen(script, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begins\n"
    return process


def test_without_the_check_a_damaged_head_ends_the_process_twin(tmp_path):
    header = lossless()[0]
    stream = get_frame(header.PixelData, 0, number_of_frames=1)
    path = saved(with_stream(header, stream[:2] + ODD + stream[2:]), tmp_path / "a.dcm")
    with unchecked(path) as process:
        assert process.wait(30) == -signal.SIGABRT


def test_without_the_check_a_stream_that_was_cut_off_is_read_for_ever_twin(tmp_path):
    with unchecked(saved(cut_off(16), tmp_path / "a.dcm")) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
        process.kill()
