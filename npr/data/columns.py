"""Tables: the arrays of an npz file as columns, and CSV files as rows, plain or gzipped.

What cannot be read is one error with the file, and the array or row.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from lazaret.errors import DataError

# Columns of a table that may stand in place of `image`, from the narrowest to the widest: each row then names a file,
# a series, a study or an order, and labels all files of it.
IDENTIFIERS: Final = ("SOPInstanceUID", "SeriesInstanceUID", "StudyInstanceUID", "AccessionNumber")
# In a folder that is filled from an archive: the files that are complete and belong to the data set, one a line.
LISTING: Final = ".fetched"


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Arrays:
    """What was read from `file`. Nothing is said about lengths and types until a column is asked for."""

    file: Path
    named: Mapping[str, NDArray[Any]]

    @classmethod
    def read(cls, file: Path, needed: Sequence[str], optional: Sequence[str] = ()) -> Self:
        """The arrays of these names; others in the file are left alone. Pickles are not opened."""
        try:
            opened = np.load(file, allow_pickle=False)
        except Exception as error:  # zipfile and numpy raise many types for what is no archive
            raise _unreadable(file, error) from None
        if not isinstance(opened, NpzFile):
            raise DataError("not a plain npz file: a single array", where=str(file), hint="save it with numpy.savez")
        with opened as archive:
            for name in needed:
                if name not in archive.files:
                    hint = f"needed: {', '.join(needed)}"
                    raise DataError(f"array {name} is missing", where=str(file), hint=hint)
            wanted = [name for name in (*needed, *optional) if name in archive.files]
            return cls(file=file, named={name: _read(archive, name, file) for name in wanted})

    def __contains__(self, name: str) -> bool:
        return name in self.named

    def column(self, name: str, length: int | None = None) -> NDArray[Any]:
        """One value after the other."""
        values = self.named[name]
        if values.ndim != 1:
            raise DataError(f"array {name} has {values.ndim} dimensions, not one", where=self.file.name)
        if length is not None and len(values) != length:
            raise DataError(
                f"array {name} has {len(values)} values, not {length}",
                where=self.file.name,
                hint="one value per image; offsets has one more",
            )
        return values

    def numbers(self, name: str, length: int | None = None) -> NDArray[np.int64]:
        values = self.column(name, length)
        if values.dtype.kind not in "iu":
            raise DataError(
                f"array {name} holds {_kind(values)}, not whole numbers",
                where=self.file.name,
                hint="save it as integers; classes are numbered from 0",
            )
        return values.astype(np.int64)

    def words(self, name: str, length: int | None = None) -> tuple[str, ...]:
        """Text as it is, UTF-8 bytes decoded, numbers written out."""
        values = self.column(name, length)
        # Numbers with a point are refused, too: a patient who is missing is NaN there, and all of those would be one.
        if values.dtype.kind not in "SUiu":
            raise DataError(f"array {name} holds {_kind(values)}, neither text nor whole numbers", where=self.file.name)
        return tuple(self._word(values, name, row) for row in range(len(values)))

    def _word(self, values: NDArray[Any], name: str, row: int) -> str:
        try:
            value = values[row]
            word = value.decode("utf-8") if isinstance(value, bytes) else str(value)
            word.encode("utf-8")  # numpy also holds characters that no text has
        except ValueError:
            raise DataError(f"{name} is not UTF-8 text", where=f"{self.file.name} row {row}") from None
        return word


def _read(archive: NpzFile, name: str, file: Path) -> NDArray[Any]:
    try:
        return np.asarray(archive[name])
    except Exception as error:  # as above; also pickled objects, a checksum that is wrong, a shape beyond memory
        raise _unreadable(file, error, f": array {name} cannot be read") from None


def _unreadable(file: Path, error: Exception, what: str = "") -> DataError:
    return DataError(
        f"not a plain npz file{what} ({type(error).__name__})",
        where=str(file),
        hint="save plain text and numbers with numpy.savez, and let this user read the file",
    )


def _kind(values: NDArray[Any]) -> str:
    return "text" if values.dtype.kind in "SU" else str(values.dtype)


# CSV files.

# No UTF-8 text begins like this, so a packed table needs no other name.
_GZIP = b"\x1f\x8b"
_MARK = b"\xef\xbb\xbf"  # with which some programs begin UTF-8


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnEntry:
    """One row. `where` is what errors call it; row 1 is the header, as a spreadsheet counts."""

    where: str
    fields: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvTable:
    columns: tuple[str, ...]
    entries: tuple[ColumnEntry, ...]


def _raise(error: DataError) -> None:
    raise error


def read_table(
    path: Path,
    needed: Sequence[str],
    *,
    known: Sequence[str] = (),
    refuse: Callable[[DataError], None] = _raise,
    each: bool = False,
) -> CsvTable:
    """All rows, each with exactly the header's fields.

    :param needed: columns that must be there.
    :param known: what a hint lists where one is not; `needed` if left out.
    :param refuse: takes what is wrong with a row; if it returns, the row is left out.
    :param each: a row is a line, whatever the others are: for data under differential privacy. Otherwise a field in
        quotes may go over several lines, and what is no CSV is refused as a whole.
    """
    lines = _each_line(path, refuse) if each else _whole_text(path)
    columns = tuple(next((values for _, values in lines if values), ()))
    for name in needed:
        if name not in columns:
            hint = f"columns: {', '.join(known or needed)}"
            raise DataError(f"column {name!r} is missing", where=f"{path.name} row 1", hint=hint)
    entries = list[ColumnEntry]()
    for number, values in lines:
        where = f"{path.name} row {number}"
        if len(values) == len(columns):
            fields = {name: value.strip() for name, value in zip(columns, values, strict=True)}
            entries.append(ColumnEntry(where=where, fields=fields))
        elif values:
            refuse(DataError("more or fewer fields than the header", where=where))
    return CsvTable(columns=columns, entries=tuple(entries))


def _whole_text(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Rows as the format has them, also over several lines, each with the number of its last line."""
    reader = csv.reader(io.StringIO(text_of(path), newline=""), strict=True)
    whole = 0
    try:
        for values in reader:
            whole = reader.line_num
            yield whole, values
    except csv.Error as error:
        # Where a quote was left open, which is found only at the end of the file.
        raise _no_csv(error, f"{path.name} row {whole + 1}") from None


def _each_line(path: Path, refuse: Callable[[DataError], None]) -> Iterator[tuple[int, list[str]]]:
    """Every line by itself: what one has, such as an open quote or letters of another encoding, changes no other."""
    begun = False
    for number, line in enumerate(_bytes(path).removeprefix(_MARK).splitlines(), start=1):
        try:
            values = next(csv.reader([line.decode("utf-8")], strict=True), [])
        except (UnicodeDecodeError, csv.Error) as error:
            found = _no_csv(error, f"{path.name} row {number}")
            if not begun:
                raise found from None
            refuse(found)
        else:
            begun = begun or bool(values)
            yield number, values


def _no_csv(error: Exception, where: str) -> DataError:
    encoded = isinstance(error, UnicodeDecodeError)
    hint = "save the table as UTF-8" if encoded else "check for a quote that is not closed"
    return DataError(f"not a UTF-8 CSV file ({type(error).__name__})", where=where, hint=hint)


def text_of(path: Path) -> str:
    """A table as text, plain or gzipped."""
    data = _bytes(path)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        row = data.count(b"\n", 0, error.start) + 1
        raise _no_csv(error, f"{path.name} row {row}") from None


def _bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if data.startswith(_GZIP) else data
    except FileNotFoundError:
        raise DataError("table is missing", where=str(path)) from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"gzip file is damaged or cut off ({type(error).__name__})", where=str(path), hint="copy it again"
        ) from None
    except OSError as error:
        raise DataError(
            f"table cannot be read ({type(error).__name__})", where=str(path), hint="name a file this user may read"
        ) from None
