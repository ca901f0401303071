"""How long people wait for a command, and an agent for its first words: in processor time, as machines are busy.

`python -m benchmarks.start_up graz/site.toml hub/coordinator.toml --json` in a federation such as that of the
quickstart, with differential privacy and a ledger, whose coordinator runs and whose agent of that site does not.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import click

from lazaret.control import NowFile

PATIENCE: Final = 120.0
HELP: Final = ("site_agent", "coordinator", "security.audit", "security.consortium", "npr.lab")


def commands(site: Path, coordinator: Path) -> dict[str, list[str]]:
    """What is measured, each as the words behind `python -m`."""
    here, there = ["--config", str(site)], ["--config", str(coordinator)]
    return {
        **{f"{module} --help": [module, "--help"] for module in HELP},
        "npr.lab list": ["npr.lab", "list"],
        "site_agent status": ["site_agent", "status", *here],
        "site_agent ledger": ["site_agent", "ledger", *here],
        "site_agent check --skip trial": ["site_agent", "check", "--skip", "trial", *here],
        "coordinator status": ["coordinator", "status", *there],
        "coordinator check": ["coordinator", "check", *there],
    }


def once(words: list[str]) -> dict[str, float]:
    """Processor seconds of a command with all that it starts, and seconds."""
    module, *rest = words
    # As the installed command does it.
    code = f"import sys; sys.argv = {['x', *rest]!r}; from {module}.cli import main; main()"
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - begun
    if ended.returncode and "check" not in rest:  # a check tells by its code what it has found
        raise click.ClickException(f"{' '.join(words)}: {ended.stderr}")
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"processor_seconds": spent, "seconds": seconds}


def agent_start(site: Path) -> dict[str, float]:
    """An agent until its first line, and until it is connected, for which its trainer has to have opened the data."""
    ticks, begun = os.sysconf("SC_CLK_TCK"), time.monotonic()
    command = [sys.executable, "-m", "site_agent", "--config", str(site)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as agent:
        try:
            first = agent.stderr.readline() if agent.stderr else ""
            found = {"first_line_seconds": time.monotonic() - begun}
            if "starts with" not in first:
                raise click.ClickException(f"the agent does not start: {first}")
            while not _connected(site, agent.pid):
                if agent.poll() is not None or time.monotonic() - begun > PATIENCE:
                    raise click.ClickException("the agent does not connect")
                time.sleep(0.02)
            user, system = Path(f"/proc/{agent.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            status = Path(f"/proc/{agent.pid}/status").read_text()
            held = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
        finally:
            agent.send_signal(signal.SIGTERM)
    spent = (int(user) + int(system)) / ticks
    return found | {"own_processor_seconds": spent, "own_resident_mb": int(held) / 1024}


def _connected(site: Path, pid: int) -> bool:
    now = NowFile(site.parent / "state").read(now_ms=time.time_ns() // 1_000_000)
    return now.get("pid") == pid and bool(now.get("connected_ms"))


@click.command()
@click.argument("site", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("coordinator", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--times", type=click.IntRange(1, 50), default=5, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def main(site: Path, coordinator: Path, times: int, as_json: bool) -> None:
    """Medians of several starts of each command."""
    found = {}
    for name, words in commands(site, coordinator).items():
        found[name] = _middle([once(words) for _ in range(times)])
        click.echo(f"{name}: {found[name]}", err=True)
    found["site_agent, the agent itself"] = _middle([agent_start(site) for _ in range(times)])
    width = max(map(len, found))
    lines = (f"{name:<{width}}  {figures}" for name, figures in found.items())
    click.echo(json.dumps(found, indent=2) if as_json else "\n".join(lines))


def _middle(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(run[name] for run in runs), 2) for name in runs[0]}


if __name__ == "__main__":
    main()
