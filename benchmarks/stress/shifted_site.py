"""A site whose clock is wrong by as many seconds as a file `clock` beside its configuration says.

`python -m benchmarks.stress.shifted_site --config site.toml`. The clock is what the shipped parts are given; the
system's own stays right. `faketime` would do it to any program, but under its version 0.9.10 `time.sleep` fails.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import click

from lazaret.process import ending_well, stop_on_signals
from lazaret.terminal import run_command
from scripts.local_federation.known_updates import make_number_learner
from scripts.local_federation.party import KillableAgent, log_to_stderr
from security.clock import SystemClock
from security.rng import SystemRandomness
from site_agent.assembly import assemble
from site_agent.client import serve
from site_agent.config import SiteConfig


class ShiftedSystemClock(SystemClock):
    """The wall clock is wrong; the monotonic one cannot be."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._stamp, self._shift_ms = 0, 0

    def now_ms(self) -> int:
        with suppress(OSError, ValueError):
            stamp = self._file.stat().st_mtime_ns
            if stamp != self._stamp:
                self._stamp, self._shift_ms = stamp, 1000 * int(self._file.read_text())
        return super().now_ms() + self._shift_ms


@click.command()
@click.option("--config", "path", type=click.Path(path_type=Path), required=True)
def main(path: Path) -> None:
    """A site."""
    log_to_stderr()
    with ending_well():
        config = SiteConfig.read(path)
        clock = ShiftedSystemClock(path.parent / "clock")
        agent = assemble(
            config, clock=clock, rng=SystemRandomness(), make_learner=make_number_learner, agent_type=KillableAgent
        )
        until = lambda stopped: stop_on_signals(stopped.set)  # noqa: E731  # as the command has it
        asyncio.run(serve(agent, config.coordinator, until=until))


if __name__ == "__main__":
    run_command(main, "party")
