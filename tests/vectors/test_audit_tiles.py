"""A log published as C2SP tlog-tiles, and a reader of that layout that imports nothing of ours."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from reference.audit_formats import Invalid
from reference.audit_tiles import PublishedLog, name_of

from lazaret.errors import CannotDecide, VerificationFailed
from security.audit import export as tiles
from security.audit.cli import main
from security.audit.export import publish, tile_name
from security.log.machine import Heartbeat
from tests.support.audit_attacks import Lonely, Tampering, copied
from tests.support.audit_logs import Federation


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """The coordinator's log has more than a tile of entries."""
    made = Federation.make(tmp_path_factory.mktemp("tiles"), dp_sites=())
    made.play(5)
    while made.hub.log.size < 600:
        made.hub.log.append(Heartbeat(size=made.hub.log.size))
    made.exchange()
    made.stop()
    return made


@pytest.mark.parametrize(("number", "name"), [(0, "000"), (67, "067"), (999, "999"), (1000, "x001/000")])
def test_names_of_tiles(number: int, name: str) -> None:
    assert name_of(number) == name and tile_name(0, number, 256) == f"tile/0/{name}"
    assert tile_name("entries", number, 7) == f"tile/entries/{name}.p/7"
    assert tile_name(3, 1_234_067, 256) == f"tile/3/{name_of(1_234_067)}" == "tile/3/x001/x234/067"


def test_a_published_log_is_read_by_somebody_else(federation: Federation, tmp_path: Path) -> None:
    log = federation.hub.folder
    words = ["export", str(log), "--format", "tiles", "-o", str(tmp_path / "site")]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    found = PublishedLog(tmp_path / "site")
    found.check()
    assert found.size > 512 and list(found.entries()) == Tampering(log).lines[: found.size]
    assert (tmp_path / "site" / "checkpoint").read_bytes() == (log / "cosigned.note").read_bytes()
    assert {path.name for path in (tmp_path / "site" / "tile").iterdir()} == {"0", "1", "entries"}


def _tampered(folder: Path, file: str) -> PublishedLog:
    path = next(one for one in sorted((folder / "tile").rglob("*")) if one.is_file() and file in str(one))
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    return PublishedLog(folder)


@pytest.mark.parametrize("file", ["tile/0/000", "tile/0/002", "tile/1/", "entries/001"])
def test_a_changed_tile_is_found(file: str, federation: Federation, tmp_path: Path) -> None:
    publish(federation.hub.folder, tmp_path / "site")
    with pytest.raises(Invalid):
        _tampered(tmp_path / "site", file).check()
    with pytest.raises(VerificationFailed, match="tile"):
        publish(federation.hub.folder, tmp_path / "site")


def test_a_second_publication_adds_what_is_new(tmp_path: Path) -> None:
    made = Federation.make(tmp_path / "logs", dp_sites=())
    made.play(1)
    first = publish(made.hub.folder, tmp_path / "site")
    for _ in range(300):
        made.hub.log.append(Heartbeat(size=made.hub.log.size))
    made.exchange()
    second = publish(made.hub.folder, tmp_path / "site")
    again = publish(made.hub.folder, tmp_path / "site")
    assert first.size < 256 < second.size == again.size and second.added > 0 == again.added
    PublishedLog(tmp_path / "site").check()


def test_another_history_is_refused(federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was published cannot be replaced by a rewritten log, or by another party's."""
    publish(federation.hub.folder, tmp_path / "site")
    with pytest.raises(VerificationFailed, match="another log"):
        publish(federation.members["graz"].folder, tmp_path / "site")
    text = (tmp_path / "site" / "checkpoint").read_text()
    other = text.replace(text.split("\n")[2], "A" * 43 + "=")
    (tmp_path / "site" / "checkpoint").write_text(other)
    with pytest.raises(VerificationFailed, match="another history"):
        publish(federation.hub.folder, tmp_path / "site")
    monkeypatch.setattr(tiles, "_refuse_other_history", lambda *_: None)
    publish(federation.hub.folder, tmp_path / "site")
    assert (tmp_path / "site" / "checkpoint").read_text() == text, "twin: the published checkpoint is replaced"


def test_a_changed_log_is_not_published(federation: Federation, tmp_path: Path) -> None:
    path = copied(federation.hub.folder, tmp_path / "hub")
    Tampering(path).edit(9, lambda entry: entry.update(actor="somebody else"))
    with pytest.raises(VerificationFailed, match="lead to"):
        publish(path, tmp_path / "site")
    assert not (tmp_path / "site").exists()


def test_nothing_is_published_without_witnesses(tmp_path: Path) -> None:
    lonely = Lonely(tmp_path)
    lonely.log.checkpoint()
    shutil.rmtree(lonely.folder / "witness", ignore_errors=True)
    with pytest.raises(CannotDecide, match="quorum"):
        publish(lonely.folder, tmp_path / "site")


def test_the_tree_alone(federation: Federation, tmp_path: Path) -> None:
    words = ["export", str(federation.hub.folder), "--format", "tiles", "--no-entries", "-o", str(tmp_path / "site")]
    assert CliRunner().invoke(main, words).exit_code == 0
    found = PublishedLog(tmp_path / "site")
    assert len(found.hashes(0)) == found.size and not (tmp_path / "site" / "tile" / "entries").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["--format", "tiles"],
        ["--no-entries"],
        ["--format", "tiles", "-o", "{log}/tiles"],
        ["--format", "tiles", "-o", "{log}/FORMAT"],
        ["-o", "{log}"],
    ],
)
def test_options_that_do_not_fit_are_refused(words: list[str], federation: Federation) -> None:
    log = federation.hub.folder
    done = CliRunner().invoke(main, ["export", str(log), *(word.format(log=log) for word in words)])
    assert done.exit_code == 2 and not (log / "tiles").exists()
