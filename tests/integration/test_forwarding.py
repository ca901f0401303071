"""`privacy-audit forward` as a process of its own, to a real rsyslog over TLS, while a party writes its log.

Killed and started again, nothing is missing, and nothing is there twice but what was under way, with its mark; what a
collector lost or changed is found.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from security.audit.findings import Findings
from security.audit.forward import MOST_ENTRIES, compare
from security.log import events as ev
from tests.support.audit_attacks import Lonely, Tampering
from tests.support.collector import Collector

KILLS = 40 if os.environ.get("LAZARET_LONG") else 4
PROGRAM = "from security.audit.cli import main; main()"


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[Collector]:
    made = Collector(tmp_path / "collector")
    made.start()
    yield made
    made.stop()


def _command(lonely: Lonely, collector: Collector, position: Path, *extra: str) -> list[str]:
    arguments = ["forward", str(lonely.folder), "--to", f"127.0.0.1:{collector.port}", "--name", "localhost"]
    arguments += ["--ca", str(collector.folder / "root.pem"), "--position", str(position), *extra]
    if collector.driver == "gtls" and "--lenient" not in extra:
        arguments.append("--lenient")
    return [sys.executable, "-c", PROGRAM, *arguments]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def _write(lonely: Lonely, count: int) -> None:
    for number in range(count):
        lonely.clock.advance(20)
        lonely.log.append(ev.OperatorAction(command=f"größe {number}", role="operator"))
    lonely.log.checkpoint()


def _wait_for(position: Path, size: int) -> None:
    for _ in range(1200):
        if position.exists() and json.loads(position.read_text())["size"] >= size:
            return
        time.sleep(0.05)
    raise AssertionError("the forwarder does not come forward")


def _counts(lonely: Lonely, collector: Collector) -> dict[str, int]:
    findings = Findings(lonely.log.origin)
    counts = compare(lonely.folder, collector.collected, findings)
    assert findings.listed() == ()
    return counts


def test_killed_and_started_again_each_entry_arrives_and_what_comes_twice_says_so(
    tmp_path: Path, collector: Collector
) -> None:
    lonely, position = Lonely(tmp_path / "log"), tmp_path / "position"
    for number in range(KILLS + 1):
        follower = subprocess.Popen(_command(lonely, collector, position), stderr=subprocess.PIPE)
        _write(lonely, 30)
        if number % 2 == 0:
            _wait_for(position, lonely.log.size)
        _write(lonely, 30)  # under way, or not yet, when the signal comes
        if number < KILLS:
            time.sleep(0.011 * (number % 8))
            follower.kill()
        else:
            _wait_for(position, lonely.log.size)
            follower.send_signal(signal.SIGTERM)
        _, told = follower.communicate(timeout=60)
        assert follower.returncode == (-9 if number < KILLS else 0), told
    collector.stop()
    counts = _counts(lonely, collector)
    assert counts["entries"] == counts["log"] == lonely.log.size and counts["missing"] == 0
    # Only what was sent and not noted when the kill came can be there again, and it has the mark and the same number.
    assert counts["repeated"] <= KILLS * min(MOST_ENTRIES, 60) and counts["repeated_unmarked"] == 0
    lonely.log.close()


def test_orderly_restarts_send_nothing_twice(tmp_path: Path, collector: Collector) -> None:
    lonely, position = Lonely(tmp_path / "log"), tmp_path / "position"
    for _ in range(2):
        _write(lonely, 700)
        done = _run(_command(lonely, collector, position, "--once"))
        assert done.returncode == 0, done.stderr
    assert _run(_command(lonely, collector, position, "--once")).returncode == 0, "nothing is new"
    collector.stop()
    assert _counts(lonely, collector) == {
        "entries": 1401,
        "repeated": 0,
        "repeated_unmarked": 0,
        "missing": 0,
        "log": 1401,
    }
    collector.start()
    position.unlink()
    assert _run(_command(lonely, collector, position, "--once")).returncode == 0
    collector.stop()
    assert _counts(lonely, collector)["repeated"] == 1401, "twin: without the position everything comes again"
    lonely.log.close()


def test_collector_that_is_not_the_one_gets_nothing(tmp_path: Path, collector: Collector) -> None:
    lonely, position = Lonely(tmp_path / "log"), tmp_path / "position"
    command = _command(lonely, collector, position, "--once")
    command[command.index(str(collector.folder / "root.pem"))] = str(collector.folder / "stranger.pem")
    done = _run(command)
    assert done.returncode == 3 and "has not taken" in done.stderr
    command = _command(lonely, collector, position, "--once")
    command[command.index("localhost")] = "elsewhere"
    assert _run(command).returncode == 3
    collector.stop()
    assert not collector.collected.exists() and not position.exists()
    lonely.log.close()


def test_gaps_and_changes_at_the_collector_are_found(tmp_path: Path, collector: Collector) -> None:
    lonely, position = Lonely(tmp_path / "log"), tmp_path / "position"
    _write(lonely, 20)
    assert _run(_command(lonely, collector, position, "--once")).returncode == 0
    collector.stop()
    lines = collector.collected.read_text().splitlines(keepends=True)
    comparing = [sys.executable, "-c", PROGRAM, "forward", str(lonely.folder), "--compare", str(collector.collected)]
    assert _run(comparing).returncode == 0
    collector.collected.write_text("".join(lines[:-1]))
    assert _run(comparing).returncode == 0, "twin: how far the log was sent is not known"
    assert _run([*comparing, "--position", str(position)]).returncode == 1, "the end was cut off"
    for forged in (
        [*lines, lines[0].replace('seq="0"', f'seq="{10**14}"')],
        lines[:7] + lines[8:],
        [line.replace('"operator"', '"operatoR"') for line in lines],
        [*lines[:7], lines[7].replace("größe 6", "größe 7"), *lines[8:]],
    ):
        collector.collected.write_text("".join(forged))
        done = _run(comparing)
        assert done.returncode == 1 and "CollectorMismatch" in done.stdout
    lonely.log.close()


def test_log_that_was_restored_is_not_forwarded(tmp_path: Path, collector: Collector) -> None:
    lonely, position = Lonely(tmp_path / "log"), tmp_path / "position"
    _write(lonely, 20)
    lonely.log.close()
    assert _run(_command(lonely, collector, position, "--once")).returncode == 0
    Tampering(lonely.folder).cut(10)
    done = _run(_command(lonely, collector, position, "--once"))
    assert done.returncode == 1 and "restored from an old copy" in done.stderr
    position.unlink()
    assert _run(_command(lonely, collector, position, "--once")).returncode == 0, (
        "twin: without a position nothing is compared"
    )
