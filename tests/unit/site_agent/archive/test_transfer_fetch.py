"""From rows to files: nothing that no row names, nothing twice, and no new list while something is missing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from lazaret.errors import ArchiveError
from npr.data.columns import LISTING
from site_agent.archive.access import ArchiveAccess
from site_agent.archive.cache import open_cache, prepare
from site_agent.archive.dicomweb import ACCESSION, INSTANCE, MODALITY, SERIES, STUDY, ArchiveClient
from site_agent.archive.source import ArchiveSource
from site_agent.archive.transfer import FetchSummary, fetch, search
from tests.support.web_server import Answer, Asked, WebServer

IMAGE = b"\0" * 128 + b"DICM" + b"pixels"
# study, series, instance, accession number, modality
HELD = [
    ("1.1", "1.1.1", "1.1.1.1", "A1", "CT"),
    ("1.1", "1.1.1", "1.1.1.2", "A1", "CT"),
    ("1.1", "1.1.2", "1.1.2.1", "A1", "SR"),
    ("1.2", "1.2.1", "1.2.1.1", "A2", "CT"),
    ("1.2", "1.2.2", "1.2.2.1", "A2", "MR"),
    ("1.3", "1.3.1", "1.3.1.1", "A3", "CT"),
]
TAGS = (STUDY, SERIES, INSTANCE, ACCESSION, MODALITY)


class Archive:
    """Holds what is listed above; `deaf` to the values of a search, as some archives are to keys they do not know."""

    def __init__(self) -> None:
        self.deaf = False
        self.broken: set[str] = set()
        self.server = WebServer(self.answer)

    def answer(self, asked: Asked) -> Answer:
        parts = urlsplit(asked.path)
        words, query = parts.path.strip("/").split("/"), {k: v[0] for k, v in parse_qs(parts.query).items()}
        if words[-2:-1] == ["instances"]:
            if words[-1] in self.broken:
                return Answer(b"Meier^Anna", status=404)
            kind = 'multipart/related; type="application/dicom"; boundary=e'
            return Answer(b"--e\r\n\r\n" + IMAGE + b"\r\n--e--", kind=kind)
        rows = [row for row in HELD if all(row[n] == word for n, word in enumerate(words[1::2]) if n < 2)]
        if not self.deaf:
            keys = {"StudyInstanceUID": 0, "SeriesInstanceUID": 1, "SOPInstanceUID": 2, "AccessionNumber": 3}
            rows = [row for row in rows if all(row[keys[k]] == v for k, v in query.items() if k in keys)]
        rows = rows[int(query["offset"]) :]
        return Answer(
            json.dumps([{t: {"Value": [v]} for t, v in zip(TAGS, row, strict=True)} for row in rows]).encode()
        )


@pytest.fixture
def archive() -> Iterator[Archive]:
    made = Archive()
    yield made
    made.server.stop()


def run(archive: Archive, folder: Path, table: str = "", query: str = "labels=t.csv") -> FetchSummary:
    (folder / "t.csv").write_text(table)
    source = ArchiveSource.parse(f"dicomweb:http://127.0.0.1:{archive.server.port}/?{query}", folder)
    access = ArchiveAccess(host="127.0.0.1", port=archive.server.port, root="", tls=None, authorization="", timeout=5)
    client = ArchiveClient(access, sleep=lambda seconds: None)
    with open_cache(prepare(folder / "cache"), 10_000) as cache:
        return fetch(client, search(client, source, tell=lambda *_: None), cache, tell=lambda *_: None)


def files(folder: Path) -> list[str]:
    return [Path(name).stem for name in (folder / "cache" / LISTING).read_text().split()]


@pytest.mark.parametrize("deaf", [False, True])
@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("StudyInstanceUID,label\n1.1,a\n", ["1.1.1.1", "1.1.1.2"]),
        ("AccessionNumber,label\nA2,a\n", ["1.2.1.1", "1.2.2.1"]),
        ("SeriesInstanceUID,label\n1.2.2,a\n", ["1.2.2.1"]),
        ("SOPInstanceUID,label\n1.1.1.2,a\n1.3.1.1,b\n", ["1.1.1.2", "1.3.1.1"]),
    ],
)
def test_what_a_row_names_and_nothing_else(
    archive: Archive, tmp_path: Path, table: str, expected: list[str], deaf: bool
) -> None:
    archive.deaf = deaf
    summary = run(archive, tmp_path, table)
    assert files(tmp_path) == expected and not summary.problems
    assert sorted(path.stem for path in (tmp_path / "cache").rglob("*.dcm")) == expected


def test_reports_and_other_modalities_are_left_out(archive: Archive, tmp_path: Path) -> None:
    summary = run(archive, tmp_path, "StudyInstanceUID,label\n1.1,a\n1.2,b\n", "labels=t.csv&modality=CT")
    assert files(tmp_path) == ["1.1.1.1", "1.1.1.2", "1.2.1.1"] and summary.skipped == 2


def test_a_search_without_a_table(archive: Archive, tmp_path: Path) -> None:
    summary = run(archive, tmp_path, query="AccessionNumber=A3")
    assert files(tmp_path) == ["1.3.1.1"] and (summary.studies, summary.files, summary.fetched) == (1, 1, 1)


def test_a_second_fetch_asks_for_nothing_that_is_here(archive: Archive, tmp_path: Path) -> None:
    run(archive, tmp_path, "StudyInstanceUID,label\n1.1,a\n")
    before = len([asked for asked in archive.server.asked if "/instances/" in asked.path])
    summary = run(archive, tmp_path, "StudyInstanceUID,label\n1.1,a\n1.3,a\n")
    after = len([asked for asked in archive.server.asked if "/instances/" in asked.path])
    assert (summary.files, summary.fetched, after - before) == (3, 1, 1)


def test_what_is_missing_is_named_by_row_and_the_list_stays(archive: Archive, tmp_path: Path) -> None:
    run(archive, tmp_path, "StudyInstanceUID,label\n1.3,a\n")
    archive.broken = {"1.1.1.2"}
    summary = run(archive, tmp_path, "StudyInstanceUID,label\n1.1,a\n7.7,a\n1.2,a\n")
    assert files(tmp_path) == ["1.3.1.1"]
    assert [problem.partition(":")[0] for problem in summary.problems] == ["t.csv row 3", "t.csv row 2"]
    assert not [problem for problem in summary.problems if "Meier" in problem or "1.1" in problem]
    assert (tmp_path / "cache" / "1.2" / "1.2.2.1.dcm").exists()  # the rest came all the same
    archive.broken = set()
    assert run(archive, tmp_path, "StudyInstanceUID,label\n1.1,a\n1.2,a\n").fetched == 1
    assert len(files(tmp_path)) == 4 and not (tmp_path / "cache" / "1.3").exists()


def test_an_archive_that_is_gone_ends_the_command_and_keeps_the_files(archive: Archive, tmp_path: Path) -> None:
    run(archive, tmp_path, "StudyInstanceUID,label\n1.3,a\n")
    archive.server.stop()
    with pytest.raises(ArchiveError, match="does not answer"):
        run(archive, tmp_path, "StudyInstanceUID,label\n1.1,a\n")
    assert files(tmp_path) == ["1.3.1.1"]
