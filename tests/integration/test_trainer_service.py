"""A trainer that is a service of its own: it connects to the agent's socket file, and its successor does too."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp

import pytest

from lazaret.errors import ConfigError
from site_agent.supervisor import Supervisor
from site_agent.trainer_process import TrainerSocket
from site_agent.trainer_start import start_trainer
from tests.integration.test_nothing_personal_is_said import LearningWorld

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def tmp_path(on_disk: Path) -> Path:
    return Path(mkdtemp(dir=on_disk))


class ServiceWorld(LearningWorld):
    def make_learner(self, site: str):  # type: ignore[no-untyped-def]  # a factory, see site_agent/assembly.py
        return start_trainer


def service(config: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "site_agent.trainer", "--config", str(config), "--required"]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})


def test_two_services_and_one_channel(tmp_path: Path) -> None:
    world = ServiceWorld(tmp_path / "world")
    config = world.configs["graz"]
    config.write_text(config.read_text().replace("[site]\n", '[site]\ntrainer_socket = "trainer.sock"\n', 1))
    first = service(config)
    agent = world.start("graz")
    path = config.parent / "trainer.sock"
    assert isinstance(agent.learner, Supervisor) and stat.S_IMODE(path.stat().st_mode) == 0o600
    state = agent.session.machine.intake.model
    once = agent.learner.train(1, state)
    first.send_signal(signal.SIGTERM)
    assert first.wait(15) == 0
    second = service(config)
    again = agent.learner.train(1, state)
    assert again.update.tobytes() == once.update.tobytes(), "the next one continues where the first began"
    agent.learner.close()
    assert second.wait(15) == 0, "it ends with its agent"


def test_a_socket_file_of_an_agent_that_was_killed_is_replaced(tmp_path: Path) -> None:
    TrainerSocket(tmp_path / "s")
    waiting = TrainerSocket(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as trainer:
        trainer.connect(str(tmp_path / "s"))
        assert waiting.accept().connection.fileno() > 0
    with pytest.raises(ConfigError, match="trainer_socket"):
        TrainerSocket(tmp_path / "nowhere" / "s")


def test_a_process_of_another_user_is_turned_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = TrainerSocket(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as trainer:
        trainer.connect(str(tmp_path / "s"))
        monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
        with pytest.raises(PermissionError):
            waiting.accept()
