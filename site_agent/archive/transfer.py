"""Transfers between the archive and a folder: what a source names is fetched, reports are sent.

A fetch searches the whole source, then retrieves what is missing, then renews the list of what is complete.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from lazaret import files
from lazaret.errors import ArchiveError, ArchiveObjectError, ConfigError, DataError
from npr.data.columns import IDENTIFIERS
from site_agent.archive.cache import ArchiveCache
from site_agent.archive.dicomweb import (
    ACCESSION,
    INSTANCE,
    SERIES,
    STUDY,
    ArchiveClient,
    InstanceName,
    is_uid,
    value_of,
)
from site_agent.archive.source import ArchiveSource

# The identifiers in a table of labels. The trainer reads the same table for its labels, and checks all of it.

_LONGEST: Final = 64
# In a search `*` and `?` stand for other letters: the archive would give more than the row names.
_WILDCARDS: Final = re.compile(r"[*?\\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableIdentifier:
    """What one row names. `where` is what messages call it."""

    key: str
    value: str
    where: str


def identifiers_in(table: Path) -> Iterator[TableIdentifier]:
    """Each identifier once.

    :raises DataError: with the row, never with the identifier.
    """
    seen = set[str]()
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            key = next((name for name in IDENTIFIERS if name in (reader.fieldnames or ())), None)
            if key is None:
                raise DataError(
                    "the table names no studies", where=f"{table.name} row 1", hint=f"one of {', '.join(IDENTIFIERS)}"
                )
            for number, entry in enumerate(reader, start=2):
                where, value = f"{table.name} row {number}", (entry[key] or "").strip()
                _check(key, value, where)
                if value not in seen:
                    seen.add(value)
                    yield TableIdentifier(key=key, value=value, where=where)
    except FileNotFoundError:
        raise DataError("there is no such table", where=str(table)) from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"not a UTF-8 CSV file ({type(error).__name__})", where=table.name) from None


def _check(key: str, value: str, where: str) -> None:
    if not value:
        raise DataError(f"{key} is empty", where=where)
    if key == "AccessionNumber":
        if len(value) > _LONGEST or not value.isprintable() or _WILDCARDS.search(value):
            raise DataError(f"{key} cannot be searched for", where=where, hint="without *, ? and backslash")
    elif not is_uid(value):
        raise DataError(f"{key} is no UID", where=where, hint="digits and full stops")


Tell = Callable[[int, int], None]
# What an archive keeps beside images, by modality (DICOM PS3.3 C.7.3.1.1.1): reports (ours too), notes, plans, curves.
WITHOUT_IMAGES: Final = frozenset(
    {"SR", "KO", "PR", "DOC", "SEG", "REG", "FID", "PLAN", "RTDOSE", "RTPLAN", "RTRECORD", "RTSTRUCT", "RWV", "AU",
     "ECG", "EPS", "HD", "RESP", "SMR", "STAIN", "TEXTUREMAP", "M3D"}
)  # fmt: skip


@dataclass(kw_only=True)
class ArchiveFindings:
    """What a search has found.

    :ivar images: each with what messages call the place that asked for it.
    :ivar skipped: how many are of modalities that are not wanted.
    :ivar problems: rows, never studies.
    """

    images: dict[InstanceName, str] = field(default_factory=dict)
    skipped: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class FetchSummary:
    """What came of it, in numbers; `problems` names rows, never studies.

    :ivar fetched: files that came now; the others were here.
    """

    studies: int
    files: int
    skipped: int
    fetched: int = 0
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        names = ("studies", "files", "fetched", "skipped", "problems")
        return {name: getattr(self, name) for name in names}


def search(client: ArchiveClient, source: ArchiveSource, *, tell: Tell) -> ArchiveFindings:
    """:raises ArchiveError: where the archive cannot be asked."""
    found = ArchiveFindings()
    rows = list(identifiers_in(source.labels)) if source.labels is not None else [None]
    for number, row in enumerate(rows, start=1):
        taken, where = 0, row.where if row else "the search"
        for name in _named(client, row) if row else _chosen(client, source):
            if name.modality in WITHOUT_IMAGES or (source.modalities and name.modality not in source.modalities):
                found.skipped += 1
            else:
                found.images.setdefault(name, where)
                taken += 1
        if not taken:
            found.problems.append(f"{where}: the archive has no image for it")
        tell(number, len(rows))
    return found


def fetch(client: ArchiveClient, found: ArchiveFindings, cache: ArchiveCache, *, tell: Tell) -> FetchSummary:
    """Fill the cache. Where something is missing the rest comes all the same, and the list stays as it was.

    :raises ArchiveError: where the archive cannot be asked at all; what has come stays.
    """
    images = found.images
    summary = FetchSummary(studies=len({name.study for name in images}), files=len(images), skipped=found.skipped)
    summary.problems += found.problems
    for number, (name, where) in enumerate(images.items(), start=1):
        if not cache.has(name):
            try:
                cache.receive(name, partial(client.retrieve, name))
                summary.fetched += 1
            except ArchiveObjectError as error:
                summary.problems.append(f"{where}: {error.message}")
        tell(number, len(images))
    if not summary.problems:
        cache.finish(images)
    return summary


def _named(client: ArchiveClient, row: TableIdentifier) -> Iterator[InstanceName]:
    """What one row of a table names, and nothing else, whatever the archive answers."""
    if row.key == "StudyInstanceUID":
        yield from client.instances(row.value)
    elif row.key == "AccessionNumber":
        for study in _studies(client, {row.key: row.value, "includefield": ACCESSION}, only=row.value):
            yield from client.instances(study)
    elif row.key == "SeriesInstanceUID":
        for answer in client.search("/series", {row.key: row.value}):
            study = value_of(answer, STUDY)
            if value_of(answer, SERIES) == row.value and is_uid(study):
                yield from client.instances(study, row.value)
    else:
        for answer in client.search("/instances", {row.key: row.value}):
            study, series = value_of(answer, STUDY), value_of(answer, SERIES)
            if value_of(answer, INSTANCE) == row.value and is_uid(study) and is_uid(series):
                yield from (name for name in client.instances(study, series) if name.instance == row.value)


def _chosen(client: ArchiveClient, source: ArchiveSource) -> Iterator[InstanceName]:
    for study in _studies(client, source.filters):
        yield from client.instances(study)


def _studies(client: ArchiveClient, query: Any, *, only: str | None = None) -> Iterator[str]:
    """:param only: the accession number that was asked for: an archive may ignore what it does not know."""
    for answer in client.search("/studies", query):
        study = value_of(answer, STUDY)
        if not is_uid(study):
            raise ArchiveError("the archive lists a study without a valid UID")
        if only is None or value_of(answer, ACCESSION).strip() == only:
            yield study


# Reports of a folder to the archive. Each is sent until the archive has said that it holds it, and not again.


SENT: Final = ".sent"
MOST_REPORT: Final = 64 * 1024 * 1024


@dataclass(kw_only=True)
class SendSummary:
    """In numbers; a report is named by its place in the folder, never by its file."""

    reports: int = 0
    sent: int = 0
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"reports": self.reports, "sent": self.sent, "problems": self.problems}


def reports_in(folder: Path) -> list[Path]:
    """:raises ConfigError: where there are none."""
    found = sorted(path for path in folder.glob("*.dcm") if is_uid(path.stem)) if folder.is_dir() else []
    if not found:
        raise ConfigError(
            "there are no reports here", where=str(folder), hint="`site-agent predict --store FOLDER` writes them"
        )
    return found


def send(client: ArchiveClient, folder: Path, *, tell: Callable[[int, int], None]) -> SendSummary:
    """What was sent is written down behind it. After a crash in between a report goes out twice, under the same UID,
    which the archive holds once.

    :raises ArchiveError: where the archive does not answer or does not let us in.
    """
    every = reports_in(folder)
    listed = folder / SENT
    done = set(listed.read_text(encoding="ascii").split()) if listed.exists() else set()
    summary = SendSummary(reports=len(every))
    descriptor = os.open(listed, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as record:
        for number, path in enumerate(every, start=1):
            if path.stem not in done:
                try:
                    client.store(path.stem, _content(path))
                except ArchiveObjectError as error:
                    summary.problems.append(f"report {number}: {error.message}")
                else:
                    summary.sent += 1
                    with files.naming(listed):
                        # The line before may have been cut off by a crash.
                        record.write(f"\n{path.stem}\n")
                        record.flush()
                        os.fsync(record.fileno())
            tell(number, len(every))
    return summary


def _content(path: Path) -> bytes:
    if path.stat().st_size > MOST_REPORT:
        raise ArchiveObjectError("a report is larger than any that is written here")
    return path.read_bytes()
