"""What `check` and `status` say of the process that sees images."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from lazaret.checks import CheckVerdict
from site_agent.checks.context import SiteCheckContext
from site_agent.checks.run import isolation
from site_agent.config import SiteConfig
from site_agent.status import isolation_line, overview
from tests.support.check_world import CheckWorld
from tests.support.isolated import ROOT
from tests.support.site_world import SiteWorld


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> SiteWorld:
    made = SiteWorld(tmp_path_factory.mktemp("world"))
    made.start("graz")
    return made


def test_check_tries_it_and_changes_nothing(world: SiteWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SiteConfig.read(world.configs["linz"])
    before = sorted(config.path.parent.rglob("*"))
    with closing(SiteCheckContext(config=config, clock=world.clock)) as context:
        (line,) = isolation(context)
        assert context.data_process.isolation.attempts["private keys"] == "permission denied", "it was tried"
    assert line.verdict is CheckVerdict.OK and "could not open a connection: enforced by" in line.what
    # The planted fault: a network is left open, for several processes.
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with closing(SiteCheckContext(config=config, clock=world.clock)) as context:
        (line,) = isolation(context)
    assert line.verdict is CheckVerdict.WARNING and "was given a network" in line.what
    assert sorted(config.path.parent.rglob("*")) == before


def test_status_shows_the_newest_entry(world: SiteWorld) -> None:
    found = overview(SiteConfig.read(world.configs["graz"]), world.clock)["isolation"]
    assert isolation_line(found).endswith("cannot open a connection: enforced by network namespace, seccomp, Landlock")
    assert "can open a connection" in isolation_line(found | {"connection": True})
    assert "it can read the private keys" in isolation_line(found | {"keys": True})
    assert "train together" in isolation_line(found | {"connection": True, "ranks": True})


# A decoder that tells what it could do, when the first image is opened. Loaded by every Python program that is started.
SPY = """
import json, os, socket, sys
from PIL import Image
opened, seen = Image.open, []

def first(paths):
    failed = None
    for path in paths:
        try:
            return open(path, "rb").close()
        except OSError as error:
            failed = error
    raise failed

def spy(source, *rest):
    told = {"pid": os.getpid()}
    for name, attempt in {
        "tcp": lambda: socket.create_connection(("127.0.0.1", PORT), timeout=5).close(),
        "udp": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", PORT)),
        "keys": lambda: first(KEYS),
        "parent": lambda: first([f"/proc/{os.getppid()}/mem"]),
    }.items():
        try:
            attempt()
            told[name] = "done"
        except OSError as error:
            told[name] = os.strerror(error.errno).lower()
    if not seen:
        seen.append(True)
        sys.stderr.write(f"SPY {json.dumps(told)}" + chr(10))
    return opened(source, *rest)

Image.open = spy
"""
# The twin: a kernel that has none of the walls.
WEAK = """
from site_agent.trainer import kernel

def no(*_):
    raise OSError(38, "function not implemented")

kernel._call = no
"""


@pytest.mark.parametrize("isolated", [True, False], ids=["as shipped", "the twin"])
def test_images_are_checked_where_there_is_neither_network_nor_key(isolated: bool, tmp_path: Path) -> None:
    """`check` itself reads keys and connects; what opens images is another process, which can do neither."""
    hospital = CheckWorld.make(tmp_path / "world").hospital(tmp_path)
    keys = sorted(str(path) for path in (hospital.identity.folder / "keys").rglob("*.key"))
    (tmp_path / "spy").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"PORT, KEYS = {server.getsockname()[1]}, {keys!r}\n{SPY}{'' if isolated else WEAK}"
        (tmp_path / "spy" / "sitecustomize.py").write_text(code)
        skipped = [word for name in ("code", "trial", "coordinator", "clock") for word in ("--skip", name)]
        words = [sys.executable, "-m", "site_agent", "check", "--config", str(hospital.config), "--json", *skipped]
        environment = os.environ | {"PYTHONPATH": f"{tmp_path / 'spy'}:{ROOT}", "OMP_NUM_THREADS": "1"}
        begun = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        stdout, stderr = begun.communicate(timeout=100)
    lines = json.loads(stdout)["checks"]
    assert {line["verdict"] for line in lines if line["check"] in ("data", "images")} == {"ok"}, stderr
    (told,) = [json.loads(line.removeprefix("SPY ")) for line in stderr.splitlines() if line.startswith("SPY ")]
    assert told.pop("pid") != begun.pid
    refused = {"tcp": "operation not permitted", "udp": "operation not permitted", "keys": "permission denied"}
    if isolated:
        assert told == refused | {"parent": "permission denied"}
    else:
        assert {name: told[name] for name in refused} == dict.fromkeys(refused, "done")
