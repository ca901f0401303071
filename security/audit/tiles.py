"""A log as C2SP tlog-tiles: static files with which anybody can follow it, check every entry and ask for any proof.

Published is what the newest checkpoint with a quorum covers. The layout is `checkpoint`, `tile/<level>/<number>` with
256 hashes to a tile, and `tile/entries/<number>` with 256 entries; the last tile of a level is `<number>.p/<width>`. A
whole tile never changes, so that a second publication only adds files. The checkpoint is written last: who reads it
finds all that it covers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from lazaret import files
from lazaret.errors import CannotDecide, CodecError, VerificationFailed
from security.audit.safe_files import NOTE_BYTES, read_capped, refuse_hostile
from security.crypto.merkle import Tree, leaf_hash
from security.log.note import Note, checkpoint_of
from security.log.reader import LogReader
from security.log.store import LogFolder

WIDTH: Final = 256
CHECKPOINT: Final = "checkpoint"
ENTRIES: Final = "entries"
LONGEST: Final = (1 << 16) - 1  # an entry's length has two bytes in a bundle
TILE_BYTES: Final = WIDTH * (LONGEST + 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTiles:
    """What was written: up to which entry, and how many files were new."""

    size: int
    added: int


def publish(path: Path, target: Path, *, entries: bool = True) -> PublishedTiles:
    """Write the tiles of a log folder; what is there already stays.

    :param entries: whether the entries themselves are published, or only the tree over them.
    :raises CannotDecide: if no checkpoint has a quorum yet.
    :raises VerificationFailed: if the entries do not lead to the checkpoint, or `target` has another history.
    """
    refuse_hostile(path)
    folder = LogFolder(path)
    try:
        note = Note.parse(folder.cosigned.read_bytes())
    except FileNotFoundError:
        hint = "publish after other parties have cosigned a checkpoint"
        raise CannotDecide("no checkpoint of this log has a quorum", where=str(path), hint=hint) from None
    checkpoint = checkpoint_of(note)
    lines = [line for block in LogReader(path).blocks() for line in block.lines][: checkpoint.size]
    leaves = [leaf_hash(line) for line in lines]
    if len(lines) < checkpoint.size or Tree(leaves).root() != checkpoint.root:
        raise VerificationFailed("the entries do not lead to the checkpoint", where=str(path))
    _refuse_other_history(target, leaves, checkpoint.origin)
    wanted = [*_tree(leaves), *(_bundles(lines) if entries else ())]
    added = sum(_add(target / name, data) for name, data in wanted)
    files.write_atomically(target / CHECKPOINT, note.encode())
    return PublishedTiles(size=checkpoint.size, added=added)


def tile_name(level: int | str, number: int, width: int) -> str:
    """Where a tile is: groups of three digits, all but the last with an x, and the width if it is not whole."""
    groups = [f"{number % 1000:03d}"]
    while number := number // 1000:
        groups.insert(0, f"x{number % 1000:03d}")
    return f"tile/{level}/{'/'.join(groups)}" + ("" if width == WIDTH else f".p/{width}")


def _tree(leaves: Sequence[bytes]) -> Iterator[tuple[str, bytes]]:
    level, row = 0, list(leaves)
    while row:
        above = []
        for number, chunk in enumerate(_chunks(row)):
            yield tile_name(level, number, len(chunk)), b"".join(chunk)
            if len(chunk) == WIDTH:
                above.append(Tree(chunk).root())
        level, row = level + 1, above


def _bundles(lines: Sequence[bytes]) -> Iterator[tuple[str, bytes]]:
    for number, chunk in enumerate(_chunks(lines)):
        if any(len(line) > LONGEST for line in chunk):
            raise CodecError("an entry is longer than this layout permits", where=f"entries from {number * WIDTH} on")
        data = b"".join(len(line).to_bytes(2, "big") + line for line in chunk)
        yield tile_name(ENTRIES, number, len(chunk)), data


def _chunks(row: Sequence[bytes]) -> Iterator[list[bytes]]:
    rest = iter(row)
    while chunk := list(islice(rest, WIDTH)):
        yield chunk


def _refuse_other_history(target: Path, leaves: Sequence[bytes], origin: str) -> None:
    """What was published before must be the beginning of this."""
    try:
        before = checkpoint_of(Note.parse(read_capped(target / CHECKPOINT, NOTE_BYTES)))
    except FileNotFoundError:
        return
    if before.origin != origin:
        raise VerificationFailed("another log is published here", where=str(target))
    if before.size > len(leaves) or Tree(leaves[: before.size]).root() != before.root:
        hint = "keep both: `privacy-audit check-proof` and the witnesses tell which history was signed"
        raise VerificationFailed("another history of this log is published here", where=str(target), hint=hint)


def _add(file: Path, data: bytes) -> bool:
    if file.exists():
        if read_capped(file, TILE_BYTES) != data:
            raise VerificationFailed("a published tile is not that of this log", where=str(file))
        return False
    file.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomically(file, data)
    return True
