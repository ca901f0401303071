"""Two studies on one machine: each has its own folders, port and processes, and neither sees the other."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from scripts.local_federation.federation import wait_until
from security.audit.agreement import keys_for
from security.audit.compare import cross
from tests.support.federation import WAIT, NumberFederation

pytestmark = pytest.mark.timeout(300)


def test_two_studies_run_side_by_side(tmp_path: Path) -> None:
    studies = [NumberFederation(tmp_path / name, sites=3, rounds=1, words=1000) for name in ("one", "two")]
    ports = {study.folders.port for study in studies}
    assert len(ports) == 2
    with ExitStack() as all_of_them:
        for study in studies:
            all_of_them.enter_context(study.running())
        for study in studies:
            study.wait_published(1, seconds=2 * WAIT)
            study.wait_checked(1, seconds=2 * WAIT)
        for study in studies:  # on a busy machine witnesses answer late, and this run is over after one round
            notes = [log / "cosigned.note" for log in study.folders.logs]
            wait_until(lambda notes=notes: all(note.exists() for note in notes), "witnesses", seconds=2 * WAIT)
    for study in studies:
        assert len(study.check_sums()) == 1
        keys = {path: keys_for(path, study.folders.consortium / "root.pem") for path in study.folders.logs}
        crossed = cross(study.folders.logs, keys)
        assert [finding for finding in crossed.findings if finding.severity.value != "note"] == []
