"""Half a year of a federation in short weeks; `scripts/six-months` is the whole of it, with ten hospitals.

The year of `docs/study.md`, with a renewal, a hospital that leaves and a lost disk, is in every suite.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.local_federation.six_months import HalfYear


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_round_completes_and_every_log_audits_clean(tmp_path: Path) -> None:
    half = HalfYear(tmp_path, sites=5, rounds=24, weeks=8, week_days=1)
    half.live()
    seen = half.report()
    assert seen["rounds_completed"] == 24 and len(seen["events"]) == 6
    assert seen["rounds_not_completed"] == {}
    assert seen["clean_logs"] == len(seen["logs"]) == 7, seen["logs"]
    assert seen["clean"], seen["between_the_logs"]
