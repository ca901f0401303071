"""One hospital's clock is hours ahead for a while: what the others' logs show of it is nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from security.audit.agreement import keys_for
from security.audit.verify import verify
from security.clock import ManualClock
from security.log import writer
from tests.support.whole_federation import WholeFederation, whole_federation

pytestmark = pytest.mark.timeout(240)
WRONG = "wels"


@dataclass
class ShiftedClock:
    right: ManualClock
    ahead_ms: int = 0

    def now_ms(self) -> int:
        return self.right.now_ms() + self.ahead_ms

    def mono_ms(self) -> int:
        return self.right.mono_ms()


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[WholeFederation]:
    with whole_federation(tmp_path) as made:
        yield made


def contradictions(federation: WholeFederation) -> int:
    """Findings about times in the logs of everybody else, after the wrong clock is set right."""
    clock = federation.clocks[WRONG] = ShiftedClock(federation.clock)
    federation.start_all()
    federation.run_rounds(1)
    clock.ahead_ms = 7_200_000
    federation.run_rounds(1)
    clock.ahead_ms = 0
    federation.run_rounds(1)
    others = [agent.state_dir.log for site, agent in federation.agents.items() if site != WRONG]
    logs = [federation.folder / "hub-state" / "log", *others]
    federation.stop_all()
    root = federation.world.authority.folder / "root.pem"
    found = [finding for path in logs for finding in verify(path, keys_for(path, root)).findings]
    return sum(finding.code in ("Backdated", "ClockRollback", "WitnessClock") for finding in found)


def test_a_clock_that_is_ahead_leaves_nothing_in_the_logs_of_others(federation: WholeFederation) -> None:
    assert contradictions(federation) == 0


def test_a_clock_that_is_ahead_leaves_nothing_twin(
    federation: WholeFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the checks its signatures are kept, and an auditor of the other logs finds times that do not fit."""
    monkeypatch.setattr(writer, "SKEW_MS", 10**12)  # the log's own look at a witness's time
    assert contradictions(federation) > 0
