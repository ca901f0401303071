"""A data set looked at before training: every fault in it, not only the first, and images that occur twice.

The same code reads the tables as for training; only images are not kept, and faults are collected. Nothing that comes
out names a patient or a file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from npr.data.catalogue import Catalogue
from npr.data.faults import Fault, Kind
from npr.data.sources import open_catalogue
from npr.data.store import Decode, Storage
from security.errors import DataError
from security.terminal import progress

_AT_A_TIME = 256


@dataclass(frozen=True, eq=False, kw_only=True)
class _Undecoded(Storage):
    """Takes the place of decoded images: an array of zeros that needs no memory, and a note of how to decode."""

    faults: list[Fault] = field(default_factory=list)
    decoders: list[Decode] = field(default_factory=list)

    def report(self, fault: Fault) -> None:
        self.faults.append(fault)

    def instead(self, decode: Decode, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        self.decoders.append(decode)
        return np.broadcast_to(np.zeros((), dtype=np.uint8), shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The usable rows as a catalogue without pixels, and what was wrong with the others."""

    catalogue: Catalogue
    faults: tuple[Fault, ...]
    decode: Decode

    def name(self, row: int) -> str:
        """What an error would call a row."""
        named = self.catalogue.row_names
        return named[row] if named else f"{self.catalogue.where or self.catalogue.name} row {row}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What decoding every image has shown.

    :param same: pairs of rows with the same pixels, the earlier row second.
    """

    unreadable: tuple[Fault, ...]
    same: tuple[tuple[int, int], ...]


def survey(source: str, *, image_size: int, seed: int = 0, class_names: Sequence[str] | None = None) -> Survey:
    """Read all of a data set but its pixels.

    :raises DataError: where nothing can be listed at all, as with a table that is missing.
    """
    storage = _Undecoded()
    catalogue = open_catalogue(source, image_size=image_size, seed=seed, class_names=class_names, storage=storage)
    # Generated images are there already; all others know how to be decoded.
    decode = storage.decoders[0] if storage.decoders else lambda row: np.asarray(catalogue.images[row])
    return Survey(catalogue=catalogue, faults=tuple(storage.faults), decode=decode)


def look(told: Survey) -> Look:
    """Decode every image once and keep its digest."""
    unreadable, same, first = list[Fault](), list[tuple[int, int]](), dict[bytes, int]()
    for row, digest in enumerate(_digests(told)):
        if isinstance(digest, Fault):
            unreadable.append(digest)
        elif first.setdefault(digest, row) != row:
            same.append((row, first[digest]))
    return Look(unreadable=tuple(unreadable), same=tuple(same))


def _digests(told: Survey) -> Iterator[bytes | Fault]:
    def digest(row: int) -> bytes | Fault:
        try:
            return hashlib.blake2b(told.decode(row).tobytes(), digest_size=16).digest()
        except DataError as error:
            return Fault(kind=Kind.UNREADABLE, error=error)

    rows = range(len(told.catalogue))
    with progress("looking at images") as tell, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as workers:
        for start in range(0, len(rows), _AT_A_TIME):
            yield from workers.map(digest, rows[start : start + _AT_A_TIME])
            tell(min(start + _AT_A_TIME, len(rows)), len(rows))
