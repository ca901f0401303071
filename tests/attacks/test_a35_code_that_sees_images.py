"""A35: code in the process that sees images, here a malicious method in a running trainer, wants to send them out.

What stops it is `isolation.enter`, with `kernel.enter_seccomp` for every socket; in the twin the trainer leaves it out,
and the same method sends everything.
"""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import pytest

from lazaret.errors import ConfigError
from site_agent.assembly import LearnerFactory
from site_agent.supervisor import Supervisor
from site_agent.trainer_start import start_trainer
from tests.integration.test_nothing_personal_is_said import LearningWorld
from tests.support.isolated import SENT, listening

ROOT = Path(__file__).parents[2]
NAMES = ["tcp", "udp", "name", "local", "local_by_pair", "abstract", "key"]
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def tmp_path(on_disk: Path) -> Path:
    return Path(mkdtemp(dir=on_disk))


class AttackedWorld(LearningWorld):
    """Its first site has a malicious trainer; the others make do without one."""

    def make_learner(self, site: str) -> LearnerFactory:
        return partial(start_trainer, module="tests.support.malicious_trainer")


def attack(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    isolated: bool,
    mode: str = "best",
) -> tuple[dict[str, object], list[bytes]]:
    """One round by the attacker; what its attempts gave, and what arrived."""
    world = AttackedWorld(folder / "world")
    (folder / "sockets").mkdir()
    path = world.configs["graz"]
    path.write_text(path.read_text().replace("[site]\n", f'[site]\nisolation = "{mode}"\n', 1))
    with listening(folder / "sockets") as listeners:
        keys = sorted((world.base.identity("graz").folder / "keys").rglob("*.key"))
        listeners.to["key"] = str(keys[0])
        task = {"names": NAMES, "to": listeners.to, "isolated": isolated}
        monkeypatch.setenv("LAZARET_TEST_ATTEMPTS", json.dumps(task))
        monkeypatch.setenv("PYTHONPATH", str(ROOT))  # a trainer finds nothing in the folder it was started in
        with caplog.at_level(logging.INFO, logger="site-agent"):
            agent = world.start("graz")
            assert isinstance(agent.learner, Supervisor)
            try:
                result = agent.learner.train(1, agent.session.machine.intake.model)
            finally:
                agent.learner.close()
        assert result.steps > 0, "the round itself is trained"
        found = json.loads((agent.state_dir.folder / "scratch" / "attempts.json").read_text())
        return found, list(listeners.received)


def test_nothing_gets_out_of_an_isolated_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found, received = attack(tmp_path, monkeypatch, caplog, isolated=True, mode="required")
    for told in (found["own"], found["child"]):
        assert isinstance(told, dict), told
        assert told.pop("key") == "permission denied"
        assert told == dict.fromkeys(told, "operation not permitted")
    assert found["prototypes"] == "operation not permitted" and found["resolved"] != "done"
    assert received == []
    assert "could not open a connection: enforced by network namespace, seccomp, Landlock" in caplog.text
    assert "tried to reach a network (socket.__new__)" in caplog.text, "people are told of the attempt"


def test_without_isolation_the_same_method_sends_everything_twin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The twin."""
    found, received = attack(tmp_path, monkeypatch, caplog, isolated=False)
    for told in (found["own"], found["child"]):
        assert told == dict.fromkeys(NAMES, "done")
    assert found["prototypes"] == "done" and received.count(SENT) == 10
    assert any(len(content) > 100 for content in received), "the prototypes"
    assert "was able to open a connection" in caplog.text


def test_where_isolation_is_required_such_a_trainer_is_not_given_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="isolation is required"):
        attack(tmp_path, monkeypatch, caplog, isolated=False, mode="required")
