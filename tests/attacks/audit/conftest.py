from __future__ import annotations

from pathlib import Path

import pytest

from security.log import events as ev
from tests.support.audit_attacks import Lonely
from tests.support.audit_logs import Federation, small_federation


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """Two clean rounds of three sites; tests copy the folders before they touch them."""
    return small_federation(tmp_path_factory.mktemp("federation"))


@pytest.fixture
def lonely(tmp_path: Path) -> Lonely:
    """One log with some entries under three heads."""
    alone = Lonely(tmp_path)
    for _ in range(3):
        for _ in range(3):
            alone.clock.advance(50)
            alone.log.append(ev.OperatorAction(command="status", role="operator"))
        alone.log.checkpoint()
    return alone
