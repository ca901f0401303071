"""Entries for the demo and the tests: the shipped agent and coordinator, with a fail point or a stand-in learner.

`python -m scripts.local_federation.party site --config site.toml`
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click

from coordinator.config import CoordinatorConfig
from coordinator.effects import Effect as CoordinatorEffect
from coordinator.run import Shell
from coordinator.send_queue import Stream
from coordinator.service import Service, run_until_stopped
from lazaret.process import ending_well, stop_on_signals
from lazaret.terminal import run_command
from scripts.local_federation.known_updates import make_number_learner
from scripts.local_federation.sums import kept_folder
from security.clock import SystemClock
from security.rng import SystemRandomness
from security.secagg import messages
from security.secagg.certificates import Advert
from security.secagg.effects import DraftState, SaveState, Send, SendUpload
from security.secagg.fields import Wire
from site_agent.assembly import assemble
from site_agent.client import meter_for, serve
from site_agent.config import SiteConfig
from site_agent.effects import Effect, KeepUpdate
from site_agent.effects import Effect as SiteEffect
from site_agent.run import Agent
from site_agent.status import AgentPresence

# Processes killed (SIGKILL) at named steps of the protocol, for the demo and the tests; no shipped command uses it.
#
# A site is killed before, during or after sending S1 to S5, or while it writes the next model; a coordinator before
# or after sending C0 to C5 (docs/spec/secure-aggregation.md, section 1). The process sends SIGKILL to itself, so
# nothing is cleaned up. The order is a file with one line such as `before-S3`; the process deletes the file first, so
# that it is killed once only.


SITE_STEPS: Final[dict[str, type[Any]]] = {
    "S1": Advert,
    "S2": messages.Shares,
    "S3": SendUpload,
    "S4": messages.Agree,
    "S5": messages.Unmask,
    "draft": DraftState,
    "state": SaveState,
}
COORDINATOR_STEPS: Final[dict[str, type[Any]]] = {
    "C0": messages.Plan,
    "C1": messages.Adverts,
    "C2": messages.Deliver,
    "C3": messages.Survivors,
    "C4": messages.Quorum,
    "C5": messages.Result,
}
# What a party may send once only in an attempt: what it sends about one thing must always be the same bytes.
PROMISES: Final = (
    Advert, messages.Shares, messages.UploadHeader, messages.Agree, messages.Unmask,
    messages.Plan, messages.Adverts, messages.Survivors, messages.Result,
)  # fmt: skip


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class KillOrder:
    """At which step one party is to be killed, and what it has sent so far."""

    def __init__(self, folder: Path, steps: dict[str, type[Any]]) -> None:
        self._order = folder / "kill-order"
        self._sent = folder / "said.jsonl"
        self._steps = steps

    def moment(self, thing: object) -> str | None:
        """`before`, `during` or `after` if the process is to be killed at this."""
        try:
            when, _, step = self._order.read_text().strip().partition("-")
        except FileNotFoundError:
            return None
        return when if isinstance(thing, self._steps[step]) else None

    def obey(self) -> None:
        self._order.unlink()
        kill_this_process()

    def record(self, message: Wire) -> None:
        """Write down what is about to be sent, to compare it later."""
        if isinstance(message, PROMISES):
            about = getattr(message, "kx", None) or getattr(message, "ctx", None) or message.context.ctx()
            line = [type(message).__name__, about.hex(), hashlib.sha256(message.to_bytes()).hexdigest()]
            with self._sent.open("a") as file:
                file.write(json.dumps(line) + "\n")


class KillableAgent(Agent):
    """A site that kills itself at the step that its order names."""

    @property
    def kill_order(self) -> KillOrder:
        return KillOrder(self.state_dir.folder.parent, SITE_STEPS)

    def execute(self, effect: SiteEffect) -> Iterator[bytes]:
        thing = effect.message if isinstance(effect, Send) else effect
        end = self.kill_order.moment(thing) if isinstance(effect, Send | SendUpload | DraftState | SaveState) else None
        if end == "before":
            self.kill_order.obey()
        if isinstance(effect, Send):
            self.kill_order.record(effect.message)
        for sent, data in enumerate(super().execute(effect)):
            if end == "during" and sent:
                self.kill_order.obey()
            yield data
        if end == "after":
            self.kill_order.obey()


class KillableShell(Shell):
    """A coordinator that kills itself before the first message of a step is put into a queue, when its record is on
    disk."""

    @property
    def kill_order(self) -> KillOrder:
        return KillOrder(self.storage.folder.parent, COORDINATOR_STEPS)

    def perform(self, effect: CoordinatorEffect) -> None:
        if isinstance(effect, Send):
            if self.kill_order.moment(effect.message) == "before":
                self.kill_order.obey()
            self.kill_order.record(effect.message)
        super().perform(effect)


class KillableService(Service):
    """A coordinator that kills itself when the first site has been sent a step's message, and the others have not."""

    async def deliver(self, stream: Stream, message: Wire, context: Any) -> None:
        await super().deliver(stream, message, context)
        if isinstance(self.shell, KillableShell) and self.shell.kill_order.moment(message) == "after":
            self.shell.kill_order.obey()


CONFIG = click.option("--config", "path", type=click.Path(path_type=Path), required=True)


class KeepingAgent(KillableAgent):
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
        run_until_stopped(*CoordinatorConfig.read(path), shell_type=KillableShell, service_type=KillableService)


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
