"""Short forms of the storms: fuzzing, bad links and sudden deaths, many sites, many rounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import fuzz

pytestmark = pytest.mark.timeout(600)


def test_two_thousand_false_messages_change_nothing(tmp_path: Path) -> None:
    found = fuzz.run(2000, seed=1, seconds=400, folder=tmp_path).told
    assert found["ok"], found["faults"]
    # Both ends were spoken to in every phase of a round, with messages that are false and with bytes that are none.
    to_coordinator, to_site = found["to_coordinator"], found["to_site"]
    assert {"TrainOrder", "Plan", "Deliver", "ResultCertificate"} <= to_coordinator["by_phase"].keys()
    assert {"TrainOrder", "Plan", "Deliver", "ResultCertificate"} <= to_site["by_phase"].keys()
    assert to_coordinator["http2"]["listed"]["rapid_reset"] > 0 == to_coordinator["http2"]["nobody"]["rapid_reset"]
