"""Which files a process that sees images reads and writes. Standard library alone: asked before it is isolated."""

from __future__ import annotations

import contextlib
import csv
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final


def data_path(source: str) -> Path | None:
    """Where a data source lies; None for one that has no files."""
    kind, _, rest = source.partition("?")[0].partition(":")
    if kind == "ham10000":
        root = os.environ.get("LAZARET_DATA")
        return Path(root) / "ham10000_fed" if root else None
    return Path(rest) if rest and kind != "generated" else None


def data_folders(source: str) -> set[Path]:
    """All that a process needs to read a data source. What `files=` names is read in place of the table's folder, in
    which there may be keys."""
    path = data_path(source)
    if path is None:
        return set()
    options = source.partition("?")[2].split("&")
    elsewhere = [part.removeprefix("files=") for part in options if part.startswith("files=")]
    if not elsewhere:
        return image_folders(path)
    return {path.resolve()}.union(*(image_folders(Path(folder)) for folder in elsewhere))


def image_folders(path: Path) -> set[Path]:
    """Where the files behind a name really lie: tables list files elsewhere, and folders hold links."""
    waiting = [path, *(_listed_folders(path) if path.suffix.lower() == ".csv" else ())]
    found: set[Path] = set()
    while waiting:
        place = waiting.pop().resolve()
        if place not in found and place.exists():
            found.add(place)
            waiting += _linked_folders(place) if place.is_dir() else ()
    return found


def _listed_folders(table: Path) -> set[Path]:
    """Of the column `image`. What is wrong with a table is said by those who read it in earnest."""
    listed: set[str] = set()
    with contextlib.suppress(OSError, csv.Error):
        text = table.read_text(encoding="utf-8-sig", errors="replace")
        for row in csv.DictReader(io.StringIO(text, newline="")):
            listed.add(os.path.dirname((row.get("image") or "").strip()))
    return {table.parent / name for name in listed}


def _linked_folders(folder: Path) -> Iterator[Path]:
    """The folders that links in a tree point into. The listing itself tells which entries are links."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                target = Path(entry.path).resolve()
                yield target if target.is_dir() else target.parent
            elif entry.is_dir(follow_symlinks=False):
                yield from _linked_folders(Path(entry.path))


def cache_folder() -> Path:
    """Where decoded images go that are too many for memory (npr/data/store.py, which is not loaded here yet)."""
    base = os.environ.get("XDG_CACHE_HOME")
    chosen = os.environ.get("LAZARET_CACHE")
    return Path(chosen) if chosen else (Path(base) if base else Path.home() / ".cache") / "lazaret"


# Device files of graphics cards by the kind that `[site] device` names; torch calls AMD's cards `cuda` too.
_CARD_FILES: Final = {
    "cuda": ("nvidia*", "nvidia-caps/*", "kfd", "dri/renderD*"),
    "xpu": ("dri/renderD*",),
}


def card_files(device: str, folder: Path = Path("/dev")) -> list[Path]:
    """What a process needs to compute on a card: nothing for `cpu`, everything that is there for `auto`."""
    kind = device.partition(":")[0]
    patterns = {p for name in (_CARD_FILES if kind == "auto" else (kind,)) for p in _CARD_FILES.get(name, ())}
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_char_device()})


def made(*folders: Path) -> list[Path]:
    """Folders to write in, made now where they are missing: an isolated process may write in them, not beside them."""
    for folder in folders:
        # One that cannot be made is named by the work itself, with what to do about it.
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return list(folders)
