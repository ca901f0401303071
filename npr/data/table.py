"""A CSV file as rows, plain or gzipped: what cannot be read is one error with the file, and the row if there is one."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from security.errors import DataError

# No UTF-8 text begins like this, so a packed table needs no other name.
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One row. `where` is what errors call it; row 1 is the header, as a spreadsheet counts."""

    where: str
    fields: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    columns: tuple[str, ...]
    entries: tuple[Entry, ...]


def read_table(path: Path, needed: Sequence[str], *, known: Sequence[str] = ()) -> Table:
    """All rows, each with exactly the header's fields.

    :param needed: columns that must be there.
    :param known: what a hint lists where one is not; `needed` if left out.
    """
    reader = csv.DictReader(io.StringIO(_text(path), newline=""), strict=True)
    try:
        columns = tuple(reader.fieldnames or ())
        for name in needed:
            if name not in columns:
                hint = f"columns: {', '.join(known or needed)}"
                raise DataError(f"column {name!r} is missing", where=f"{path.name} row 1", hint=hint)
        entries = tuple(_entry(fields, f"{path.name} row {reader.line_num}") for fields in reader)
    except csv.Error as error:
        # The reader still counts the row before: a quote left open is found only at the end of the file.
        where = f"{path.name} row {reader.line_num + 1}"
        raise DataError(
            f"not a UTF-8 CSV file ({type(error).__name__})", where=where, hint="look for a quote that is left open"
        ) from None
    return Table(columns=columns, entries=entries)


def _entry(fields: dict[str, str | None], where: str) -> Entry:
    if None in fields or None in fields.values():
        raise DataError("more or fewer fields than the header", where=where)
    return Entry(where=where, fields={name: (value or "").strip() for name, value in fields.items()})


def _text(path: Path) -> str:
    data = _bytes(path)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        row = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"not a UTF-8 CSV file ({type(error).__name__})",
            where=f"{path.name} row {row}",
            hint="save the table as UTF-8",
        ) from None


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
