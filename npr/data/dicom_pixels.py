"""From one DICOM file to pixels that a network can read (docs/data.md, "DICOM").

The order is that of DICOM PS3.3 and PS3.4: decode one frame, stored values to real ones (modality LUT or rescale), a
window (VOI), black and white exchanged for MONOCHROME1, padding black. Everything follows from one file and from
public settings: no statistic of other files is used, so one patient changes no pixel of another.
"""

from __future__ import annotations

import logging
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pydicom
from numpy.typing import NDArray
from PIL import Image
from pydicom.pixels import apply_color_lut
from pydicom.uid import JPEGExtended12Bit

from lazaret.errors import ConfigError, DataError
from npr.data.dicom_decoding import LookUpTable, check_inflated, decodable, decoded
from npr.data.manifest import Decoding
from npr.data.store import squash

# These say what is odd about a file, with the odd value: it may be a name.
_LIBRARIES: Final = ("pydicom", "pylibjpeg", "openjpeg", "jpeg_ls", "highdicom")
_THEIRS: Final = rf"({'|'.join(_LIBRARIES)})(\.|$)"
_FILTER: Final = ("ignore", None, Warning, re.compile(_THEIRS), 0)


def silence_libraries() -> None:
    """No warning and no log line of these libraries gets out. Said again for each file: others reset warnings."""
    for name in _LIBRARIES:
        logger = logging.getLogger(name)
        logger.setLevel(logging.CRITICAL + 1)
        logger.propagate = False
    # Only if it is not the first: to put it there again it is taken out for a moment, and other threads read files too.
    if list(warnings.filters[:1]) != [_FILTER]:
        warnings.filterwarnings("ignore", module=_THEIRS)


MODALITIES: Final = ("CT", "MR", "DX", "CR", "MG", "US", "XC", "OP", "SC", "OT")
# OT is what many devices write into secondary captures.
MOST_PIXELS: Final = 100_000_000
GREY: Final = ("MONOCHROME1", "MONOCHROME2")
COLOUR: Final = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT", "PALETTE COLOR")
# Without a window of its own, a grey image is spread between these percentiles of its own values.
_PERCENTILES: Final = (0.5, 99.5)

Floats = NDArray[np.float64]
Frame = int | Literal["first", "middle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The values that are spread over black to white. The default is the usual brain window in Hounsfield units."""

    level: float = 40.0
    width: float = 80.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.level) and 0.0 < self.width < math.inf):
            raise ConfigError(f"window {self.level}/{self.width} shows nothing", hint="a width above 0, e.g. 40/80")

    def apply(self, values: NDArray[np.floating[Any]]) -> NDArray[np.uint8]:
        low = self.level - self.width / 2
        return np.asarray(np.rint(np.clip((values - low) / self.width, 0, 1) * 255), dtype=np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class DicomView:
    """What is shown of a file.

    :ivar window: for grey images; without it CT has the brain window, others the window of their header.
    :ivar frame: which frame of a file with several; counted from 1.
    :ivar channels: 1 makes colour grey, 3 repeats grey three times.
    """

    window: Window | None = None
    frame: Frame = "middle"
    channels: int = 1

    def decoding(self, image_size: int) -> Decoding:
        """Window first, then resize: bone beside the brain is clipped before it can bleed into it."""
        window = f"{self.window.level} {self.window.width}" if self.window else "by modality"
        return Decoding(
            read=lambda path, where: self.read(path, where, image_size),
            channels=self.channels,
            image_size=image_size,
            settings=f"dicom window {window} frame {self.frame} squash",
            dicom=True,
        )

    def read(self, path: Path, where: str, image_size: int, frame: int | None = None) -> NDArray[np.uint8]:
        """One frame as bytes of shape (size, size, channels).

        :param frame: overrides the frame of this view.
        """
        shown = render(read_header(path, where), self, where, frame)
        picture = Image.fromarray(shown)
        mode = "L" if self.channels == 1 else "RGB"
        return squash(picture if picture.mode == mode else picture.convert(mode), image_size)


@contextmanager
def as_data_error(what: str, where: str, hint: str) -> Iterator[None]:
    """pydicom and its decoders raise many types for damaged files, some only when a value is looked at; and they
    print what is odd, which nobody is to see."""
    silence_libraries()
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError("image file is missing", where=where) from None
    except Exception as error:
        raise DataError(f"{what} ({type(error).__name__})", where=where, hint=hint) from None


def read_header(path: Path, where: str, *, pixels: bool = True, only: list[str] | None = None) -> pydicom.Dataset:
    """The data set of a file; without pixels it is quick.

    :param only: keywords to read, all by default.
    """
    with as_data_error("not a DICOM file", where, "export the file again"):
        check_inflated(path, where)
        return pydicom.dcmread(path, stop_before_pixels=not pixels, specific_tags=only)


def frame_count(header: pydicom.Dataset, where: str) -> int:
    with as_data_error("header cannot be read", where, "export the file again"):
        frames = int(header.get("NumberOfFrames", 1) or 1)
    if frames < 1:
        raise DataError(f"the header says {frames} frames", where=where, hint="export the file again")
    return frames


def render(header: pydicom.Dataset, view: DicomView, where: str, frame: int | None = None) -> NDArray[np.uint8]:
    """A frame as bytes: (rows, columns) where it is grey, (rows, columns, 3) where it has colour."""
    _check(header, where)
    number = frame_index(view.frame if frame is None else frame, frame_count(header, where), where)
    hint = "export uncompressed, e.g. gdcmconv --raw"
    if header.PhotometricInterpretation in GREY:
        return _grey(header, view.window, number, where, hint)
    with as_data_error("pixels cannot be read", where, hint):
        return _colour(header, number)


def _check(header: pydicom.Dataset, where: str) -> None:
    """What can be said before a pixel is decoded."""
    with as_data_error("header cannot be read", where, "export the file again"):
        modality = str(header.get("Modality") or "none")
        if modality not in MODALITIES:
            shown = modality if modality.isalnum() and len(modality) <= 16 else "unknown"
            raise DataError(f"modality {shown} is not read", where=where, hint=f"one of {', '.join(MODALITIES)}")
        if "PixelData" not in header:
            raise DataError("the file has no pixels of whole numbers", where=where, hint="export images, not reports")
        syntax = header.file_meta.TransferSyntaxUID
        if syntax.is_private or not decodable(syntax):
            raise DataError(
                f"the compression is not read ({syntax.name if not syntax.is_private else 'private'})",
                where=where,
                hint="export uncompressed, e.g. gdcmconv --raw",
            )
        samples, bits = int(header.get("SamplesPerPixel", 1)), int(header.BitsStored)
        photometric = str(header.get("PhotometricInterpretation", ""))
        if photometric not in (GREY + COLOUR) or samples != (1 if photometric in (*GREY, "PALETTE COLOR") else 3):
            raise DataError("the photometric interpretation is not read", where=where, hint=", ".join(GREY + COLOUR))
        if syntax == JPEGExtended12Bit and bits > 8:
            raise DataError("lossy JPEG of 12 bits is not read", where=where, hint="export uncompressed")
        if not 8 <= bits <= 16:
            raise DataError(f"{bits} bits for a pixel are not read", where=where, hint="export 8 to 16 bits")
        if int(header.get("HighBit", bits - 1)) != bits - 1:
            raise DataError("pixels are not in the lowest bits", where=where, hint="export the file again")
        if not 0 < int(header.Rows) * int(header.Columns) <= MOST_PIXELS:
            raise DataError(f"more than {MOST_PIXELS} pixels, or none", where=where, hint="export a smaller image")


def frame_index(wanted: Frame, frames: int, where: str) -> int:
    """The index of the frame to show."""
    if wanted == "first":
        return 0
    if wanted == "middle":
        return (frames - 1) // 2
    if not 1 <= wanted <= frames:
        raise DataError(f"there is no frame {wanted}: the file has {frames}", where=where, hint="frame=middle, or less")
    return wanted - 1


def _group(header: pydicom.Dataset, frame: int, name: str) -> pydicom.Dataset | None:
    """A functional group of an enhanced file: that of the frame, else the shared one (PS3.3 C.7.6.16)."""
    per_frame = header.get("PerFrameFunctionalGroupsSequence")
    shared = header.get("SharedFunctionalGroupsSequence")
    for item in ([per_frame[frame]] if per_frame else []) + ([shared[0]] if shared else []):
        if item.get(name):
            return item[name].value[0]
    return None


def _rescale(header: pydicom.Dataset, frame: int, where: str) -> tuple[float, float]:
    """Slope and intercept of a frame. Only CT must have them: its window is in Hounsfield units."""
    place = _group(header, frame, "PixelValueTransformationSequence") or header
    slope, intercept = (place.get(name) for name in ("RescaleSlope", "RescaleIntercept"))
    if slope is None and intercept is None and header.Modality != "CT":
        return 1.0, 0.0
    if slope is None or intercept is None:
        kind = "a CT slice" if header.Modality == "CT" else "an image"
        raise DataError(f"not {kind} with rescale slope and intercept", where=where, hint="export original images")
    if not (math.isfinite(slope) and math.isfinite(intercept) and slope):
        raise DataError("rescale slope or intercept is no number", where=where, hint="export the file again")
    return float(slope), float(intercept)


def _signed(header: pydicom.Dataset) -> bool:
    return bool(header.PixelRepresentation == 1)


def _may_be_negative(header: pydicom.Dataset, frame: int, where: str) -> bool:
    """Whether real values may be; those of a table are not."""
    if header.get("ModalityLUTSequence"):
        return False
    slope, intercept = _rescale(header, frame, where)
    values: int = 2**header.BitsStored
    lowest = -values // 2 if _signed(header) else 0
    return min(lowest * slope, (lowest + values - 1) * slope) + intercept < 0


def _real(stored: NDArray[Any], header: pydicom.Dataset, frame: int, where: str) -> Floats:
    """Stored values to real ones: by a table where there is one, else by slope and intercept."""
    if header.Modality != "CT" and header.get("ModalityLUTSequence"):
        table = LookUpTable.read(header, header.ModalityLUTSequence[0], signed=_signed(header))
        return table.of(stored).astype(np.float64)
    slope, intercept = _rescale(header, frame, where)
    return stored.astype(np.float64) * slope + intercept


def _padding(stored: NDArray[Any], header: pydicom.Dataset) -> NDArray[np.bool_]:
    """Where there is no image: one stored value, or a range of them (PS3.3 C.7.5.1.1.2)."""
    if header.get("PixelPaddingValue") is None:
        return np.zeros(stored.shape, dtype=np.bool_)
    first, last = header.PixelPaddingValue, header.get("PixelPaddingRangeLimit")
    # Devices write 63536 where they mean -2000: the number has the sign that pixels have.
    first, last = (int(np.int64(value).astype(stored.dtype)) for value in (first, first if last is None else last))
    found: NDArray[np.bool_] = (stored >= min(first, last)) & (stored <= max(first, last))
    return found


def _grey(header: pydicom.Dataset, window: Window | None, frame: int, where: str, hint: str) -> NDArray[np.uint8]:
    with as_data_error("pixels cannot be read", where, hint):
        stored = decoded(header, frame)
        padding = _padding(stored, header)
        values = _real(stored, header, frame, where)
        if window is None and header.Modality == "CT":
            window = Window()
        shown = window.apply(values) if window else _by_header(values, header, frame, padding, where)
        if header.PhotometricInterpretation == "MONOCHROME1":
            shown = 255 - shown
        shown[padding] = 0
        return shown


def _by_header(
    values: Floats, header: pydicom.Dataset, frame: int, padding: NDArray[np.bool_], where: str
) -> NDArray[np.uint8]:
    """The first window or VOI table of the header; without one, the image's own values between two percentiles."""
    place = _group(header, frame, "FrameVOILUTSequence") or header
    if place.get("VOILUTSequence"):
        signed = _may_be_negative(header, frame, where)
        table = LookUpTable.read(header, place.VOILUTSequence[0], signed=signed)
        return _spread(table.of(values).astype(np.float64), float(table.entries.min()), float(table.entries.max()))
    centre, width = _first(place.get("WindowCenter")), _first(place.get("WindowWidth"))
    function = str(place.get("VOILUTFunction") or "LINEAR")
    narrow = function in ("SIGMOID", "LINEAR_EXACT")  # others show nothing below a width of 1
    if centre is not None and width is not None and math.isfinite(centre) and (width >= 1 or (narrow and width > 0)):
        return _windowed(values, centre, width, function)
    inside = values[~padding]
    low, high = np.percentile(inside, _PERCENTILES) if inside.size else (0.0, 0.0)
    return _spread(values, float(low), float(high))


def _first(value: Any) -> float | None:
    if value is None or value == "":
        return None
    return float(value[0] if isinstance(value, pydicom.multival.MultiValue) else value)


def _windowed(values: Floats, centre: float, width: float, function: str) -> NDArray[np.uint8]:
    """PS3.3 C.11.2.1.2 and C.11.2.1.3."""
    if function == "SIGMOID":
        return _spread(1 / (1 + np.exp(np.clip(-4 * (values - centre) / width, -60, 60))), 0.0, 1.0)
    if function == "LINEAR_EXACT":
        return _spread(values, centre - width / 2, centre + width / 2)
    return _spread(values, centre - 0.5 - (width - 1) / 2, centre - 0.5 + (width - 1) / 2)


def _spread(values: Floats, low: float, high: float) -> NDArray[np.uint8]:
    if high <= low:
        return np.where(values > low, np.uint8(255), np.uint8(0))
    return np.asarray(np.rint(np.clip((values - low) / (high - low), 0, 1) * 255), dtype=np.uint8)


def _colour(header: pydicom.Dataset, frame: int) -> NDArray[np.uint8]:
    """RGB of eight bits; pydicom turns YBR into RGB, and a palette is looked up."""
    values = decoded(header, frame)
    most = 2 ** int(header.BitsStored) - 1
    if header.PhotometricInterpretation == "PALETTE COLOR":
        values, most = _by_palette(values, header)
    return np.asarray(np.rint(values.astype(np.float64) * (255 / most)), dtype=np.uint8)


def _by_palette(values: NDArray[Any], header: pydicom.Dataset) -> tuple[NDArray[Any], int]:
    """Colours, and the number that is the brightest."""
    if "RedPaletteColorLookupTableData" not in header:  # a table in segments
        coloured = apply_color_lut(values, header)[..., :3]
        return coloured, int(np.iinfo(coloured.dtype).max)
    tables = [LookUpTable.read(header, header, name, signed=_signed(header)) for name in ("Red", "Green", "Blue")]
    # By the entries: some devices announce sixteen bits and write eight.
    most = 255 if max(table.entries.max() for table in tables) <= 255 else 2**16 - 1
    return np.stack([table.of(values) for table in tables], axis=-1), most
