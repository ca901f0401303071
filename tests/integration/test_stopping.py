"""A coordinator that is told to stop: while it starts, and while masks are being opened by nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coordinator.service import STOP_SECONDS
from tests.support.federation import WAIT, NumberFederation

pytestmark = pytest.mark.timeout(240)
LEFT = "continues at the next start"


def test_a_stop_while_it_starts(tmp_path: Path) -> None:
    """The shipped command, at moments from its first line on: exit 0, and the next start goes on."""
    federation = NumberFederation(tmp_path, sites=3, rounds=2)
    config = federation.folders.coordinator / "coordinator.toml"
    words = [sys.executable, "-c", "from coordinator.cli import main; main()", "--config", str(config)]
    for number, pause in ((signal.SIGTERM, 0.0), (signal.SIGHUP, 0.4), (signal.SIGINT, 1.0)):
        begun = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        assert begun.stderr is not None and "starts with" in begun.stderr.readline()
        time.sleep(pause)
        begun.send_signal(number)
        _, stderr = begun.communicate(timeout=30)
        assert begun.returncode == 0, stderr
    with federation.running():
        federation.wait_published(1)


def test_a_stop_while_masks_are_opened_does_not_wait_for_ever(tmp_path: Path) -> None:
    federation = NumberFederation(tmp_path, rounds=10)
    coordinator = federation.coordinator
    try:
        federation.start()
        federation.wait_published(1)
        for site in federation.sites.values():
            site.kill_at("before-S5")
        for site in federation.sites.values():
            assert site.wait_dead(seconds=WAIT) == -signal.SIGKILL
        before = federation.published

        # Told once: sites may come back for a while.
        started = time.monotonic()
        os.kill(coordinator.pid, signal.SIGTERM)
        assert coordinator.wait_dead(seconds=STOP_SECONDS + 10) == 0
        assert time.monotonic() - started >= STOP_SECONDS - 1
        assert coordinator.text().count(LEFT) == 1

        # Told twice, after a restart in the same place: at once.
        coordinator.start()
        coordinator.wait_for("listening", times=2, seconds=WAIT)
        os.kill(coordinator.pid, signal.SIGTERM)
        time.sleep(1)
        os.kill(coordinator.pid, signal.SIGTERM)
        assert coordinator.wait_dead(seconds=STOP_SECONDS / 2) == 0
        assert coordinator.text().count(LEFT) == 2

        # Nothing was lost by either.
        assert federation.published == before
        federation.start()
        federation.wait_published(before + 2)
    finally:
        federation.stop()
    assert [row["outcome"] for row in federation.rounds[: before + 2]] == ["published"] * (before + 2)
    federation.check_sums()
