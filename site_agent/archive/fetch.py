"""From a source to a full cache: search all of it, then retrieve what is missing, then renew the list."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from lazaret.errors import ArchiveError, ArchiveObjectError
from site_agent.archive.cache import ArchiveCache
from site_agent.archive.dicomweb import ACCESSION, INSTANCE, SERIES, STUDY, ArchiveClient, InstanceName, value_of
from site_agent.archive.source import ArchiveSource
from site_agent.archive.table import Wanted, is_uid, wanted

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
    rows = list(wanted(source.labels)) if source.labels is not None else [None]
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


def _named(client: ArchiveClient, row: Wanted) -> Iterator[InstanceName]:
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
