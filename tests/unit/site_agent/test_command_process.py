"""What the parent does with what the isolated process wrote."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp

import pytest

from lazaret.errors import ConfigError
from site_agent.command_process import Folders
from site_agent.options import OWN_PROCESS, own_process
from site_agent.trainer import kernel
from tests.support.isolated import ROOT


@pytest.fixture
def tmp_path(on_disk: Path) -> Path:
    return Path(mkdtemp(dir=on_disk))


def test_a_finished_file_is_moved_and_replaces_nothing(tmp_path: Path) -> None:
    target = tmp_path / "out.csv"
    folders = Folders.make([target])
    staged = folders.staged[target]
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders.writable] == [0o700, 0o700]
    assert folders.writable == [folders.scratch, staged.parent]
    folders.publish()
    assert not target.exists()  # nothing was written
    staged.write_text("table")
    folders.publish()
    assert target.read_text() == "table"
    with pytest.raises(ConfigError, match="refusing to overwrite"):
        folders.publish()
    folders.remove()
    assert list(tmp_path.iterdir()) == [target] and not folders.scratch.exists()


def test_a_finished_folder_is_moved_and_replaces_nothing(tmp_path: Path) -> None:
    target = tmp_path / "new" / "model"
    first, second = Folders.make([target]), Folders.make([target])
    for folders in (first, second):
        folders.staged[target].mkdir()
        (folders.staged[target] / "model.json").write_text("{}")
    first.publish()
    with pytest.raises(ConfigError, match="refusing to overwrite"):
        second.publish()
    first.remove()
    second.remove()
    assert [path.name for path in target.iterdir()] == ["model.json"] and os.listdir(tmp_path) == ["new"]


def test_what_exists_already_is_not_staged(tmp_path: Path) -> None:
    folders = Folders.make([tmp_path])
    assert folders.writable == [folders.scratch] and folders.staged == {tmp_path: tmp_path}
    folders.publish()
    folders.remove()
    assert tmp_path.exists()


def test_a_table_and_a_folder_of_reports_are_moved_together(tmp_path: Path) -> None:
    table, reports = tmp_path / "out.csv", tmp_path / "reports"
    folders = Folders.make([table, reports])
    folders.staged[table].write_text("table")
    folders.staged[reports].mkdir(mode=0o700)
    folders.publish()
    folders.remove()
    assert sorted(os.listdir(tmp_path)) == ["out.csv", "reports"]


SITE = '[site]\ninitial_model = "m"\n[coordinator]\naddress = "hub:1"\n[data]\nsource = "generated"\n'
# Tries the files of the federation, its own folder and the network, behind the walls or without them.
ATTEMPTS = """
import json, os, socket, sys
from pathlib import Path
from site_agent.command_process import isolate_from_federation
from site_agent.config import SiteConfig
from site_agent.options import own_process

site, port, walls = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "walls"
if walls:
    with own_process():
        isolate_from_federation(SiteConfig.read(site / "site.toml"), read=[site / "token"], write=[site / "archive"])
def environment():
    # As the kernel shows it; behind the walls `/proc` stays open.
    with open("/proc/self/environ", "rb") as file:
        return file.read()

def missing():
    raise OSError

STARTED_WITH = environment()
told = {}
for name, attempt in {
    "key": lambda: (site / "identity/keys/sign.key").read_bytes(),
    "state": lambda: (site / "state/memory/head").read_bytes(),
    "ledger": lambda: (site / "ledger/patients.jsonl").read_bytes(),
    "configuration": lambda: (site / "site.toml").read_bytes(),
    "write beside": lambda: (site / "planted").write_bytes(b"x"),
    "token": lambda: (site / "token").read_bytes(),
    "pin": lambda: ("LAZARET_TOKEN_PIN" in os.environ or b"a-pin" in STARTED_WITH) or missing(),
    "own folder": lambda: (site / "archive/file").write_bytes(b"x"),
    "network": lambda: socket.create_connection(("127.0.0.1", port), timeout=5).close(),
}.items():
    try:
        attempt()
        told[name] = True
    except OSError:
        told[name] = False
print(json.dumps(told))
"""


@pytest.mark.parametrize("walls", ["walls", "none"])
def test_the_process_with_a_network_has_nothing_of_the_federation(walls: str, tmp_path: Path) -> None:
    """And its twin: the same attempts without the walls all succeed."""
    try:
        kernel.landlock_version()
    except OSError as error:
        pytest.skip(f"this kernel has no Landlock: {error}")
    (tmp_path / "site.toml").write_text(SITE)
    for name in ("identity/keys/sign.key", "state/memory/head", "ledger/patients.jsonl", "token", "archive/old"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("content")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-c", ATTEMPTS, str(tmp_path), str(listener.getsockname()[1]), walls]
        own = os.environ | {"LAZARET_TOKEN_PIN": "a-pin"}
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=True, env=own)
    told = json.loads(done.stdout)
    assert {name for name, could in told.items() if could} == (
        {"token", "own folder", "network"} if walls == "walls" else set(told)
    )


def test_a_program_that_calls_a_command_is_not_isolated() -> None:
    assert OWN_PROCESS.get() is False
    with own_process():
        assert OWN_PROCESS.get() is True
    assert OWN_PROCESS.get() is False
