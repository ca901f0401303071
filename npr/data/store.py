"""Images: one file to one array, what can be wrong with it, and the store of all decoded images.

Images are uint8, decoded once, in memory up to a bound and memory-mapped beyond it.

Only what the caller asks for goes to disk, because decoded images are patient data: a cache directory is private to
the user (0700), its files 0600, and a file appears under its name only when it is complete.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lazaret.errors import DataError
from lazaret.terminal import progress

# One encoded image to one uint8 array of the wanted size; every failure is a DataError that says where.

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


# What can be wrong with one image or row: training stops at the first fault, a survey lists them all.


class FaultKind(StrEnum):
    LABEL = "label outside the classes"
    SPLIT = "unknown split"
    REPEATED = "image listed twice"
    MISSING = "missing file"
    UNREADABLE = "unreadable image"
    TWO_SIDES = "patient, lesion or study on two sides"
    SPELLING = "patient, lesion or study spelt in two ways"
    EMPTY = "empty field, or more or fewer fields than the header"
    FILE = "file of an unknown type or name"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One of them, as the error that it is when nobody collects."""

    kind: FaultKind
    error: DataError


Decode = Callable[[int], NDArray[np.uint8]]

# Half of a small workstation's memory; a full Fed-ISIC2019 at 224 px (3.5 GB) just fits.
DEFAULT_MEMORY_LIMIT = 4 << 30
CACHE_VARIABLE = "LAZARET_CACHE"
_ROWS_AT_A_TIME = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageStorage:
    """Where decoded images go.

    :param memory_limit: bytes of one pool above which it is memory-mapped from `cache_dir`.
    :param cache_dir: keep every pool there between runs; None keeps them in memory and uses the user's cache
        directory only for what does not fit.
    :cvar per_unit: whatever is wrong with the rows of a unit (a patient) concerns these rows alone.
    """

    memory_limit: int = DEFAULT_MEMORY_LIMIT
    cache_dir: Path | None = None
    per_unit: ClassVar[bool] = False

    @classmethod
    def from_environment(cls) -> ImageStorage:
        chosen = os.environ.get(CACHE_VARIABLE)
        return cls(cache_dir=Path(chosen) if chosen else None)

    def report(self, fault: Fault) -> None:
        """What happens to a row that cannot be used. Here: nothing is half-read."""
        raise fault.error

    def instead(self, decode: Decode, shape: tuple[int, ...]) -> NDArray[np.uint8] | None:  # noqa: ARG002
        """An array in the place of decoded images; None to decode them."""
        return None


@dataclass(frozen=True, eq=False, kw_only=True)
class PerUnitStorage(ImageStorage):
    """For data under differential privacy: a row with a fault is left out, and nothing else happens.

    To refuse the table, or to drop a row because of another patient's row, would tell who is in it. What is left out is
    for the hospital's own eyes (docs/spec/differential-privacy.md, section 2a).
    """

    per_unit: ClassVar[bool] = True
    faults: list[Fault] = field(default_factory=list)

    def report(self, fault: Fault) -> None:
        self.faults.append(fault)


def blank_rows(images: NDArray[np.uint8]) -> frozenset[int]:
    """Rows without a single bright pixel: what an image that could not be read is, also in the cache."""
    return frozenset(row for row in range(len(images)) if not images[row].any())


def user_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lazaret"


def digest_of(parts: Iterable[object]) -> str:
    """A stable name for what a pool was made from: sources pass settings and file digests."""
    return hashlib.sha256(json.dumps([str(part) for part in parts]).encode()).hexdigest()


def pool(
    decode: Decode, count: int, shape: tuple[int, int, int], *, key: str, storage: ImageStorage
) -> NDArray[np.uint8]:
    """All `count` images in one array, read from the cache when the same pool was made before."""
    full = (count, *shape)
    if (blank := storage.instead(decode, full)) is not None:
        return blank
    fits = int(np.prod(full, dtype=np.int64)) <= storage.memory_limit
    if storage.cache_dir is None and fits:
        images = np.empty(full, dtype=np.uint8)
        _fill(images, decode, storage)
        return images
    directory = storage.cache_dir or user_cache_dir()
    # Where unreadable images are black ones, they must not be taken for images elsewhere.
    path = directory / f"images-{key}{'-each' if storage.per_unit else ''}.npy"
    if not path.exists():
        _write(path, full, decode, storage)
    try:
        cached: NDArray[np.uint8] = np.load(path, mmap_mode=None if fits else "r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(
            f"cached images cannot be read ({type(error).__name__})", where=str(path), hint="delete this file"
        ) from None
    if cached.shape != full or cached.dtype != np.uint8:
        raise DataError(
            f"cached images have shape {cached.shape}, not {full}", where=str(path), hint="delete this file"
        )
    return cached


def _write(path: Path, shape: tuple[int, ...], decode: Decode, storage: ImageStorage) -> None:
    """Fill a temporary file and rename it: a killed run leaves no half pool under the final name."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".images-", suffix=".npy", dir=path.parent)  # created 0600
    os.close(handle)
    try:
        images = np.lib.format.open_memmap(name, mode="w+", dtype=np.uint8, shape=shape)
        _fill(images, decode, storage)
        images.flush()
        del images
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _fill(images: NDArray[np.uint8], decode: Decode, storage: ImageStorage) -> None:
    """Decode on all cores (Pillow lets go of the interpreter lock); the error of the lowest row is the one raised."""

    def some(start: int) -> None:
        for row in range(start, min(start + _ROWS_AT_A_TIME, len(images))):
            try:
                images[row] = decode(row)
            except DataError as error:
                storage.report(Fault(kind=FaultKind.UNREADABLE, error=error))
                images[row] = 0

    starts = range(0, len(images), _ROWS_AT_A_TIME)
    with progress("decoding images") as tell, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as workers:
        try:
            for number, _ in enumerate(workers.map(some, starts), start=1):
                tell(min(number * _ROWS_AT_A_TIME, len(images)), len(images))
        except BaseException:
            workers.shutdown(wait=True, cancel_futures=True)
            raise
