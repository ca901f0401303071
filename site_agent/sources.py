"""What `predict` reads: a folder, one file, or a table with a column `image`; decoded exactly as in training."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from npr.data.dicom import ct_decoding
from npr.data.fed_isic import decoding as isic_decoding
from npr.data.manifest import SUFFIXES, image_decoding
from npr.data.rows import Decoding
from npr.data.sources import SourceName
from npr.deployed import Pixels
from security.errors import ConfigError, DataError, ToolkitError

DICOM_SUFFIX: Final = ".dcm"
_MAGIC_AT: Final = 128
_IGNORED: Final = ("Thumbs.db", "DICOMDIR")
_READERS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Files in order, each with the name it has in the result, and how many others were passed over."""

    files: tuple[tuple[str, Path], ...]
    ignored: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some files: the pixels of those that could be read, and what was wrong with the others."""

    names: tuple[str, ...]
    problems: tuple[str | None, ...]
    pixels: Pixels


def decoding_for(source: str, image_size: int, channels: int) -> Decoding:
    """How files become pixels at this site: as the data set it trains on is read."""
    name = SourceName.parse(source)
    if name.kind == "dicom":
        found = ct_decoding(image_size, name.options.get("window"))
    elif name.kind == "fed-isic":
        found = isic_decoding(
            image_size, name.options.get("colour_constancy", True), name.options.get("brightness", False)
        )
    else:
        found = image_decoding(image_size)
    if found.channels != channels:
        raise ConfigError(
            f"the model takes {channels} channels, [data] source gives {found.channels}", where="site.toml [data]"
        )
    return found


def find(source: Path, decoding: Decoding) -> Found:
    """The files behind one name, sorted; a folder is searched with its sub-folders."""
    dicom = decoding.channels == 1
    if source.is_dir():
        every = sorted(path for path in source.rglob("*") if path.is_file() and not _hidden(path, source))
        wanted = [path for path in every if (_is_dicom(path) if dicom else path.suffix.lower() in SUFFIXES)]
        found = Found(
            files=tuple((path.relative_to(source).as_posix(), path) for path in wanted),
            ignored=len(every) - len(wanted),
        )
    elif source.suffix.lower() == ".csv":
        found = Found(files=tuple(_listed(source)))
    elif source.exists():
        found = Found(files=((source.name, source),))
    else:
        raise DataError("there is no such folder, file or table", where=str(source))
    if not found.files:
        kinds = "DICOM files" if dicom else f"images ({', '.join(SUFFIXES)})"
        raise DataError(f"there are no {kinds} here", where=str(source))
    return found


def _hidden(path: Path, root: Path) -> bool:
    return path.name in _IGNORED or any(part.startswith(".") for part in path.relative_to(root).parts)


def _is_dicom(path: Path) -> bool:
    """By suffix, or by the four letters after the preamble (DICOM PS3.10 section 7.1): archives leave suffixes out."""
    if path.suffix.lower() == DICOM_SUFFIX:
        return True
    with path.open("rb") as file:
        return file.read(_MAGIC_AT + 4)[_MAGIC_AT:] == b"DICM"


def _listed(table: Path) -> Iterator[tuple[str, Path]]:
    """The column `image`, relative to the table; other columns are not read."""
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            if "image" not in (reader.fieldnames or ()):
                raise DataError("column 'image' is missing", where=f"{table.name} row 1")
            for entry in reader:
                name = (entry["image"] or "").strip()
                if not name:
                    raise DataError("image is empty", where=f"{table.name} row {reader.line_num}")
                yield name, table.parent / name
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"not a UTF-8 CSV file ({type(error).__name__})", where=str(table)) from None


def pieces(found: Found, decoding: Decoding, *, size: int) -> Iterator[Piece]:
    """Decode `size` files at a time, one piece ahead of the one in work: memory holds two, however many come."""
    parts = [found.files[start : start + size] for start in range(0, len(found.files), size)]
    with ThreadPoolExecutor(max_workers=_READERS, thread_name_prefix="reading") as workers:

        def begin(part: tuple[tuple[str, Path], ...]) -> list[Future[Pixels | str]]:
            return [workers.submit(_decoded, path, name, decoding) for name, path in part]

        waiting = begin(parts[0])
        for number, part in enumerate(parts):
            current = [future.result() for future in waiting]
            waiting = begin(parts[number + 1]) if number + 1 < len(parts) else []
            yield _piece(tuple(name for name, _ in part), current, decoding)


def _decoded(path: Path, name: str, decoding: Decoding) -> Pixels | str:
    """Pixels, or what is wrong. Whatever a damaged file makes a decoder raise, it is that file's problem alone."""
    try:
        return decoding.read(path, name)
    except ToolkitError as error:
        return error.message
    except Exception as error:
        return f"cannot be read ({type(error).__name__})"


def _piece(names: tuple[str, ...], read: list[Pixels | str], decoding: Decoding) -> Piece:
    good = [pixels for pixels in read if not isinstance(pixels, str)]
    shape = (0, decoding.image_size, decoding.image_size, decoding.channels)
    return Piece(
        names=names,
        problems=tuple(told if isinstance(told, str) else None for told in read),
        pixels=np.stack(good) if good else np.empty(shape, dtype=np.uint8),
    )
