"""What a trainer's process is started with, and what ends with it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from site_agent.trainer_process import ChildTrainer, _environment
from tests.support.isolated import ROOT
from tests.support.processes import running


def test_addresses_and_passwords_of_proxies_stay_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("https_proxy", "HTTP_PROXY", "all_proxy", "GRPC_PROXY"):
        monkeypatch.setenv(name, "http://user:s3cr3t@proxy.example:3128")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = _environment()
    assert "s3cr3t" not in str(found) and found["OMP_NUM_THREADS"] == "1"


# A trainer with a child that wants to stay: it leaves the group of its parent if it can.
MODULE = """
import os, sys, time
from pathlib import Path
way, told = os.environ["WAY"], Path(os.environ["TOLD"])
if os.environ["WALLS"]:
    from site_agent.trainer import isolation
    isolation.enter("best", write=[told.parent], mechanisms=[os.environ["WALLS"]])
if os.fork() == 0:
    try:
        {"setsid": os.setsid, "setpgid": lambda: os.setpgid(0, 0), "": lambda: None}[way]()
    except PermissionError:
        pass
    told.with_suffix(".new").write_text(str(os.getpid()))
    told.with_suffix(".new").rename(told)
time.sleep(60)
"""


def patiently(condition: Any) -> bool:
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())


@pytest.mark.parametrize(
    ("way", "walls", "gone"),
    [("", "", True), ("setsid", "seccomp", True), ("setpgid", "seccomp", True), ("setsid", "", False)],
    ids=["a child", "a child that wants a session", "a child that wants a group", "the twin"],
)
def test_what_a_trainer_has_started_ends_with_it(
    way: str, walls: str, gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaver.py").write_text(MODULE)
    told = tmp_path / "told"
    for name, value in (("WAY", way), ("WALLS", walls), ("TOLD", str(told))):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    config: Any = SimpleNamespace(path=tmp_path / "site.toml", state=tmp_path, identity=tmp_path / "identity")
    trainer = ChildTrainer(config, module="leaver")
    with trainer.connection:
        try:
            assert patiently(told.exists)
        finally:
            os.kill(trainer.pid, signal.SIGKILL)
            how = trainer.end()
    child = int(told.read_text())
    try:
        assert how == trainer.end() == "it was killed by SIGKILL (out of memory?)"
        assert patiently(lambda: not running(child)) if gone else running(child)
    finally:
        if running(child):
            os.kill(child, signal.SIGKILL)


def test_a_trainer_that_does_not_end_is_made_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its signals are blocked from the first moment on.
    (tmp_path / "deaf.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("site_agent.trainer_process.STOP_SECONDS", 0.2)
    config: Any = SimpleNamespace(path=tmp_path / "site.toml", state=tmp_path, identity=tmp_path / "identity")
    trainer = ChildTrainer(config, module="deaf")
    with trainer.connection:
        trainer.stop()
        assert trainer.end().startswith("it was killed by SIGKILL") and not trainer.asked
        trainer.stop()  # a number that is nobody's any more


TELLER = '''
import sys
from pathlib import Path
Path(__file__).with_suffix(".told").write_text(" ".join(sys.argv[1:]))
'''


def test_a_trainer_is_told_where_a_pin_is_and_not_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent looks into the key files; the trainer never does."""
    (tmp_path / "teller.py").write_text(TELLER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    keys = tmp_path / "identity" / "keys"
    keys.mkdir(parents=True)
    pin = tmp_path / "pin"
    pin.write_text("2468")
    for named, name in ((pin, "signing.key"), (tmp_path / "gone", "tls.key")):
        (keys / name).write_text(f"pkcs11:token=t;object=o?module-path=/lib/x.so&pin-source=file:{named}\n")
    config: Any = SimpleNamespace(path=tmp_path / "site.toml", state=tmp_path, identity=tmp_path / "identity")
    trainer = ChildTrainer(config, module="teller")
    with trainer.connection:
        trainer.end()
    told = (tmp_path / "teller.told").read_text()
    assert f"--closed {pin} " in told and told.count("--closed") == 1


@pytest.mark.parametrize("named", [False, True], ids=["only there", "on the path, the twin"])
def test_a_trainer_imports_nothing_from_the_folder_it_is_started_in(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file is one digest: a plugin that imports `plugins.helper` would run what nobody has approved."""
    (tmp_path / "teller.py").write_text(TELLER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}" if named else str(ROOT))
    config: Any = SimpleNamespace(path=tmp_path / "site.toml", state=tmp_path, identity=tmp_path / "identity")
    trainer = ChildTrainer(config, module="teller")
    with trainer.connection:
        trainer.end()
    assert (tmp_path / "teller.told").exists() is named
