"""Stored values of one frame of a DICOM file, from whatever transfer syntax it has.

Each compression has one decoder, so that a damaged file is not tried by a second one. And a decoder is asked only for
what its stream holds (`npr.data.jpeg_heads`): where the header says something else, or the stream is damaged, some give
a scrambled image, never return, or end the whole process.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any, Final

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
from npr.data.jpeg_heads import check_end, check_lossless, coded_size

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
