"""One benchmark in two checkouts, in turn: which of its figures a change has made better or worse.

`python -m benchmarks.in_turn BEFORE AFTER --before "security.secagg.bench --json" --after "benchmarks.secagg --json"`.
Both commands print one JSON object; the medians of its numbers are compared, beside the processor time of the whole
command with all that it has started. Which checkout begins changes from pair to pair, so that a machine that becomes
slower or warmer favours neither.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

Figures = dict[str, float]
PROCESSOR = "processor_seconds"


def numbers(printed: dict[str, Any], within: str = "") -> Iterator[tuple[str, float]]:
    """Every number of an object, also of objects in it: `rounds.repeats`."""
    for name, value in printed.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{within}{name}.")
        elif type(value) in (int, float):
            yield f"{within}{name}", value


def measured(checkout: Path, command: str) -> Figures:
    """The numbers that one run prints, and its processor time."""
    environment = os.environ | {"PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-m", *command.split()]
    with subprocess.Popen(arguments, cwd=checkout, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        # Of this process and of all of its children that it has waited for.
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise click.ClickException(f"{command} ended with {process.returncode} in {checkout}")
    return dict(numbers(json.loads(printed))) | {PROCESSOR: used.ru_utime + used.ru_stime}


def compared(before: list[Figures], after: list[Figures]) -> dict[str, dict[str, Any]]:
    """Medians of every figure that both have, their ratio, and the single runs."""
    found = {}
    for name in before[0]:
        if all(name in run for run in [*before, *after]):
            old, new = ([run[name] for run in runs] for runs in (before, after))
            middle = statistics.median(old), statistics.median(new)
            ratio = middle[1] / middle[0] if middle[0] else None
            found[name] = {"before": middle[0], "after": middle[1], "ratio": ratio, "runs": [old, new]}
    return found


@click.command(help=__doc__)
@click.argument("before", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("after", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--before", "old", required=True, help="Module and arguments in the first checkout.")
@click.option("--after", "new", help="The same in the second; default: as in the first.")
@click.option("--pairs", type=click.IntRange(1), default=5, show_default=True)
def main(before: Path, after: Path, old: str, new: str | None, pairs: int) -> None:
    sides: tuple[list[Figures], list[Figures]] = ([], [])
    runs = [(sides[0], before, old), (sides[1], after, new or old)]
    for _ in range(pairs):
        for into, checkout, command in runs:
            into.append(measured(checkout, command))
        runs.reverse()
    report = {"commands": [old, new or old], "pairs": pairs, "figures": compared(*sides)}
    click.echo(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
