"""Stored values of one frame of a DICOM file, from whatever transfer syntax it has; and its look-up tables.

Each compression has one decoder, so that a damaged file is not tried by a second one. And a decoder is asked only for
what its stream holds (`coded_size`, `check_end`, `check_lossless`): where the header says something else, or the stream
is damaged, some give a scrambled image, never return, or end the whole process.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import pydicom
from numpy.typing import NDArray
from pydicom.encaps import get_frame
from pydicom.pixels import get_decoder, pixel_array
from pydicom.uid import (
    HTJ2K,
    JPEG2000,
    UID,
    DeflatedExplicitVRLittleEndian,
    HTJ2KLossless,
    HTJ2KLosslessRPCL,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGExtended12Bit,
    JPEGLossless,
    JPEGLosslessSV1,
    JPEGLSLossless,
    JPEGLSNearLossless,
)

from lazaret.errors import DataError

_GDCM, _CHARLS = "gdcm", "pyjpegls"
_JPEG_2000: Final = (JPEG2000, JPEG2000Lossless, HTJ2K, HTJ2KLossless, HTJ2KLosslessRPCL)
# All of these store colour by pixel, whatever the header says (PS3.5 section 8.2).
_PLUGINS: Final[dict[UID, str]] = {
    **dict.fromkeys(_JPEG_2000, "pylibjpeg"),
    **dict.fromkeys((JPEGLSLossless, JPEGLSNearLossless), _CHARLS),
    **dict.fromkeys((JPEGBaseline8Bit, JPEGExtended12Bit), "pillow"),
    **dict.fromkeys((JPEGLossless, JPEGLosslessSV1), _GDCM),
}


MOST_INFLATED: Final = 2**30
_PIECE: Final = 2**20
_HEAD: Final = 1024  # the syntax is named in its first bytes


def check_inflated(path: Path, where: str) -> None:
    """pydicom inflates a deflated file whole: one of some megabytes may hold more than the memory.

    :raises DataError: if it holds more than `MOST_INFLATED` bytes.
    :raises struct.error: or zlib.error, where it is no such file.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD)
        if DeflatedExplicitVRLittleEndian.encode() not in head:
            return
        # The group's length, which comes first, is that of the rest of the group (PS3.10 section 7.1).
        file.seek(144 + struct.unpack_from("<I", head, 140)[0])
        stream, length, piece = zlib.decompressobj(-zlib.MAX_WBITS), 0, b""
        while not stream.eof and (piece := stream.unconsumed_tail or file.read(_PIECE)):
            length += len(stream.decompress(piece, _PIECE))
            if length > MOST_INFLATED:
                reason = f"it inflates to more than {MOST_INFLATED} bytes"
                raise DataError(reason, where=where, hint="export uncompressed")


def decodable(syntax: UID) -> bool:
    try:
        return bool(get_decoder(syntax).is_available)
    except NotImplementedError:
        return False


def decoded(header: pydicom.Dataset, frame: int) -> NDArray[Any]:
    """:raises ValueError: where header and stream do not fit; decoders raise many other types."""
    plugin = _PLUGINS.get(header.file_meta.TransferSyntaxUID)
    if plugin is None:
        return np.asarray(pixel_array(header, index=frame))
    stream = get_frame(header.PixelData, frame, number_of_frames=int(header.get("NumberOfFrames", 1) or 1))
    if coded_size(stream) != (header.Rows, header.Columns):
        raise ValueError("rows and columns are not those of the stream")
    if plugin == _CHARLS:
        check_end(stream)
    elif plugin == _GDCM:
        check_lossless(stream, samples=header.SamplesPerPixel, bits_allocated=header.BitsAllocated)
    colour = {"planar_configuration": 0} if header.SamplesPerPixel > 1 else {}
    return np.asarray(pixel_array(header, index=frame, decoding_plugin=plugin, **colour))


# What a compressed image says of itself, before it is given to a decoder.
#
# Decoders are programs of others in C++. GDCM ends the whole process, or reads beyond its memory, where the head of a
# lossless JPEG is damaged; damaged pixels it survives. CharLS never returns where a JPEG-LS stream was cut off. So
# heads and ends are read here first, by ISO/IEC 10918-1 annexes B and H, and what is not so is not decoded.


_SIZE_OF_JPEG_2000: Final = b"\xff\x4f\xff\x51"  # start of codestream and its size (ISO/IEC 15444-1 annex A)
_LONGEST_BOXES: Final = 4096  # that may stand before it
_START_OF_SCAN, _TABLES, _LOSSLESS = 0xDA, 0xC4, 0xC3
_FRAMES: Final = (0xC0, 0xC1, 0xC2, _LOSSLESS, 0xF7)  # 0xF7: JPEG-LS (ISO/IEC 14495-1 annex C)
# Application data, comments, quantisation tables (of no use here), restart interval.
_HARMLESS: Final = (*range(0xE0, 0xF0), 0xFE, 0xDB, 0xDD)
# Of these two GDCM survives only what it knows: version 1, and three kinds of colours.
_ODD: Final = re.compile(rb"JFIF\0(?!\x01)|Adobe(?!.{6}[\0-\x02])", re.DOTALL)
# In pixels only stuffed bytes, restart markers and the end may follow 0xff.
_OTHER_MARKER: Final = re.compile(rb"\xff+[^\x00\xd0-\xd7\xd9\xff]")
_CATEGORIES: Final = 17  # of a difference between pixels


def coded_size(stream: bytes) -> tuple[int, int]:
    """Rows and columns that a stream of JPEG, JPEG-LS or JPEG 2000 says it has.

    :raises ValueError: where it says none.
    :raises struct.error: where it ends before.
    """
    start = stream.find(_SIZE_OF_JPEG_2000, 0, _LONGEST_BOXES)
    if start >= 0:
        right, lower, left, upper = struct.unpack_from(">4I", stream, start + 8)
        return lower - upper, right - left
    for marker, content in _segments(stream):
        if marker in _FRAMES:
            rows, columns = struct.unpack_from(">2H", content, 1)
            return rows, columns
    raise ValueError("the stream has no size")


def check_end(stream: bytes) -> None:
    """:raises ValueError: where it was cut off. A file pads it with zeros."""
    if not stream.rstrip(b"\0").endswith(b"\xff\xd9"):
        raise ValueError("the stream does not end")


def check_lossless(stream: bytes, *, samples: int, bits_allocated: int) -> None:
    """:raises ValueError: where the head is not that of a lossless image with so many samples a pixel.
    :raises struct.error: or IndexError, where it ends before.
    """
    tables, components, length = set[int](), list[int](), 2
    for marker, content in _segments(stream):
        length += 4 + len(content)
        if marker == _TABLES:
            tables |= _tables(content)
        elif marker == _LOSSLESS:
            if components or content[5] != samples or len(content) != 6 + 3 * samples:
                raise ValueError("the samples are not those of the header")
            if not 1 < content[0] <= bits_allocated or (content[0] > 8) != (bits_allocated > 8):
                raise ValueError("the bits are not those of the header")
            components = list(content[6::3])
            if samples > 1 and any(sampling != 0x11 for sampling in content[7::3]):
                raise ValueError("samples are left out")
        elif marker == _START_OF_SCAN:
            _check_scan(content, components, tables)
        elif marker not in _HARMLESS or _ODD.match(content):
            raise ValueError("a marker that lossless images do not have")
    if _OTHER_MARKER.search(stream, length):
        raise ValueError("a marker among pixels")


def _tables(content: bytes) -> set[int]:
    """The Huffman tables of a segment."""
    found, place = set[int](), 0
    while place < len(content):
        counts = content[place + 1 : place + 17]
        values = content[place + 17 : place + 17 + sum(counts)]
        # Not more codes than there is room for.
        room = sum(count << 15 - length for length, count in enumerate(counts))
        if content[place] > 3 or len(counts) < 16 or len(values) != sum(counts) or room > 1 << 16:
            raise ValueError("a table of codes is damaged")
        if not values or max(values) >= _CATEGORIES or len(set(values)) != len(values):
            raise ValueError("a table of codes has other values")
        found.add(content[place])
        place += 17 + len(values)
    return found


def _check_scan(content: bytes, components: list[int], tables: set[int]) -> None:
    count, (predictor, end, shift) = content[0], content[-3:]
    if count != len(components) or not components or len(content) != 4 + 2 * count:
        raise ValueError("not all samples are in one scan")
    if list(content[1:-3:2]) != components or not {chosen >> 4 for chosen in content[2:-3:2]} <= tables:
        raise ValueError("a scan of other samples or tables")
    if not 1 <= predictor <= 7 or end or shift > 15:
        raise ValueError("the prediction is unknown")


def _segments(stream: bytes) -> Iterator[tuple[int, bytes]]:
    """Markers and what belongs to each, up to the first scan and with it."""
    if stream[:2] != b"\xff\xd8":
        raise ValueError("the stream does not begin")
    place, marker = 2, 0
    while marker != _START_OF_SCAN:
        first, marker, length = struct.unpack_from(">BBH", stream, place)
        if first != 0xFF or length < 2 or place + 2 + length > len(stream):
            raise ValueError("the head is damaged")
        yield marker, stream[place + 4 : place + 2 + length]
        place += 2 + length


# Look-up tables of DICOM files: for real values, for what is shown, and for colours (PS3.3 C.11.1, C.11.2, C.7.6.3).
#
# pydicom has such functions. But they count in the type of the entries, so that the 300th of a table of bytes is the
# 44th; and colours of files with the high byte first are read as if it were the last.


@dataclass(frozen=True, slots=True, kw_only=True)
class LookUpTable:
    """Values below the table have its first entry, values above it the last.

    :ivar first: the value that the first entry is for.
    """

    first: int
    entries: NDArray[np.uint16]

    @classmethod
    def read(cls, header: pydicom.Dataset, item: pydicom.Dataset, colour: str = "", *, signed: bool) -> Self:
        """:param header: of the file, which knows the order of bytes.
        :param item: where the table stands.
        :param colour: Red, Green or Blue of a palette.
        :param signed: whether the table is for values that may be below zero.
        :raises ValueError: where there are fewer entries than the descriptor says.
        """
        name = f"{colour}PaletteColorLookupTable" if colour else "LUT"
        count, first, _ = item[f"{name}Descriptor"].value
        count = count or 2**16
        data = item[f"{name}Data"].value
        if isinstance(data, bytes):
            order = "<" if header.file_meta.TransferSyntaxUID.is_little_endian else ">"
            # Also entries of eight bits may be in words: how long it is tells (PS3.3 C.7.6.3.1.6).
            data = np.frombuffer(data, f"{order}u2" if len(data) >= 2 * count else "u1", count)
        entries = np.atleast_1d(np.asarray(data)).astype(np.uint16)
        if len(entries) < count:
            raise ValueError("a table has too few entries")
        if first >= 2**15 and signed:  # written as if it had no sign
            first -= 2**16
        return cls(first=int(first), entries=entries[:count])

    def of(self, values: NDArray[Any]) -> NDArray[np.uint16]:
        index = np.rint(values).astype(np.int64) - self.first
        return np.asarray(self.entries[np.clip(index, 0, len(self.entries) - 1)], dtype=np.uint16)
