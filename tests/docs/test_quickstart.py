"""The quickstart's own commands, in order and as they stand, from an empty directory to the first federated round."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"
PORT = "7443"
# `timeout` ends the whole group of processes, agents in the background as well.
BOUNDED = ("timeout", "540", "bash", "-c")


def commands() -> list[str]:
    """Every line behind a prompt."""
    blocks = re.findall(r"^```console\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def script(port: str) -> str:
    """Stops at the first command that fails. Only the port differs from the page: 7443 may be taken."""
    lines = ["set -euo pipefail", "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT", *commands()]
    return "\n".join(lines).replace(PORT, port)


@pytest.mark.timeout(600)
def test_a_stranger_gets_to_the_first_round(tmp_path: Path) -> None:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    ran = subprocess.run(
        [*BOUNDED, script(free_port())], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    told = ran.stdout + ran.stderr
    assert ran.returncode == 0, told
    assert "problem" not in ran.stdout
    assert "round    1  published" in ran.stdout
    assert "site graz, run run-1: round 1 accepted" in ran.stdout
    assert "verdict: clean" in ran.stdout
    assert (tmp_path / "global.safetensors").stat().st_size > 0


def test_the_page_walks_through_every_party() -> None:
    listed = " ".join(commands())
    for name in ("npr-lab model", "consortium publish", "coordinator join", "site-agent check", "privacy-audit cross"):
        assert name in listed
