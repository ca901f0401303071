"""The demo in two checkouts, one after the other and in turn: what a change costs in time, processor and memory.

`python -m benchmarks.two_checkouts BEFORE AFTER --pairs 2 --json`. Each checkout has its own environment (`.venv`).
Times are of one machine in the same minutes; run it on a machine that does nothing else. With `--memory` the processes
of each hospital are looked at while the demo runs, which takes time itself: so times and memory are of different runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import re
import resource
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, Final

import click

_PR_SET_CHILD_SUBREAPER: Final = 36
LOOK_SECONDS: Final = 0.25
_SITE: Final = re.compile(r"/sites/([^/\0]+)/site\.toml")
_HELD: Final = re.compile(r"^(Pss|Rss): +(\d+)", re.MULTILINE)
# The end of each part, as the demo tells it.
_STARTED, _SECOND = "coordinator: round 1: training", "coordinator: round 2: training"
_LAST, _PUBLISHED = "coordinator: round 5: training", "coordinator: round 5: published"
_ROUNDS_OVER, _ALONE_OVER = "rounds are done", "checking the sums"


def phases(lines: list[tuple[float, str]], end: float) -> dict[str, float]:
    """Seconds until the first round, of all rounds, of each hospital alone, and of the checks; and of the first and
    the last round by themselves, in which nobody is killed.

    :param told: what the demo said, and when, in seconds since its start.
    """
    ends = (_STARTED, _SECOND, _LAST, _PUBLISHED, _ROUNDS_OVER, _ALONE_OVER)
    moments = (next(moment for moment, line in lines if words in line) for words in ends)
    started, second, last, published, over, alone = moments
    parts = {"start": started, "rounds": over - started, "alone": alone - over, "checks": end - alone}
    parts |= {"first_round": second - started, "last_round": published - last}
    return {name: round(seconds, 2) for name, seconds in parts.items()}


def demo(checkout: Path, *, memory: bool) -> dict[str, Any]:
    """Run it once."""
    python = checkout / ".venv" / "bin" / "python"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VIRTUAL_ENV": str(checkout / ".venv")}
    environment["PYTHONPATH"] = str(checkout)  # the two may share one environment: each still runs its own code
    lines: list[tuple[float, str]] = []
    with tempfile.TemporaryDirectory(prefix="two-checkouts-") as folder:
        words = [python, "-m", "scripts.local_federation.demo", "--out", f"{folder}/demo", "--json"]
        before, busy_before = resource.getrusage(resource.RUSAGE_CHILDREN), _busy_seconds()
        begun = time.monotonic()
        with subprocess.Popen(
            words, cwd=checkout, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            peaks = Peaks()
            looking = Thread(target=_look, args=(process, Path(folder, "demo"), peaks), daemon=True)
            if memory:
                looking.start()
            for line in process.stderr or ():
                lines.append((time.monotonic() - begun, line))
            summary = json.loads(process.stdout.read()) if process.stdout else {}
        seconds = time.monotonic() - begun
        _wait_for_orphans()
        after, busy = resource.getrusage(resource.RUSAGE_CHILDREN), _busy_seconds() - busy_before
    if not summary["exact_sums"] or summary["kills_survived"] != 3:
        raise click.ClickException(f"the demo in {checkout} has failed: {summary}")
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    figures = {"seconds": round(seconds, 2), "processor_seconds": round(spent, 2), **phases(lines, seconds)}
    figures["others_processor_seconds"] = round(busy - spent, 2)
    return figures | (peaks.figures() if memory else {})


def _busy_seconds() -> float:
    """Of all processors of this machine so far: what others have used meanwhile shows whether times can be compared."""
    user, nice, system, _, _, interrupts, later, stolen = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + interrupts + later + stolen) / os.sysconf("SC_CLK_TCK")


def _wait_for_orphans() -> None:
    """Trainers whose agents were killed: they came to this process, so that their processor time is counted too."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@dataclass(slots=True)
class Peaks:
    """The most that each hospital held, in kilobytes.

    :ivar together: all its processes. Proportional set sizes: a page that several processes share counts once.
    :ivar network: the one with the network alone, with all pages that it shares.
    """

    together: dict[str, int] = field(default_factory=dict)
    network: dict[str, int] = field(default_factory=dict)

    def figures(self) -> dict[str, dict[str, int]]:
        named = {"peak_pss_mb": self.together, "network_process_peak_rss_mb": self.network}
        return {name: {site: peak // 1024 for site, peak in sorted(held.items())} for name, held in named.items()}


def _look(process: subprocess.Popen[str], folder: Path, peaks: Peaks) -> None:
    while process.poll() is None:
        now: dict[str, int] = {}
        for entry in Path("/proc").iterdir():
            try:
                command = (entry / "cmdline").read_text() if entry.name.isdigit() else ""
                if str(folder) not in command or not (site := _SITE.search(command)):
                    continue
                held = {name: int(size) for name, size in _HELD.findall((entry / "smaps_rollup").read_text())}
            except OSError:
                continue  # has ended
            now[site[1]] = now.get(site[1], 0) + held.get("Pss", 0)
            if "site_agent.trainer" not in command:
                peaks.network[site[1]] = max(peaks.network.get(site[1], 0), held.get("Rss", 0))
        for site_name, held_now in now.items():
            peaks.together[site_name] = max(peaks.together.get(site_name, 0), held_now)
        time.sleep(LOOK_SECONDS)


def middle(runs: list[dict[str, Any]]) -> dict[str, float]:
    """The median of each figure; of memory, the mean over hospitals first."""
    flat = [
        {name: statistics.fmean(value.values()) if isinstance(value, dict) else value for name, value in run.items()}
        for run in runs
    ]
    return {name: round(statistics.median(run[name] for run in flat), 2) for name in flat[0]}


@click.command()
@click.argument("before", type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path))
@click.argument("after", type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path))
@click.option("--pairs", type=click.IntRange(0, 20), default=2, show_default=True)
@click.option("--memory", is_flag=True, help="Look at memory instead of times.")
@click.option("--most-others", type=float, default=math.inf, help="Processor seconds of others in a run that counts.")
@click.option("--earlier", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A result to go on with.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def main(
    before: Path, after: Path, pairs: int, memory: bool, most_others: float, earlier: Path | None, as_json: bool
) -> None:
    """The demo in two checkouts, in turn."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    runs: dict[str, list[dict[str, Any]]] = {"before": [], "after": []}
    if earlier is not None:
        runs = json.loads(earlier.read_text())["runs"]
    done = len(runs["after"])
    for number in range(done, done + pairs):
        order = [("before", before), ("after", after)]
        for name, checkout in order if number % 2 == 0 else order[::-1]:
            runs[name].append(demo(checkout, memory=memory))
            click.echo(f"{name}: {runs[name][-1]}", err=True)
    was, now = (middle([run for run in runs[name] if run["others_processor_seconds"] <= most_others]) for name in runs)
    ratios = {name: round(now[name] / was[name], 3) for name in was if was[name]}
    found = {"after_over_before": ratios, "before": was, "after": now, "runs": runs}
    click.echo(json.dumps(found, indent=2) if as_json else json.dumps(ratios))


if __name__ == "__main__":
    main()
