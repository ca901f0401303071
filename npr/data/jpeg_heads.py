"""What a compressed image says of itself, before a decoder believes it.

Decoders are programs of others in C++. GDCM ends the whole process, or reads beyond its memory, where the head of a
lossless JPEG is damaged; damaged pixels it survives. CharLS never returns where a JPEG-LS stream was cut off. So heads
and ends are read here first, by ISO/IEC 10918-1 annexes B and H, and what is not so is not decoded.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Final

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
