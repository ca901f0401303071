"""Entries for the demo and the tests: the shipped agent and coordinator, with a fail point or a stand-in learner.

`python -m scripts.local_federation.party site --config site.toml`
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from coordinator.config import CoordinatorConfig
from coordinator.service import run_until_stopped
from lazaret.process import ending_well, stop_on_signals
from lazaret.terminal import run_command
from scripts.local_federation.fail_points import MortalAgent, MortalService, MortalShell
from scripts.local_federation.known_updates import make_number_learner
from scripts.local_federation.sums import kept_folder
from security.clock import SystemClock
from security.rng import SystemRandomness
from site_agent.assembly import assemble
from site_agent.client import meter_for, serve
from site_agent.config import SiteConfig
from site_agent.effects import Effect, KeepUpdate
from site_agent.status import AgentPresence

CONFIG = click.option("--config", "path", type=click.Path(path_type=Path), required=True)


class KeepingAgent(MortalAgent):
    """Puts a copy of every sealed update aside. It stays ciphertext; the demo opens it when the run is over."""

    def execute(self, effect: Effect) -> Iterator[bytes]:
        yield from super().execute(effect)
        if isinstance(effect, KeepUpdate) and effect.update is not None:
            name = str(effect.round)
            target = kept_folder(self.state_dir.folder, effect.round) / "pending" / name
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.copyfile(self.state_dir.pending / name, target)
            target.chmod(0o600)


def log_to_stderr() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")


@click.group()
def cli() -> None:
    """Parties of a federation on this machine."""


@cli.command()
@CONFIG
def coordinator(path: Path) -> None:
    """The coordinator."""
    log_to_stderr()
    with ending_well():
        logging.info("starting")
        run_until_stopped(*CoordinatorConfig.read(path), shell_type=MortalShell, service_type=MortalService)


@cli.command()
@CONFIG
@click.option("--numbers", is_flag=True, help="Known vectors instead of training.")
def site(path: Path, numbers: bool) -> None:
    """A site."""
    log_to_stderr()
    if numbers:
        learner = make_number_learner
    else:
        from site_agent.trainer_start import start_trainer as learner
    with ending_well():
        logging.info("starting")
        config = SiteConfig.read(path)
        until = lambda stopped: stop_on_signals(stopped.set)  # noqa: E731  # as the command has it
        again, counted = True, meter_for(config.coordinator)
        while again:
            agent = assemble(
                config, clock=SystemClock(), rng=SystemRandomness(), make_learner=learner, agent_type=KeepingAgent
            )
            seen = AgentPresence(config, agent)
            again = asyncio.run(
                serve(agent, config.coordinator, counted=counted, until=until, watch=seen.look, ended=seen.stop)
            )


if __name__ == "__main__":
    run_command(cli, "party")
