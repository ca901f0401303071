"""`npr-lab run --engine ray` on a cluster of this machine: a worker and a driver killed in mid-cell, a failing cell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from lazaret.errors import ConfigError
from npr.lab.cli import main
from npr.lab.engines import LineReporter, run_on_node, run_ray
from npr.lab.plan import LabPlan
from npr.lab.request import make_plan, preset
from npr.lab.store import ResultStore
from npr.recipe import code_digest
from tests.support.processes import running

pytest.importorskip("ray", reason="the package ray is not installed (extra [ray])")
pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for Ray's processes in /proc"),
]

ROUNDS = 40  # enough that two kills come before the end, on fast machines too
SETTINGS = [
    "run", "--data", "generated:scale=0.001,sites=3", "--folds", "fold", "--image-size", "16",
    "--architecture", "test_efficientnet", "--weights", "none", "--no-plots", "--methods", "fednpr-per,local",
    "--grid", "local:learning_rate=1e30", "--evaluate-every", "100", "--threads", "1",
]  # fmt: skip


def on_ray(out: Path, rounds: int = ROUNDS) -> subprocess.Popen[str]:
    cluster = ["--rounds", str(rounds), "--engine", "ray", "--workers", "2", "--out", str(out)]
    command = [sys.executable, "-m", "npr.lab.cli", *SETTINGS, *cluster]
    # Without a token: Ray would leave one in the home directory.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def in_this_process(out: Path, monkeypatch: pytest.MonkeyPatch, rounds: int = ROUNDS) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", ["npr-lab", *SETTINGS, "--rounds", str(rounds), "--out", str(out)])
    with pytest.raises(SystemExit, match="1"):  # one cell cannot succeed
        main()
    torch.set_num_threads(threads)


def until(process: subprocess.Popen[str], wanted: str) -> None:
    """Read what the run says up to a line with this in it."""
    assert process.stderr is not None
    told = []
    for line in process.stderr:
        told.append(line)
        if wanted in line:
            return
    raise AssertionError("".join(told))


def cell_processes(driver: int) -> list[int]:
    """The processes of Ray that run a cell for this driver."""
    found, todo = dict[int, str](), [driver]
    while todo:
        for listed in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
            with suppress(FileNotFoundError, ProcessLookupError):  # one that has just ended
                for child in map(int, listed.read_text().split()):
                    todo.append(child)
                    title = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[child] = title
    return [pid for pid, title in found.items() if title.startswith("ray::run_on_node")]


def other_processes(driver: int, than: list[int], seconds: float = 120.0) -> list[int]:
    """Those that have taken over, as soon as there are any."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := [pid for pid in cell_processes(driver) if pid not in than]:
            return found
        time.sleep(0.05)
    raise AssertionError("nobody took the cell over")


def all_end(pids: list[int], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(running(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def results(out: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / "results.json").read_text())
    return content


@pytest.mark.timeout(600)
def test_a_cluster_finds_the_same_as_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = on_ray(tmp_path / "ray", rounds=2)
    _, told = run.communicate(timeout=400)
    assert run.returncode == 1, told  # one cell cannot succeed
    in_this_process(tmp_path / "quiet", monkeypatch, rounds=2)
    there, here = results(tmp_path / "ray"), results(tmp_path / "quiet")
    (cell,), (wanted,) = there["cells"], here["cells"]
    assert cell["final"] == wanted["final"] and cell["config_hash"] == wanted["config_hash"]
    assert there["failed"] == here["failed"] and len(here["failed"]) == 1


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_killed_worker_and_a_killed_driver_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One story, since a cluster takes long to start: a worker dies in mid-cell, then the driver, then all is well."""
    out, quiet = tmp_path / "ray", tmp_path / "quiet"
    first = on_ray(out)
    until(first, "fednpr-per seed=0 fold=fold: round 2,")
    workers = cell_processes(first.pid)
    assert workers, "no process runs a cell"
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    orphans = other_processes(first.pid, than=workers)
    first.kill()
    first.communicate(timeout=30)
    assert all_end(orphans), "cells of a killed run are still at work"
    assert not results(out)["cells"]

    second = on_ray(out)
    _, told = second.communicate(timeout=400)
    assert second.returncode == 1, told
    assert "round 2," not in told, "a checkpoint was not taken up"
    content = results(out)
    assert [entry["key"] for entry in content["failed"]] == ["local[learning_rate=1e+30] seed=0 fold=fold"]
    assert "finite" in content["failed"][0]["error"] and not content["not_run"]
    (cell,) = content["cells"]
    assert [entry["round"] for entry in cell["rounds"]] == [*range(1, ROUNDS + 1)]

    in_this_process(quiet, monkeypatch)
    (wanted,) = results(quiet)["cells"]
    assert cell["final"] == wanted["final"] and cell["config_hash"] == wanted["config_hash"]
    assert results(quiet)["failed"] == content["failed"]


def test_a_node_without_our_disk_sends_its_files_and_one_with_other_code_is_refused(tmp_path: Path) -> None:
    """What a node does with a job, without a cluster around it."""

    class Board:
        def __init__(self) -> None:
            self.tell, self.told = self, []

        def remote(self, *news: object) -> None:
            self.told.append(news)

    plan, board = small_plan(), Board()
    job = {
        "settings": plan.settings.model_dump(mode="json"),
        "cell": plan.cells[0].model_dump(mode="json"),
        "directory": str(tmp_path / "elsewhere"),
        "mark": "of the driver",
        "threads": 1,
        "code": code_digest(),
        "plugins": "",
    }
    answer = run_on_node(job, board)
    assert not answer["error"] and {"result.json", "validation-global-head.npz"} <= answer["files"].keys()
    assert [news[1] for news in board.told] == [1] and not (tmp_path / "elsewhere").exists()
    other = run_on_node(job | {"code": "0" * 64}, board)
    assert "other learning code" in other["error"] and not other["files"]


def test_an_address_where_nobody_is_is_one_clear_error(tmp_path: Path) -> None:
    plan, store = small_plan(), ResultStore(tmp_path)
    with pytest.raises(ConfigError, match="no ray cluster"), LineReporter(1) as progress:
        list(run_ray(plan.settings, plan.cells, store, progress, address="127.0.0.1:1", workers=1, threads=1))


def small_plan() -> LabPlan:
    tiny = {"rounds": 1, "image_size": 16, "architecture": "test_efficientnet", "weights": "none"}
    source = "generated:scale=0.001,sites=3"
    return make_plan(preset("quick"), data=source, methods=["fedavg"], seeds=[0], folds=["fold"], overrides=tiny)
