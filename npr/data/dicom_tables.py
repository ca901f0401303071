"""Look-up tables of DICOM files: for real values, for what is shown, and for colours (PS3.3 C.11.1, C.11.2, C.7.6.3).

pydicom has such functions. But they count in the type of the entries, so that the 300th of a table of bytes is the
44th; and colours of files with the high byte first are read as if it were the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pydicom
from numpy.typing import NDArray


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
