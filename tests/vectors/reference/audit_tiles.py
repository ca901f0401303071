"""A reader of C2SP tlog-tiles, written from that specification alone: entries and root of a published log."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from .audit_formats import Invalid, Note, demand

WIDTH = 256


def name_of(number: int) -> str:
    """1234067 is x001/x234/067."""
    digits = str(number)
    digits = digits.zfill(-(-len(digits) // 3) * 3)
    groups = [digits[at : at + 3] for at in range(0, len(digits), 3)]
    return "/".join([*("x" + group for group in groups[:-1]), groups[-1]])


class PublishedLog:
    """The files under one prefix."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.note = Note((folder / "checkpoint").read_bytes())
        self.origin, self.size, self.root = self.note.checkpoint

    def _widths(self, level: int) -> Iterator[tuple[int, int]]:
        """The tiles of a level at this size, and their widths."""
        count = self.size // WIDTH**level
        yield from ((number, WIDTH) for number in range(count // WIDTH))
        if count % WIDTH:
            yield count // WIDTH, count % WIDTH

    def _tile(self, level: str, number: int, width: int) -> bytes:
        name = f"tile/{level}/{name_of(number)}" + (f".p/{width}" if width < WIDTH else "")
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            raise Invalid(f"{name} is missing") from None

    def hashes(self, level: int) -> list[bytes]:
        found = []
        for number, width in self._widths(level):
            tile = self._tile(str(level), number, width)
            demand(len(tile) == 32 * width, "a tile of another width")
            found += [tile[at : at + 32] for at in range(0, len(tile), 32)]
        return found

    def entries(self) -> Iterator[bytes]:
        for number, width in self._widths(0):
            bundle, count = self._tile("entries", number, width), 0
            while bundle:
                length = int.from_bytes(bundle[:2], "big")
                demand(len(bundle) >= 2 + length, "a bundle that ends in an entry")
                yield bundle[2 : 2 + length]
                bundle, count = bundle[2 + length :], count + 1
            demand(count == width, "a bundle of another width")

    def check(self) -> None:
        """Every tile follows from the one below it, the bottom from the entries, and the root from the bottom."""
        leaves = self.hashes(0)
        demand(leaves == [sha256(b"\0" + entry).digest() for entry in self.entries()], "entries are not the leaves")
        demand(_root(leaves) == self.root, "the tiles do not lead to the checkpoint")
        level = 0
        while row := self.hashes(level + 1):
            below = self.hashes(level)
            due = [_root(below[at * WIDTH : (at + 1) * WIDTH]) for at in range(len(below) // WIDTH)]
            demand(row == due, "a tile does not follow from those below it")
            level += 1


def _root(leaves: list[bytes]) -> bytes:
    """MTH of RFC 6962, over hashes of leaves."""
    if len(leaves) == 1:
        return leaves[0]
    split = 1 << (len(leaves) - 1).bit_length() - 1
    return sha256(b"\1" + _root(leaves[:split]) + _root(leaves[split:])).digest()
