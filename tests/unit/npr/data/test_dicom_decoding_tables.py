"""Look-up tables, on images drawn here: entries of eight and sixteen bits, in both orders of bytes."""

from __future__ import annotations

import numpy as np
import pydicom
import pytest
from pydicom.uid import ExplicitVRBigEndian, ExplicitVRLittleEndian

from lazaret.errors import DataError
from npr.data.dicom_pixels import DicomView, Window, read_header, render
from tests.support.dicom_images import drawn, packed, saved


def shown(header, tmp_path, view=None) -> np.ndarray:
    return render(read_header(saved(header, tmp_path / "a.dcm"), "a"), view or DicomView(), "a")


def with_palette(pixels, entries, descriptor, **more) -> pydicom.Dataset:
    header = drawn(pixels, modality="US", photometric="PALETTE COLOR", bits=8 * pixels.dtype.itemsize, **more)
    for name in ("Red", "Green", "Blue"):
        header.add_new(f"{name}PaletteColorLookupTableDescriptor", "US", descriptor)
        setattr(header, f"{name}PaletteColorLookupTableData", entries.tobytes())
    return header


@pytest.mark.parametrize(
    ("pixels", "entries", "bits", "expected"),
    [
        (np.array([[0, 1, 2, 300]], np.uint16), np.arange(256, dtype=np.uint8), 8, [0, 1, 2, 255]),  # not the 44th
        (np.array([[0, 1, 2, 3]], np.uint8), np.array([0, 10, 128, 255], "<u2"), 8, [0, 10, 128, 255]),
        (np.array([[0, 1, 2, 3]], np.uint8), np.array([0, 10, 128, 255], "<u2"), 16, [0, 10, 128, 255]),
        (np.array([[0, 1, 2, 3]], np.uint8), np.array([0, 0x1234, 0x8000, 0xFFFF], "<u2"), 16, [0, 18, 128, 255]),
    ],
)
def test_palettes_of_eight_and_sixteen_bits(pixels, entries, bits, expected, tmp_path):
    found = shown(with_palette(pixels, entries, [len(entries), 0, bits]), tmp_path)
    assert found.tolist() == [[[value] * 3 for value in expected]]


@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, ExplicitVRBigEndian])
def test_tables_in_both_orders_of_bytes(syntax, tmp_path):
    order = "<u2" if syntax.is_little_endian else ">u2"

    def table(*entries: int) -> pydicom.Dataset:
        item = pydicom.Dataset()
        item.LUTDescriptor, item.ModalityLUTType = [len(entries), 0, 16], "US"
        item.add_new("LUTData", "OW", np.array(entries, order).tobytes())
        return item

    values = np.array([[0, 1, 2, 9]], np.uint16)
    voi = packed(drawn(values, VOILUTSequence=[table(0, 0x0100, 0x0200)]), syntax)
    assert shown(voi, tmp_path).tolist() == [[0, 128, 255, 255]]
    real = packed(drawn(values, ModalityLUTSequence=[table(0, 450, 900)]), syntax)
    assert shown(real, tmp_path, DicomView(window=Window(level=900, width=1800))).tolist() == [[0, 64, 128, 128]]
    colour = packed(with_palette(np.array([[0, 1]], np.uint8), np.array([0x1234, 0xFFFF], order), [2, 0, 16]), syntax)
    assert shown(colour, tmp_path)[..., 0].tolist() == [[18, 255]]


def test_a_table_for_what_is_shown_counts_in_real_values(tmp_path):
    """They may be below zero where stored ones have no sign; some devices then write -2 as if it had none."""
    item = pydicom.Dataset()
    item.add_new("LUTDescriptor", "US", [4, 2**16 - 2, 16])
    item.add_new("LUTData", "OW", np.array([0, 100, 200, 255], "<u2").tobytes())
    values = np.array([[0, 9, 10, 11, 99]], np.uint16)
    below = drawn(values, VOILUTSequence=[item], RescaleSlope=1, RescaleIntercept=-11)
    assert shown(below, tmp_path).tolist() == [[0, 0, 100, 200, 255]]
    above = drawn(values, VOILUTSequence=[item])
    assert shown(above, tmp_path).tolist() == [[0] * 5]


def test_a_table_with_too_few_entries_is_refused(tmp_path):
    header = with_palette(np.array([[0, 1]], np.uint8), np.arange(2, dtype=np.uint8), [256, 0, 8])
    with pytest.raises(DataError, match=r"pixels cannot be read \(ValueError\)"):
        shown(header, tmp_path)
