"""Every modality, form and compression that is read, on images drawn here; and the table of them in the documents."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pydicom
import pytest
from pydicom.dataset import FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.pixels import set_pixel_data
from pydicom.uid import (
    JPEG2000,
    MPEG2MPML,
    UID,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    HTJ2KLossless,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGExtended12Bit,
    JPEGLossless,
    JPEGLosslessSV1,
    JPEGLSLossless,
    JPEGLSNearLossless,
    RLELossless,
    generate_uid,
)

from lazaret.errors import ConfigError, DataError
from npr.data.dicom_pixels import MODALITIES, DicomView, Window, read_header, render
from npr.data.sources import open_catalogue

PAGE = Path(__file__).parents[4] / "docs/data.md"
ROWS, COLUMNS = 32, 40
GREY = (np.arange(ROWS)[:, None] * 50 + np.arange(COLUMNS)[None] * 6).astype(np.uint16)
COLOUR = np.stack([GREY % 251, (GREY // 7) % 241, 255 - GREY % 253], axis=-1).astype(np.uint8)
# The picture GREY in HTJ2K, reversible, by another encoder (OpenJPH).
HTJ2K = bytes.fromhex(
    "ff4fff5100294000000000280000002000000000000000000000002800000020000000000000000000010f0101ff50000800020000000aff"
    "52000c00020001000504044001ff5c00132088909090909090909090909090888888ff64001700014f70656e4a50482056657220302e3236"
    "2e332eff90000a0000000000c50001ff93c0002a0071fce5fa01423400c00011c00013802773002217f900a23400c0001240001540f52273"
    "00904386fc001080775600c0001510000568b6b5f6d7e00b7500c68d8d8d8de00c463181ecb800c00015900005aaaaaaaaaaefe0a7a7a7c2"
    "7800e06030180c0683c1e0fe843d88407bf62101ecbc00c0002d380005d300922449922449fc7f80a7a7a7a7a7a7a7427d00625114455114"
    "455114455114455114ff7a201081efd84207bf61081efd84207bf61081ecb701ffd9"
)
PLAIN = (ExplicitVRLittleEndian, ImplicitVRLittleEndian, ExplicitVRBigEndian, DeflatedExplicitVRLittleEndian)
LOSSLESS = (RLELossless, JPEGLossless, JPEGLosslessSV1, JPEGLSLossless, JPEG2000Lossless)
LOSSY = {JPEGBaseline8Bit: 12, JPEGExtended12Bit: 12, JPEGLSNearLossless: 3, JPEG2000: 4}  # largest error that is lossy


def drawn(array, *, modality="MR", photometric="MONOCHROME2", bits=16, frames=1, **more) -> pydicom.Dataset:
    """A file with these stored values; colour by pixel where the last axis has three."""
    header = pydicom.Dataset()
    header.file_meta = FileMetaDataset()
    header.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    header.file_meta.MediaStorageSOPClassUID = UID("1.2.840.10008.5.1.4.1.1.7")
    header.SOPClassUID, header.SOPInstanceUID = header.file_meta.MediaStorageSOPClassUID, generate_uid()
    header.file_meta.MediaStorageSOPInstanceUID = header.SOPInstanceUID
    header.StudyInstanceUID, header.SeriesInstanceUID, header.PatientID = generate_uid(), generate_uid(), "somebody"
    header.Modality = modality
    if modality == "CT":
        header.RescaleSlope, header.RescaleIntercept = 1, 0
    stored = np.stack([array] * frames) if frames > 1 else array
    if frames > 1:
        header.NumberOfFrames = frames
    set_pixel_data(header, stored, "MONOCHROME2" if photometric == "PALETTE COLOR" else photometric, bits)
    header.PhotometricInterpretation = photometric
    for name, value in more.items():
        setattr(header, name, value)
    return header


def packed(header: pydicom.Dataset, syntax: UID) -> pydicom.Dataset:
    """The same image in another transfer syntax."""
    if syntax in (RLELossless, JPEGLSLossless, JPEG2000Lossless):
        header.compress(syntax, generate_instance_uid=False)
    elif syntax == JPEGLSNearLossless:
        header.compress(syntax, jls_error=2, generate_instance_uid=False)
    elif syntax == JPEG2000:
        header.compress(syntax, j2k_psnr=[90], generate_instance_uid=False)
    elif syntax not in PLAIN:
        return by_gdcm(header, syntax)
    else:
        if syntax == ExplicitVRBigEndian and header.BitsAllocated == 16:
            header.PixelData = np.frombuffer(header.PixelData, "<u2").astype(">u2").tobytes()
        header.file_meta.TransferSyntaxUID = syntax
    return header


def by_gdcm(header: pydicom.Dataset, syntax: UID) -> pydicom.Dataset:
    import tempfile

    import gdcm

    kinds = {
        JPEGLossless: gdcm.TransferSyntax.JPEGLosslessProcess14,
        JPEGLosslessSV1: gdcm.TransferSyntax.JPEGLosslessProcess14_1,
        JPEGBaseline8Bit: gdcm.TransferSyntax.JPEGBaselineProcess1,
        JPEGExtended12Bit: gdcm.TransferSyntax.JPEGExtendedProcess2_4,
    }
    with tempfile.TemporaryDirectory() as folder:
        source, target = f"{folder}/a.dcm", f"{folder}/b.dcm"
        header.save_as(source, enforce_file_format=True)
        reader = gdcm.ImageReader()
        reader.SetFileName(source)
        assert reader.Read()
        change = gdcm.ImageChangeTransferSyntax()
        change.SetTransferSyntax(gdcm.TransferSyntax(kinds[syntax]))
        change.SetInput(reader.GetImage())
        assert change.Change()
        writer = gdcm.ImageWriter()
        writer.SetFile(reader.GetFile())
        writer.SetImage(change.GetOutput())
        writer.SetFileName(target)
        assert writer.Write()
        return pydicom.dcmread(target)


def saved(header: pydicom.Dataset, path: Path) -> Path:
    header.save_as(path, enforce_file_format=True)
    return path


def shown(header, tmp_path, view=None) -> np.ndarray:
    return render(read_header(saved(header, tmp_path / "a.dcm"), "a"), view or DicomView(), "a")


def spread(values, low, high) -> np.ndarray:
    return np.rint(np.clip((np.asarray(values, float) - low) / (high - low), 0, 1) * 255).astype(np.uint8)


WIDE = Window(level=900, width=1800)


@pytest.mark.parametrize("syntax", [*PLAIN, *LOSSLESS, *LOSSY], ids=lambda uid: uid.keyword)
@pytest.mark.parametrize("frames", [1, 3])
def test_every_compression_of_grey(syntax, frames, tmp_path):
    bits = 8 if syntax in (JPEGBaseline8Bit, JPEGExtended12Bit) else 16
    picture = (GREY // 8).astype(np.uint8) if bits == 8 else GREY
    top = 255 if bits == 8 else 1800
    header = packed(drawn(picture, bits=bits, frames=frames), syntax)
    assert header.file_meta.TransferSyntaxUID == syntax
    found = shown(header, tmp_path, DicomView(window=Window(level=top / 2, width=top)))
    expected = spread(picture, 0, top)
    assert np.abs(found.astype(int) - expected).max() <= LOSSY.get(syntax, 0)


def test_lossy_jpeg_of_twelve_bits_is_refused(tmp_path):
    with pytest.raises(DataError, match="lossy JPEG of 12 bits"):
        shown(packed(drawn(GREY, bits=12), JPEGExtended12Bit), tmp_path)


def test_high_throughput_jpeg_2000(tmp_path):
    header = drawn(GREY)
    header.PixelData = encapsulate([HTJ2K])
    header["PixelData"].is_undefined_length = True
    header.file_meta.TransferSyntaxUID = HTJ2KLossless
    assert np.array_equal(shown(header, tmp_path, DicomView(window=WIDE)), spread(GREY, 0, 1800))


@pytest.mark.parametrize("syntax", [*PLAIN, RLELossless, JPEGLosslessSV1, JPEGLSLossless, JPEG2000Lossless], ids=str)
@pytest.mark.parametrize("frames", [1, 2])
def test_every_compression_of_colour(syntax, frames, tmp_path):
    header = packed(drawn(COLOUR, modality="XC", photometric="RGB", bits=8, frames=frames), syntax)
    assert np.array_equal(shown(header, tmp_path), COLOUR)


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


def test_a_film_is_refused_by_its_name(tmp_path):
    header = drawn(GREY)
    header.PixelData = encapsulate([b"\0" * 64])
    header["PixelData"].is_undefined_length = True
    header.file_meta.TransferSyntaxUID = MPEG2MPML
    with pytest.raises(DataError, match=r"compression is not read .*MPEG2"):
        shown(header, tmp_path)


def test_five_hundred_damaged_files_give_one_line_each(tmp_path):
    """Cut off, bytes changed, fields doubled: an image or one error, whatever the damage is."""
    originals = [
        saved(packed(drawn(GREY), syntax), tmp_path / f"{syntax.keyword}.dcm").read_bytes()
        for syntax in (ExplicitVRLittleEndian, RLELossless, JPEGLSLossless, JPEG2000Lossless, JPEGLosslessSV1)
    ]
    draw = np.random.default_rng(5)
    read, refused, lines = 0, 0, list[str]()
    for number in range(500):
        data = bytearray(originals[number % len(originals)])
        if number % 3 == 0:
            data = data[: draw.integers(1, len(data))]
        for _ in range(int(draw.integers(0 if number % 3 == 0 else 1, 30))):
            data[draw.integers(0, len(data))] = draw.integers(0, 256)
        file = tmp_path / "damaged.dcm"
        file.write_bytes(bytes(data))
        try:
            assert DicomView().read(file, "row 7", 8).shape == (8, 8, 1)
            read += 1
        except DataError as error:
            refused += 1
            lines.append(str(error))
    assert all("row 7" in line and "\n" not in line for line in lines)
    assert read + refused == 500 and refused > 100


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


def table() -> str:
    """What the tests above read, as the page shows it."""
    rows = ["| compression | grey | colour | error |", "|---|---|---|---|"]
    colour = {*PLAIN, RLELossless, JPEGLosslessSV1, JPEGLSLossless, JPEG2000Lossless}
    for syntax in (*PLAIN, *LOSSLESS, HTJ2KLossless, *LOSSY):
        frames = "1 frame" if syntax == HTJ2KLossless else "1 and 3 frames"
        frames += ", 8 bits (12 bits are refused)" if syntax == JPEGExtended12Bit else ""
        exact = f"at most {LOSSY[syntax]} of 255" if syntax in LOSSY else "none"
        colours = "1 and 2 frames" if syntax in colour else "not tested"
        rows.append(f"| {syntax.name} | {frames} | {colours} | {exact} |")
    return "\n".join(rows)


def test_the_page_has_the_table_of_these_tests():
    found = re.search(r"<!-- made by test_dicom_pixels -->\n(.*?)\n\n", PAGE.read_text(), re.DOTALL)
    assert found and found[1] == table()
