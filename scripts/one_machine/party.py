"""Entries for the demo and the tests: the shipped agent and coordinator, with a fail point or a stand-in learner.

`python -m scripts.one_machine.party site --config site.toml --ending before-S3@4`
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
from scripts.one_machine.endings import Ending, MortalAgent, MortalService, MortalShell
from scripts.one_machine.numbers import make_number_learner
from security.clock import SystemClock
from security.rng import SystemRandomness
from security.terminal import run_command
from site_agent.assembly import assemble
from site_agent.cli import stop_on_signals
from site_agent.client import serve
from site_agent.config import SiteConfig
from site_agent.effects import Effect, Keep

CONFIG = click.option("--config", "path", type=click.Path(path_type=Path), required=True)
ENDING = click.option("--ending", help="Die here, for example before-S3@4.")


class KeepingAgent(MortalAgent):
    """Puts a copy of every sealed update aside. It stays ciphertext; `dump` opens it when the run is over."""

    def execute(self, effect: Effect) -> Iterator[bytes]:
        yield from super().execute(effect)
        if isinstance(effect, Keep):
            aside = self.vault.folder / "kept-for-the-demo"
            aside.mkdir(mode=0o700, exist_ok=True)
            name = str(effect.update.round)
            shutil.copyfile(self.vault.pending / name, aside / name)
            (aside / name).chmod(0o600)


def _log_to_stderr() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")


@click.group()
def cli() -> None:
    """Parties of a federation on this machine."""


@cli.command()
@CONFIG
@ENDING
def coordinator(path: Path, ending: str | None) -> None:
    """The coordinator."""
    _log_to_stderr()
    MortalShell.ending = Ending.parse(ending) if ending else None
    run_until_stopped(*CoordinatorConfig.read(path), shell_type=MortalShell, service_type=MortalService)


@cli.command()
@CONFIG
@ENDING
@click.option("--numbers", is_flag=True, help="Known vectors in the place of learning.")
def site(path: Path, ending: str | None, numbers: bool) -> None:
    """A site."""
    _log_to_stderr()
    MortalAgent.ending = Ending.parse(ending) if ending else None
    if numbers:
        learner = make_number_learner
    else:
        from site_agent.learning import make_trainer as learner
    config = SiteConfig.read(path)
    agent = assemble(
        config, clock=SystemClock(), rng=SystemRandomness(), make_learner=learner, agent_type=KeepingAgent
    )

    asyncio.run(serve(agent, config.coordinator, until=stop_on_signals))


if __name__ == "__main__":
    run_command(cli, "party")
