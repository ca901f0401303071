"""One benchmark in two checkouts in turn: the order, the medians, and the processor time of what was started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.in_turn import PROCESSOR, compared, main

BENCH = """
import json, subprocess, sys, time
from pathlib import Path
with Path({log!r}).open("a") as log:
    log.write({name!r})
spend = "import time\\nwhile time.process_time() < {seconds}: pass"
subprocess.run([sys.executable, "-c", spend], check=True)
print(json.dumps({{"cost": {cost}, "exact": True, "name": "x", "part": {{"seconds": {cost}}}}}))
"""


@pytest.fixture
def checkouts(tmp_path: Path) -> list[str]:
    for name, cost, seconds in (("old", 2.0, 0.1), ("new", 3.0, 0.6)):
        (tmp_path / name).mkdir()
        values = {"log": str(tmp_path / "order"), "name": name[0], "cost": cost, "seconds": seconds}
        (tmp_path / name / "bench_here.py").write_text(BENCH.format(**values))
    return [str(tmp_path / "old"), str(tmp_path / "new")]


def test_checkouts_run_in_turn_and_children_are_counted(checkouts: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [*checkouts, "--before", "bench_here", "--pairs", "2"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.output)["figures"]
    assert (tmp_path / "order").read_text() == "onno", "who begins changes"
    assert figures.keys() == {"cost", "part.seconds", PROCESSOR}, "numbers alone, also of objects in it"
    assert figures["cost"] == {"before": 2.0, "after": 3.0, "ratio": 1.5, "runs": [[2.0, 2.0], [3.0, 3.0]]}
    assert figures[PROCESSOR]["after"] - figures[PROCESSOR]["before"] > 0.3, "what a command has started counts too"


def test_a_run_that_fails_is_no_figure(checkouts: list[str]) -> None:
    result = CliRunner().invoke(main, [*checkouts, "--before", "no_such_bench"])
    assert result.exit_code == 1 and "no_such_bench ended with 1" in result.output


def test_medians_of_what_both_have() -> None:
    found = compared([{"a": 1, "b": 0}, {"a": 9, "b": 0}, {"a": 2, "b": 0}], [{"a": 4}, {"a": 4}, {"a": 1}])
    assert found == {"a": {"before": 2, "after": 4, "ratio": 2.0, "runs": [[1, 9, 2], [4, 4, 1]]}}
