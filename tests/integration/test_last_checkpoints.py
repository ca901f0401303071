"""What a log says last is witnessed too: after the check of a round's sum, and before a party stops."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from security.audit.agreement import keys_for
from security.audit.verify import Verified, verify
from security.log.events import OperatorAction
from security.log.reader import LogReader
from site_agent.witness import Witnessing
from tests.support.whole_federation import WholeFederation, whole_federation


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[WholeFederation]:
    with whole_federation(tmp_path) as made:
        yield made


def verified(federation: WholeFederation) -> list[Verified]:
    """What an auditor sees when all parties are killed: a stop in order would have the last checkpoints witnessed."""
    folders = [agent.log.folder for agent in federation.agents.values()]
    for site in list(federation.agents):
        federation.kill(site)
    federation.kill_hub()
    root = federation.world.authority.folder / "root.pem"
    return [verify(folder, keys_for(folder, root)) for folder in folders]


def checks_covered(federation: WholeFederation) -> list[bool]:
    """Of each site: whether witnesses cover the entry in which it acknowledged the round's result."""
    federation.start_all()
    federation.run_rounds(1)
    for _ in range(4):
        federation.step()
    return [
        log.covered > max(record.seq for record in LogReader(log.folder).records("egress") if _is_check(record.body))
        for log in verified(federation)
    ]


def _is_check(body: dict[str, object]) -> bool:
    return body["message"] == "Ack"


def test_a_round_is_covered_with_its_check(federation: WholeFederation) -> None:
    assert all(checks_covered(federation))


def test_a_round_is_covered_with_its_check_twin(federation: WholeFederation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint from before the call, as it happens to be there."""
    monkeypatch.setattr(
        Witnessing,
        "_offer",
        lambda self, call: self._grown(self._log.newest_checkpoint, call.witness, call.held_size),
    )
    assert not all(checks_covered(federation))


@pytest.mark.parametrize("offered", [True, False], ids=["", "twin"])
def test_the_end_of_a_log_is_covered(federation: WholeFederation, offered: bool) -> None:
    federation.start_all()
    federation.run_rounds(1)
    last = [
        agent.log.append(OperatorAction(command="looked at it", role="operator"))
        for agent in federation.agents.values()
    ]
    for site, agent in list(federation.agents.items()) if offered else ():
        federation._take(site, agent.last_head())
    federation.pump()
    assert [log.covered > entry for log, entry in zip(verified(federation), last, strict=True)] == [offered] * len(last)
