"""Reports to the archive: each until it is stored, and not again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lazaret.errors import ArchiveError, ConfigError
from site_agent.archive.access import ArchiveAccess
from site_agent.archive.dicomweb import ArchiveClient
from site_agent.archive.transfer import SENT, send
from tests.support.web_server import Answer, Asked, WebServer


@pytest.fixture
def archive() -> Iterator[tuple[WebServer, dict[str, int]]]:
    """Stores what comes; `refused` has statuses for reports with a certain content."""
    refused: dict[str, int] = {}

    def answer(asked: Asked) -> Answer:
        name = asked.body.split(b"\r\n\r\n")[1].split(b"\r\n")[0].decode()
        if name in refused:
            return Answer(b"Meier^Anna", status=refused[name])
        return Answer(json.dumps({"00081199": {"Value": [{"00081155": {"Value": [name]}}]}}).encode())

    server = WebServer(answer)
    yield server, refused
    server.stop()


def client(server: WebServer) -> ArchiveClient:
    access = ArchiveAccess(host="127.0.0.1", port=server.port, root="", tls=None, authorization="", timeout=5)
    return ArchiveClient(access, sleep=lambda seconds: None)


def reports(folder: Path) -> Path:
    for name in ("1.1", "1.2", "1.3"):
        (folder / f"{name}.dcm").write_text(name)
    (folder / "table.csv").write_text("not a report")
    return folder


def test_each_once(archive: tuple[WebServer, dict[str, int]], tmp_path: Path) -> None:
    server, _ = archive
    reports(tmp_path)
    (tmp_path / SENT).write_text("1.1\n1.")  # a line that a crash has cut off
    first = send(client(server), tmp_path, tell=lambda *_: None)
    second = send(client(server), tmp_path, tell=lambda *_: None)
    assert (first.reports, first.sent, second.sent, len(server.asked)) == (3, 2, 0, 2)


def test_one_that_is_refused_does_not_stop_the_others(
    archive: tuple[WebServer, dict[str, int]], tmp_path: Path
) -> None:
    server, refused = archive
    refused["1.2"] = 409
    summary = send(client(server), reports(tmp_path), tell=lambda *_: None)
    assert summary.sent == 2 and summary.problems == ["report 2: the archive refuses (status 409)"]
    refused.clear()
    assert send(client(server), tmp_path, tell=lambda *_: None).sent == 1


def test_an_archive_that_does_not_let_us_in_ends_it(
    archive: tuple[WebServer, dict[str, int]], tmp_path: Path
) -> None:
    server, refused = archive
    refused["1.1"] = 401
    with pytest.raises(ArchiveError, match="does not let us in"):
        send(client(server), reports(tmp_path), tell=lambda *_: None)
    assert len(server.asked) == 1


def test_a_folder_without_reports(archive: tuple[WebServer, dict[str, int]], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no reports here"):
        send(client(archive[0]), tmp_path, tell=lambda *_: None)
