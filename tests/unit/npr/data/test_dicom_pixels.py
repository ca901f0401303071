"""From a file to pixels: windows, tables, padding, frames, odd and damaged files, on images drawn here."""

from __future__ import annotations

import contextlib
import logging
import warnings
from pathlib import Path

import numpy as np
import pydicom
import pytest
from pydicom.uid import (
    ExplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGExtended12Bit,
    JPEGLosslessSV1,
    JPEGLSLossless,
    RLELossless,
    generate_uid,
)

from lazaret.errors import ConfigError, DataError
from npr.data.columns import LISTING
from npr.data.dicom_pixels import _FILTER, MODALITIES, DicomView, Window, as_data_error, read_header, render
from npr.data.sources import inspect_images, open_catalogue, survey
from tests.support.dicom_images import GREY, drawn, packed, saved

ROWS, COLUMNS = GREY.shape
COLOUR = np.stack([GREY % 251, (GREY // 7) % 241, 255 - GREY % 253], axis=-1).astype(np.uint8)


def shown(header, tmp_path, view=None) -> np.ndarray:
    return render(read_header(saved(header, tmp_path / "a.dcm"), "a"), view or DicomView(), "a")


def spread(values, low, high) -> np.ndarray:
    return np.rint(np.clip((np.asarray(values, float) - low) / (high - low), 0, 1) * 255).astype(np.uint8)


WIDE = Window(level=900, width=1800)


def test_lossy_jpeg_of_twelve_bits_is_refused(tmp_path):
    with pytest.raises(DataError, match="lossy JPEG of 12 bits"):
        shown(packed(drawn(GREY, bits=12), JPEGExtended12Bit), tmp_path)


def test_luminance_and_chrominance_become_red_green_and_blue(tmp_path):
    """PS3.3 C.7.6.3.1.2, by hand: grey has both chrominances at 128."""
    grey = np.full((4, 4, 3), 128, np.uint8)
    grey[..., 0] = [10, 90, 170, 250]
    assert np.array_equal(
        shown(drawn(grey, modality="US", photometric="YBR_FULL", bits=8), tmp_path), np.repeat(grey[..., :1], 3, 2)
    )
    red = np.full((4, 4, 3), (76, 85, 255), np.uint8)
    found = shown(drawn(red, modality="US", photometric="YBR_FULL", bits=8), tmp_path)
    assert np.abs(found.astype(int) - (254, 0, 0)).max() <= 1


def test_a_palette_is_looked_up(tmp_path):
    header = drawn(np.array([[0, 1], [2, 3]], np.uint8), modality="US", photometric="PALETTE COLOR", bits=8)
    for name, row in (("Red", [0, 10, 20, 30]), ("Green", [5, 6, 7, 8]), ("Blue", [255, 200, 100, 0])):
        setattr(header, f"{name}PaletteColorLookupTableDescriptor", [4, 0, 16])
        setattr(header, f"{name}PaletteColorLookupTableData", (257 * np.array(row, "<u2")).astype("<u2").tobytes())
    expected = [[(0, 5, 255), (10, 6, 200)], [(20, 7, 100), (30, 8, 0)]]
    assert shown(header, tmp_path).tolist() == [[list(map(int, pixel)) for pixel in row] for row in expected]


@pytest.mark.parametrize("modality", MODALITIES)
@pytest.mark.parametrize("photometric", ["MONOCHROME1", "MONOCHROME2"])
def test_every_modality_of_grey(modality, photometric, tmp_path):
    header = drawn(GREY, modality=modality, photometric=photometric, WindowCenter=900.5, WindowWidth=1801)
    low, high = (0, 80) if modality == "CT" else (0, 1800)  # the brain window, else that of the header
    expected = spread(GREY, low, high)
    assert np.array_equal(shown(header, tmp_path), 255 - expected if photometric == "MONOCHROME1" else expected)


@pytest.mark.parametrize(("bits", "signed"), [(8, False), (8, True), (10, False), (12, True), (16, True), (16, False)])
def test_eight_to_sixteen_bits_signed_and_unsigned(bits, signed, tmp_path):
    width = 8 if bits == 8 else 16
    low = -(2 ** (bits - 1)) if signed else 0
    values = np.linspace(low, low + 2**bits - 1, 64).reshape(8, 8).astype(f"{'i' if signed else 'u'}{width // 8}")
    view = DicomView(window=Window(level=low + 2 ** (bits - 1), width=2**bits))
    found = shown(drawn(values, bits=bits), tmp_path, view)
    assert np.array_equal(found, spread(values, low, low + 2**bits))


def test_window_functions_and_tables(tmp_path):
    values = np.array([[0, 250, 500, 750, 1000]], np.uint16)
    exact = drawn(values, WindowCenter=500, WindowWidth=1000, VOILUTFunction="LINEAR_EXACT")
    assert shown(exact, tmp_path).tolist() == [[0, 64, 128, 191, 255]]
    sigmoid = drawn(values, WindowCenter=500, WindowWidth=1000, VOILUTFunction="SIGMOID")
    assert shown(sigmoid, tmp_path).tolist() == [np.rint(255 / (1 + np.exp([2, 1, 0, -1, -2]))).astype(int).tolist()]
    first = drawn(values, WindowCenter=[500, 1], WindowWidth=[1001, 2])
    assert shown(first, tmp_path).tolist() == [spread(values[0] + 0.5, 0, 1000).tolist()]
    table = pydicom.Dataset()
    table.LUTDescriptor, table.LUTData = [4, 0, 16], np.array([0, 65535, 13107, 26214], "<u2").tobytes()
    listed = drawn(np.array([[0, 1, 2, 3, 9]], np.uint16), VOILUTSequence=[table])
    assert shown(listed, tmp_path).tolist() == [[0, 255, 51, 102, 102]]


@pytest.mark.parametrize("width", [0.5, 0.02])
def test_a_window_may_be_narrower_than_one_where_its_function_allows_it(width, tmp_path):
    """Real values of an MR or US file may lie between 0 and 1 (PS3.3 C.11.2.1.3); LINEAR begins at 1."""
    stored = np.array([[0, 250, 500, 750, 1000]], np.uint16)
    real = {"RescaleSlope": 0.001, "RescaleIntercept": 0, "WindowCenter": 0.5, "WindowWidth": width}
    exact = drawn(stored, VOILUTFunction="LINEAR_EXACT", **real)
    assert np.array_equal(shown(exact, tmp_path), spread(stored / 1000, 0.5 - width / 2, 0.5 + width / 2))
    sigmoid = drawn(stored, VOILUTFunction="SIGMOID", **real)
    expected = np.rint(255 / (1 + np.exp(np.clip(-4 * (stored / 1000 - 0.5) / width, -60, 60))))
    assert np.array_equal(shown(sigmoid, tmp_path), expected)


def test_without_a_window_an_image_spreads_its_own_values(tmp_path):
    """Padding does not count, and stays black whatever its value is."""
    values = GREY.copy()
    values[0, :5] = 60000
    header = drawn(values, modality="DX", photometric="MONOCHROME1", PixelPaddingValue=60000)
    low, high = np.percentile(values[values != 60000].astype(float), (0.5, 99.5))
    expected = 255 - spread(values, low, high)
    expected[0, :5] = 0
    assert np.array_equal(shown(header, tmp_path), expected)


def test_padding_may_be_a_range(tmp_path):
    header = drawn(GREY, PixelPaddingValue=0, PixelPaddingRangeLimit=120)
    assert (shown(header, tmp_path, DicomView(window=WIDE))[GREY <= 120] == 0).all()


def enhanced(values: list[int], *, per_frame: bool) -> pydicom.Dataset:
    """A multi-frame file with rescale and window in functional groups."""

    def group(number: int) -> pydicom.Dataset:
        item, real, window = pydicom.Dataset(), pydicom.Dataset(), pydicom.Dataset()
        real.RescaleSlope, real.RescaleIntercept, real.RescaleType = 1, -1000 * number, "US"
        window.WindowCenter, window.WindowWidth = 50.5, 101
        item.PixelValueTransformationSequence, item.FrameVOILUTSequence = [real], [window]
        return item

    header = drawn(np.stack([np.full((2, 2), value, np.uint16) for value in values]), frames=1)
    if per_frame:
        header.PerFrameFunctionalGroupsSequence = [group(number) for number in range(len(values))]
    else:
        header.SharedFunctionalGroupsSequence = [group(0)]
    return header


def test_each_frame_of_an_enhanced_file_has_its_own_rescale(tmp_path):
    header = enhanced([20, 1040, 2060], per_frame=True)
    found = [shown(header, tmp_path, DicomView(frame=frame))[0, 0] for frame in (1, 2, 3)]
    assert found == [51, 102, 153]
    assert shown(enhanced([20, 40, 60], per_frame=False), tmp_path, DicomView(frame=2))[0, 0] == 102


def test_padding_has_the_sign_of_the_pixels_and_may_be_empty(tmp_path):
    values = GREY.astype(np.int16)
    values[0, :5] = -2000
    header = drawn(values)
    header.add_new("PixelPaddingValue", "US", 63536)  # as devices write -2000
    expected = spread(values, *np.percentile(values[values != -2000].astype(float), (0.5, 99.5)))
    expected[0, :5] = 0
    assert np.array_equal(shown(header, tmp_path), expected)
    limited = drawn(values)
    limited.add_new("PixelPaddingValue", "SS", -2000)
    limited.add_new("PixelPaddingRangeLimit", "SS", 0)
    assert (shown(limited, tmp_path, DicomView(window=Window(level=0, width=8000)))[values <= 0] == 0).all()
    header.PixelPaddingValue = None
    assert np.array_equal(shown(header, tmp_path, DicomView(window=WIDE)), spread(values, 0, 1800))


def test_an_empty_sequence_of_tables_is_none(tmp_path):
    header = drawn(GREY, VOILUTSequence=[], WindowCenter=900.5, WindowWidth=1801)
    assert np.array_equal(shown(header, tmp_path), spread(GREY, 0, 1800))


def test_a_frame_of_ct_without_rescale_is_refused_also_if_another_has_it(tmp_path):
    header = enhanced([20, 1040], per_frame=True)
    header.Modality = "CT"
    del header.PerFrameFunctionalGroupsSequence[1].PixelValueTransformationSequence
    assert shown(header, tmp_path, DicomView(frame=1))[0, 0] == 64
    with pytest.raises(DataError, match="not a CT slice with rescale"):
        shown(header, tmp_path, DicomView(frame=2))


def test_which_frame(tmp_path):
    header = drawn(np.stack([np.full((2, 2), value, np.uint16) for value in (10, 20, 30, 40)]))
    view = {"first": 10, "middle": 20, 4: 40}
    for frame, value in view.items():
        assert shown(header, tmp_path, DicomView(frame=frame, window=Window(level=127.5, width=255)))[0, 0] == value
    with pytest.raises(DataError, match="no frame 5: the file has 4"):
        shown(header, tmp_path, DicomView(frame=5))


@pytest.mark.parametrize("channels", [1, 3])
def test_grey_and_colour_fit_either_number_of_channels(channels, tmp_path):
    for number, header in enumerate((drawn(GREY), drawn(COLOUR, modality="OP", photometric="RGB", bits=8))):
        path = saved(header, tmp_path / f"{number}.dcm")
        assert DicomView(channels=channels).read(path, "a", 8).shape == (8, 8, channels)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (drawn(GREY, modality="PT"), "modality PT is not read"),
        (drawn(GREY, Modality=""), "modality none is not read"),
        (drawn(GREY, modality="CT", RescaleSlope=None), "pixels cannot be read|not a CT slice"),
        (drawn(GREY, PhotometricInterpretation="HSV"), "photometric interpretation is not read"),
        (drawn(GREY, modality="CT", RescaleSlope=0), "slope or intercept is no number"),
        (drawn(GREY, RescaleSlope=2), "not an image with rescale"),
        (drawn(GREY, bits=12, HighBit=15), "not in the lowest bits"),
        (drawn(GREY, BitsStored=4), "4 bits"),
        (drawn(GREY, Rows=60000, Columns=60000), "more than 100000000 pixels"),
        (drawn(GREY, Rows=33), "pixels cannot be read"),
        (drawn(GREY, NumberOfFrames=0), None),
        (drawn(GREY, NumberOfFrames=-1), "-1 frames"),
    ],
)
def test_what_is_not_read_is_refused_in_one_line(header, message, tmp_path):
    if message is None:
        assert shown(header, tmp_path, DicomView(window=WIDE)).shape == (ROWS, COLUMNS)
        return
    with pytest.raises(DataError, match=message) as caught:
        shown(header, tmp_path)
    assert "\n" not in str(caught.value) and "somebody" not in str(caught.value)


def test_five_hundred_damaged_files_give_one_line_each_and_the_rest_is_processed(tmp_path):
    """Cut off, bytes changed, fields doubled: an image or one error, whatever the damage is."""
    originals = [
        saved(packed(header, syntax), tmp_path / f"{syntax.keyword}.dcm").read_bytes()
        for syntax in (ExplicitVRLittleEndian, RLELossless, JPEGLSLossless, JPEG2000Lossless, JPEGLosslessSV1)
        for header in (drawn(GREY), drawn(COLOUR, modality="US", photometric="RGB", bits=8))
    ]
    draw = np.random.default_rng(5)
    rows = ["image,label,patient"]
    for number in range(550):
        data = bytearray(originals[number % len(originals)])
        if number < 500 and number % 3 == 0:
            data = data[: draw.integers(1, len(data))]
        for _ in range(int(draw.integers(0 if number % 3 == 0 else 1, 30)) if number < 500 else 0):
            data[draw.integers(0, len(data))] = draw.integers(0, 256)
        (tmp_path / f"{number}.dcm").write_bytes(bytes(data) + number.to_bytes(2, "little") * (number >= 500))
        rows.append(f"{number}.dcm,a,P{number}")
    (tmp_path / "t.csv").write_text("\n".join(rows) + "\n")
    found = survey(f"dicom:{tmp_path / 't.csv'}", image_size=8)
    assert not found.faults and len(found.catalogue) == 550
    lines = [str(fault.error) for fault in inspect_images(found).unreadable]
    named = [int(line.removeprefix("t.csv row ").partition(":")[0]) - 2 for line in lines]
    assert len(set(named)) == len(lines) > 400 and max(named) < 500  # one line each, and none of the good ones
    assert not [line for line in lines if "\n" in line or ".dcm" in line or "somebody" in line]


NAME = "Mustermann^Erika"


def odd(path: Path) -> Path:
    """A file whose number of series is a name, and whose UID is one: pydicom repeats both."""
    header = drawn(GREY, SeriesNumber=7777, FrameOfReferenceUID="1.2.7777", WindowCenter=900, WindowWidth=1800)
    header.add_new("SpecificCharacterSet", "CS", "ISO 7777")
    data = saved(header, path).read_bytes()
    for short, long in ((b"7777", NAME[:4].encode()), (b"1.2.Must", NAME[:8].encode())):
        assert short in data
        data = data.replace(short, long)
    path.write_bytes(data)
    return path


def test_what_pydicom_says_about_a_file_is_heard_by_nobody(tmp_path, capfd, caplog):
    path = odd(tmp_path / "a.dcm")
    with warnings.catch_warnings(record=True) as told, caplog.at_level(logging.DEBUG):
        warnings.simplefilter("always")
        for logger in ("pydicom", "pydicom.pixels.decoders.base"):
            logging.getLogger(logger).setLevel(logging.DEBUG)
        assert DicomView().read(path, "row 7", 8).shape == (8, 8, 1)
        header = read_header(path, "row 7", pixels=False)
        with as_data_error("header cannot be read", "row 7", ""):
            _ = [str(header.get(name)) for name in ("SeriesNumber", "FrameOfReferenceUID", "PatientID")]
        assert warnings.filters[0] == _FILTER  # the test of it in `silence_libraries` is by equality
    out, err = capfd.readouterr()
    assert not told and NAME[:4] not in out + err + caplog.text


def test_without_the_silence_a_name_would_be_printed(tmp_path):
    """The twin of the test above."""
    path = odd(tmp_path / "a.dcm")
    with warnings.catch_warnings(record=True) as told:
        warnings.resetwarnings()
        warnings.simplefilter("always")
        header = pydicom.dcmread(path)
        for name in ("SeriesNumber", "FrameOfReferenceUID"):
            with contextlib.suppress(ValueError):
                _ = header[name].value
    assert any(NAME[:4] in str(one.message) for one in told)


def test_every_frame_can_be_an_image(tmp_path):
    frames = np.stack([np.full((4, 4), value, np.uint16) for value in (0, 60, 120)])
    saved(drawn(frames, modality="US"), tmp_path / "film.dcm")
    saved(drawn(GREY), tmp_path / "one.dcm")
    (tmp_path / "t.csv").write_text("image,label,patient\nfilm.dcm,a,p1\none.dcm,b,p2\n")
    found = open_catalogue(f"dicom:{tmp_path / 't.csv'}?frame=all&window=60/120", image_size=8)
    assert found.ids == ("film.dcm#1", "film.dcm#2", "film.dcm#3", "one.dcm#1")
    assert found.units == ("p1", "p1", "p1", "p2") and found.images[:3, 0, 0, 0].tolist() == [0, 128, 255]


@pytest.mark.parametrize("key", ["SOPInstanceUID", "SeriesInstanceUID", "StudyInstanceUID", "AccessionNumber"])
def test_rows_by_identifier(key, tmp_path, caplog):
    headers = [drawn(GREY, AccessionNumber=f"A{number}", PatientID=f"P{number}") for number in range(3)]
    (tmp_path / "deep").mkdir()
    for number, header in enumerate(headers):
        saved(header, tmp_path / "deep" / f"IM{number}")  # archives leave suffixes out
    lines = [f"{getattr(header, key)},{label}" for header, label in zip(headers[:2], "ab", strict=True)]
    (tmp_path / "t.csv").write_text(f"{key},label\n" + "\n".join(lines) + "\n")
    found = open_catalogue(f"dicom:{tmp_path / 't.csv'}", image_size=8)
    assert found.ids == ("deep/IM0", "deep/IM1") and found.labels.tolist() == [0, 1]
    assert found.unit_kind == "patient" and found.units == ("P0", "P1")
    assert "no row names 1 of the files" in caplog.text
    (tmp_path / "t.csv").write_text(f"{key},label\n1.2.3,a\n")
    with pytest.raises(DataError, match=r"row 2.*image file is missing"):
        open_catalogue(f"dicom:{tmp_path / 't.csv'}", image_size=8)


def test_files_may_lie_elsewhere_and_a_list_says_which_are_complete(tmp_path):
    table, folder = tmp_path / "site" / "t.csv", tmp_path / "archive"
    for path in (table.parent, folder / "1.2"):
        path.mkdir(parents=True)
    headers = [drawn(GREY, PatientID=f"P{number}", StudyInstanceUID="1.2") for number in range(3)]
    names = [saved(header, folder / "1.2" / f"{number}.dcm").name for number, header in enumerate(headers)]
    table.write_text("StudyInstanceUID,label\n1.2,a\n")
    source = f"dicom:{table}?files={folder}"
    assert open_catalogue(source, image_size=8).units == ("P0", "P1", "P2")
    (folder / LISTING).write_text(f"1.2/{names[0]}\n1.2/{names[2]}\n../site/t.csv\n")
    found = open_catalogue(source, image_size=8)
    assert found.ids == ("1.2/0.dcm", "1.2/2.dcm") and found.units == ("P0", "P2")
    (folder / LISTING).write_text("")  # while it is filled for the first time
    with pytest.raises(DataError, match=r"row 2.*image file is missing"):
        open_catalogue(source, image_size=8)
    with pytest.raises(DataError, match="no such folder"):
        open_catalogue(f"dicom:{table}?files={tmp_path / 'none'}", image_size=8)
    table.write_text("image,label\na.dcm,a\n")
    with pytest.raises(DataError, match="names no identifiers"):
        open_catalogue(source, image_size=8)
    with pytest.raises(ConfigError, match="files= belongs to a table"):
        open_catalogue(f"dicom:{folder}?files={folder}", image_size=8)


def test_a_series_labels_all_its_files(tmp_path):
    series = generate_uid()
    for number in range(3):
        saved(drawn(GREY, SeriesInstanceUID=series), tmp_path / f"{number}.dcm")
    (tmp_path / "t.csv").write_text(f"SeriesInstanceUID,label\n{series},a\n")
    assert len(open_catalogue(f"dicom:{tmp_path / 't.csv'}", image_size=8)) == 3


def test_the_federation_says_how_many_channels_unless_the_source_does(tmp_path):
    saved(drawn(GREY), tmp_path / "a.dcm")
    (tmp_path / "t.csv").write_text("image,label\na.dcm,a\n")
    source = f"dicom:{tmp_path / 't.csv'}"
    assert open_catalogue(source, image_size=8, channels=3).images.shape == (1, 8, 8, 3)
    assert open_catalogue(f"{source}?channels=1", image_size=8, channels=3).images.shape == (1, 8, 8, 1)


@pytest.mark.parametrize("option", ["frame=0", "frame=last", "channels=2"])
def test_options_that_mean_nothing_are_refused(option, tmp_path):
    with pytest.raises(ConfigError):
        open_catalogue(f"dicom:{tmp_path}?{option}", image_size=8)
