"""The bench of secure aggregation runs, and its figures mean what they say. Speed is not judged on a test machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

KEYS = {
    "site_mask_over_floor",
    "coordinator_unmask_over_floor",
    "upload_bytes_over_vector",
    "keys_bytes_per_site",
    "coordinator_peak_over_vector",
    "exact",
    "site_merkle_ms",
    "coordinator_merkle_ms",
    "uniformity_ms",
}


def run(*arguments: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.secagg", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize(("sites", "dropouts"), [(3, 0), (7, 2)])
def test_a_small_bench(sites: int, dropouts: int) -> None:
    figures = run("--sites", str(sites), "--dropouts", str(dropouts), "--params", "150000")
    assert figures.keys() >= KEYS
    assert figures["exact"] is True
    assert figures["masked_p_value"] > 1e-9 > figures["unmasked_p_value"]
    assert 1 < figures["upload_bytes_over_vector"] < 1.01
    # Two ML-KEM keys, and two ciphertexts for each other site.
    assert 2 * 1184 + (sites - 1) * 1088 < figures["keys_bytes_per_site"] < 3000 + sites * 2500
    # Two vectors of the model, one sum, and what Python needs; the uploads are on disk.
    assert figures["coordinator_peak_mib"] < 100


def test_more_dropouts_than_the_quorum_allows_is_no_result() -> None:
    command = [sys.executable, "-m", "benchmarks.secagg", "--sites", "4", "--dropouts", "2", "--params", "5000"]
    done = subprocess.run([*command, "--json"], capture_output=True, timeout=200, check=False)
    assert done.returncode == 1
    assert json.loads(done.stdout)["exact"] is False
