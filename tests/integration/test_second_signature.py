"""ML-DSA-65 is turned on in mid-run: real agents and a real coordinator go on, and auditors see both signatures."""

from __future__ import annotations

from pathlib import Path

import pytest

from security.audit.agreement import keys_for
from security.audit.compare import cross
from security.log.store import LogFolder
from site_agent.outbox import own_head
from tests.support.consortium_world import SITES
from tests.support.whole_federation import whole_federation

pytestmark = pytest.mark.timeout(240)


def test_a_run_goes_on_while_it_is_turned_on(tmp_path: Path) -> None:
    with whole_federation(tmp_path, sites=SITES, rounds=9) as federation:
        federation.start_all()
        federation.run_rounds(1)
        federation.world.turn_on_ml_dsa()
        federation.manifest = federation.world.publish()
        federation.adopt_at_hub()
        federation.run_rounds(2)
        assert not federation.left
        for agent in federation.agents.values():
            assert agent.manifest.version == 2
            # Messages are no longer than before: the second signature stays in the folder.
            assert {len(line.value) for line in own_head(agent.log).signatures} == {64}
            assert 3309 in {len(line.value) for line in agent.log.newest_checkpoint.signatures}
        logs = [federation.folder / "hub-state" / "log", *(agent.state_dir.log for agent in federation.agents.values())]
        federation.stop_all()
        root = federation.world.authority.folder / "root.pem"
        crossed = cross(logs, {path: keys_for(path, root) for path in logs})
        assert crossed.exit_code == 0, [finding for finding in crossed.findings if finding.severity.value != "note"]
        for path in logs:
            folder = LogFolder(path)
            newest = folder.checkpoint_note(folder.checkpoint_sizes()[-1])
            assert 3309 in {len(line.value) for line in newest.signatures}
