"""One encoded image to one uint8 array of the wanted size; every failure is a DataError that says where."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from security.errors import DataError

# Beyond this a file is a mistake or a decompression bomb: whole-slide images do not belong here.
MAX_PIXELS = 100_000_000


def open_image(source: Path | bytes, *, channels: int, where: str) -> Image.Image:
    """Decode fully, as RGB or grey."""
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            if image.width * image.height > MAX_PIXELS:
                raise DataError(f"image of {image.width} x {image.height} pixels is too large", where=where)
            return image.convert("RGB" if channels == 3 else "L")
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError("image file is missing", where=where, hint="check the path and the image root") from None
    except Exception as error:  # Pillow's readers raise many types for damaged files
        raise DataError(
            f"image cannot be read ({type(error).__name__})", where=where, hint="re-export it as PNG or JPEG"
        ) from None


def squash(image: Image.Image, size: int) -> NDArray[np.uint8]:
    """Bilinear to size x size without keeping the aspect, as the FedNPR paper's loader does; (H, W, C)."""
    resized = image if image.size == (size, size) else image.resize((size, size), Image.Resampling.BILINEAR)
    pixels = np.asarray(resized, dtype=np.uint8)
    return pixels if pixels.ndim == 3 else pixels[:, :, None]
