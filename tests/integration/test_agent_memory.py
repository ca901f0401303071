"""How much memory an agent takes beside the vector it works on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.federation import NumberFederation

# As many as tf_efficientnet_lite0 has.
WORDS = 3_400_000
LIMIT_MB = 200


@pytest.mark.long
def test_an_agent_stays_below_200_mb_beside_the_vector(tmp_path: Path) -> None:
    """Over several rounds: what one round needed is given back before the next."""
    federation = NumberFederation(tmp_path, sites=3, rounds=4, words=WORDS)
    with federation.running():
        federation.wait_published(4, seconds=600)
        peaks = [peak_mb(site.pid) for site in federation.sites.values()]
    print(f"peaks {peaks} MB with a vector of {4 * WORDS / 2**20:.0f} MB")
    assert max(peaks) < LIMIT_MB + 4 * WORDS / 2**20


def peak_mb(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) // 1024
