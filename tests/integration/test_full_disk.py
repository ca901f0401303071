"""A coordinator whose disk refuses in mid-run: it ends with one line that says so, having promised nothing that is not
on disk, and goes on where it was once there is room.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from scripts.local_federation.federation import Party
from security.audit.facts import read_history
from tests.support.federation import WAIT, NumberFederation

pytestmark = pytest.mark.timeout(240)
Make = Callable[[], NumberFederation]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> NumberFederation:
    return NumberFederation(tmp_path_factory.mktemp("full"), rounds=40)


@pytest.fixture
def federation(template: NumberFederation, tmp_path: Path) -> NumberFederation:
    folder = tmp_path / "federation"
    shutil.copytree(template.folders.folder, folder)
    return template.at(folder)


def complaint(party: Party) -> str:
    """The one line with which it ended."""
    said = party.text()
    assert "Traceback" not in said, said
    lines = [line for line in said.splitlines() if ": error: " in line]
    assert len(lines) == 1, said
    return lines[0]


def goes_on(federation: NumberFederation) -> None:
    """With room again: the round under way is finished, nobody has said two things, and every sum is exact."""
    before = federation.published
    federation.coordinator.start()
    federation.wait_published(before + 2)
    federation.stop()
    federation.check_sums()
    for home in federation.folders.homes().values():
        assert [about for about, words in federation.said(home).items() if len(words) > 1] == []
    assert all(party.code == 0 for party in federation.parties), [party.text()[-500:] for party in federation.parties]


def last_reason(federation: NumberFederation) -> str:
    """Why the coordinator's privacy log says that it ended."""
    stops = list(read_history(federation.folders.logs[0], origin="", name="", role="").of("agent.stop"))
    return str(stops[-1].body["reason"])


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "record", [pytest.param("UploadCounted", marks=LONG), pytest.param("SurvivorsShown", marks=LONG), "ResultShown"]
)
def test_a_record_that_the_database_refuses(federation: NumberFederation, record: str) -> None:
    healthy, home = federation.coordinator, federation.folders.coordinator
    config = home / "coordinator.toml"
    sick = Party("coordinator", ["tests.support.sick_coordinator", "--config", config], home.parent / "sick.log", home)
    federation.coordinator = sick
    try:
        federation.start()
        federation.wait_published(1)
        (home / "refuse.new").write_text(record)
        (home / "refuse.new").rename(home / "refuse")
        assert sick.wait_dead(seconds=WAIT) == 1
        line = complaint(sick)
        assert "coordinator.sqlite" in line and "database or disk is full" in line
        assert "hint: " in sick.text() and last_reason(federation) == "toolkit"
        rounds = federation.rounds
        assert rounds[-1]["outcome"] is None, "what is not on disk was not published"
        federation.coordinator = healthy
        goes_on(federation)
    finally:
        federation.coordinator = healthy
        sick.stop()
        federation.stop()


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A file system of its own; only root may have one."""
    if os.geteuid() != 0:
        pytest.skip("a small file system can only be mounted by root")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(folder)]
    if subprocess.run(words, capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine does not let a small file system be mounted")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)


@contextmanager
def filled(folder: Path) -> Iterator[None]:
    """No byte is left, as long as this lasts."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    try:
        yield
    finally:
        path.unlink()


@pytest.mark.parametrize("part", ["", pytest.param("spool", marks=LONG), pytest.param("models", marks=LONG), "log"])
def test_a_disk_that_is_full_in_mid_run(federation: NumberFederation, part: str) -> None:
    folder = federation.folders.coordinator / "state" / part
    coordinator = federation.coordinator
    with small_disk(folder, "24m"):
        try:
            federation.start()
            federation.wait_published(1)
            with filled(folder):
                assert coordinator.wait_dead(seconds=WAIT) == 1
                line = complaint(coordinator)
                assert "no space left on device" in line or "database or disk is full" in line
                assert str(folder) in line
                assert "failed before" not in coordinator.text() and "hint: " in coordinator.text()
            goes_on(federation)
        finally:
            federation.stop()
