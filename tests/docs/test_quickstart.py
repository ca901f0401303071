"""The quickstart's own commands, in order and as they stand, from an empty directory to the first federated round."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.local_federation.federation import free_port

PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"
PORT = "7443"
SITES = ("graz", "linz", "vienna")
MOST_SECONDS = 600
# The whole page, with what comes after the first round. `timeout` ends agents in the background as well.
BOUNDED = ("timeout", "840", "bash", "-c")


def commands() -> list[str]:
    """Every line behind a prompt."""
    blocks = re.findall(r"^```console\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def script(port: int) -> str:
    """Stops at the first command that fails, and tells on stderr at which second each begins.

    Only the port differs from the page: 7443 may be taken.
    """
    tracing = ["PS4='+ ${SECONDS} s: '", "set -x"]
    lines = ["set -euo pipefail", "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT", *tracing, *commands()]
    return "\n".join(lines).replace(PORT, str(port))


@pytest.mark.timeout(900)
def test_a_stranger_gets_to_the_first_round(tmp_path: Path) -> None:
    """From an empty directory to a checked sum of three, by the page's commands alone, in less than ten minutes."""
    assert not list(tmp_path.iterdir())
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    ran = subprocess.run(
        [*BOUNDED, script(free_port())], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (seconds,) = re.findall(r"^\+ (\d+) s: coordinator status", ran.stderr, re.MULTILINE)
    assert int(seconds) < MOST_SECONDS
    assert not re.search(r"^problem ", ran.stdout, re.MULTILINE)
    assert "round    1  published" in ran.stdout
    # On a slow machine the second round may be over before anybody has asked.
    assert re.search(r"site graz, run run-1: round [12] of 2 accepted", ran.stdout)
    assert "verdict: clean" in ran.stdout
    assert (tmp_path / "global.safetensors").stat().st_size > 0
    assert_three_hospitals_made_the_sum(tmp_path)
    assert_the_export_is_whole(tmp_path / "graz-model")


def assert_three_hospitals_made_the_sum(folder: Path) -> None:
    """Three agents on three configurations: each has accepted the round, and the sum is over all of them."""
    assert "the sum of round 1 is checked" in (folder / "hub" / "output.log").read_text(encoding="utf-8")
    configs = [(folder / site / "site.toml").read_text(encoding="utf-8") for site in SITES]
    assert len(set(configs)) == len(SITES)
    for site in SITES:
        rows = (folder / site / "state" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        assert json.loads(rows[0])["round"] == 1, site
        text = (folder / site / "state" / "log" / "segments" / "00000000.jsonl").read_text(encoding="utf-8")
        entries = [json.loads(line) for line in text.splitlines()]
        counts = [e["body"]["count"] for e in entries if e["type"] == "secagg.survivors" and e["round"] == 1]
        assert counts and counts[-1] == len(SITES), site


def assert_the_export_is_whole(folder: Path) -> None:
    about = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    for name, digest in about["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    assert set(about["files"]) == {"model.safetensors", "model.onnx"}
    assert about["checked"]["onnx"]["relative_difference"] <= 1e-4
    card = (folder / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert "hospitals in those sums | 3 to 3" in card
    assert "has findings on that log" not in card, "it was exported beside an agent that runs, and is not in doubt"


def test_the_page_walks_through_every_party() -> None:
    listed = " ".join(commands())
    words = ("npr-lab model", "consortium publish", "coordinator join", "site-agent check", "site-agent export")
    for name in (*words, "coordinator export", "privacy-audit cross"):
        assert name in listed
