"""A listed site, and a coordinator, that send false and damaged messages among their honest ones in every phase.

`python -m benchmarks.stress.fuzzing_parties site --config site.toml --seed 7`. Each writes what it has sent to
`fuzz.json` beside its configuration, and is honest from the moment that a file `calm` stands there.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, deque
from pathlib import Path
from typing import Any, ClassVar, Final

import click

from benchmarks.stress.corruption import Corruptor, numbered
from coordinator.config import CoordinatorConfig
from coordinator.send_queue import Stream
from coordinator.service import Service, run_until_stopped
from lazaret.errors import ToolkitError
from lazaret.process import ending_well, stop_on_signals
from lazaret.terminal import run_command
from protos.parse import FROM_COORDINATOR, FROM_SITE, Parcel
from scripts.local_federation.known_updates import make_number_learner
from scripts.local_federation.party import log_to_stderr
from security.clock import SystemClock
from security.rng import SystemRandomness
from security.secagg.fields import Wire
from security.secagg.messages import Hello
from security.secagg.relay import FRAMES, Goodbye, ManifestFrame, Open, SignedHead
from site_agent import client
from site_agent.assembly import assemble
from site_agent.config import SiteConfig

VICTIM: Final = "site0"
FIRST: Final = 0.05  # how often a false one stands before an honest one, be it Open
PAUSE: Final = 0.05
BURST = click.option("--burst", type=int, default=60, help="At most so many false messages at once.")
CONFIG = click.option("--config", "path", type=click.Path(path_type=Path), required=True)
SEED = click.option("--seed", type=int, default=0)
DAMAGED = click.option("--damaged", type=float, default=0.01, help="Of all false messages; each ends its stream.")


class Tally:
    """What was sent, by phase and by kind, over all lives of the process."""

    def __init__(self, home: Path) -> None:
        self._home, self._path = home, home / "fuzz.json"
        kept = json.loads(self._path.read_text()) if self._path.exists() else {}
        self.phases = Counter(kept.get("phases", {}))
        self.kinds = Counter(kept.get("kinds", {}))
        self.starts = kept.get("lives", 0) + 1

    @property
    def calm(self) -> bool:
        return (self._home / "calm").exists()

    def note(self, phase: str, kind: str) -> None:
        self.phases[phase] += 1
        self.kinds[kind] += 1
        if self.phases.total() % 50 == 0:
            self.write()

    def write(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({"lives": self.starts, "phases": self.phases, "kinds": self.kinds}))
        new.rename(self._path)


class FuzzingClient(client.Client):
    """The shipped agent's own messages, with new numbers, among false ones."""

    corruptor: Corruptor
    tally: Tally
    damaged: float
    burst: int
    _sent = 0
    _phase = "connected"
    _head: SignedHead | None = None
    _session = 1
    _damaged = False  # this stream has ended, whatever is sent on it
    _opened: Any = None  # the stream on which Open was sent

    async def run(self) -> None:
        self._one = asyncio.Lock()  # a stream takes one write at a time
        pump = asyncio.create_task(self._pump())
        try:
            await super().run()
        finally:
            pump.cancel()
            self.tally.write()

    async def _write(self, payload: bytes) -> None:
        parcel = FROM_SITE.decode(payload)
        message = parcel.message
        if isinstance(message, Open):
            self._sent, self._session, self._phase, self._damaged = 0, message.session, "connected", False
            self._opened = self._call
        if parcel.log_head is not None:
            self._head = parcel.log_head
        self.corruptor.saw(message)
        async with self._one:
            if not self.tally.calm and self.corruptor.rng.random() < FIRST:
                await self._false()
            await self._post(message)

    async def _post(self, message: Wire) -> None:
        if self._damaged or self._head is None:
            return
        self._sent += 1
        await super()._write(numbered(FROM_SITE, message, self._sent, self._head))

    async def _false(self) -> None:
        """One false message, or a damaged one, which ends the stream."""
        if self._damaged or self._head is None or self._call is None or not self.corruptor:
            return
        message = self.corruptor.false()
        if isinstance(message, Open) and message.session > self._session:
            return  # taken at its word, it could never come back
        if isinstance(message, Hello) and self.corruptor.rng.random() > FIRST:
            return  # one that names an unknown result is sent away, and comes back a second later
        if self.corruptor.rng.random() >= self.damaged:
            self.tally.note(self._phase, type(message).__name__)
            try:
                await self._post(message)
            except ToolkitError:  # larger than a frame may be
                self._sent -= 1
            return
        head = None if type(message) in FRAMES else self._head
        parcel = Parcel(message=message, sequence=self._sent + 1, log_head=head)
        how, data = self.corruptor.damaged(parcel, FROM_COORDINATOR)
        self.tally.note(self._phase, how)
        if _is_next(data, self._sent + 1):
            self._sent += 1  # a digest was changed: well-formed, and only false
        else:
            self._damaged = True
        await super()._write(data)

    async def _pump(self) -> None:
        while True:
            await asyncio.sleep(PAUSE)
            # Before Open there is no stream yet on which others could follow.
            quiet = self.tally.calm or self._call is None or self._call is not self._opened
            for _ in range(0 if quiet else self.corruptor.rng.randint(1, self.burst)):
                async with self._one:
                    await self._false()

    def _received(self, call: Any, data: bytes) -> Any:
        self._phase = type(FROM_COORDINATOR.decode(data).message).__name__
        yield from super()._received(call, data)


def _is_next(data: bytes, number: int) -> bool:
    try:
        return FROM_SITE.decode(data).sequence == number
    except ToolkitError:
        return False


class FuzzingService(Service):
    """A coordinator with its good keys that tells its victim false things too."""

    corruptor: Corruptor
    tally: Tally
    damaged: float
    burst: int
    _phase = "connected"
    _planted: ClassVar[deque[Wire]] = deque(maxlen=500)  # false ones: new ones are made from real ones only

    async def serve(self, *given: Any, **named: Any) -> None:
        pump = asyncio.create_task(self._pump())
        try:
            await super().serve(*given, **named)
        finally:
            pump.cancel()
            self.tally.write()

    async def deliver(self, stream: Stream, message: Wire, context: Any) -> None:
        if stream.site != VICTIM or self.tally.calm:
            await super().deliver(stream, message, context)
            return
        if self.corruptor and self.corruptor.rng.random() < self.damaged:
            data = stream.encode(message, self.shell.books)
            how, data = self.corruptor.damaged(FROM_COORDINATOR.decode(data), FROM_SITE)
            self.tally.note(self._phase, how)
            await context.write(data)
            return
        if message not in self._planted:
            self.corruptor.saw(message)
            self._phase = type(message).__name__
        await super().deliver(stream, message, context)

    async def _pump(self) -> None:
        while True:
            await asyncio.sleep(PAUSE)
            stream = self.shell.streams.get(VICTIM)
            if stream is not None and self.corruptor and not self.tally.calm:
                stream.put(self._some())

    def _some(self) -> list[Wire]:
        """A manifest that is false, and a farewell, end the agent by design: they are rare, or nothing else is seen."""
        rng = self.corruptor.rng
        found = [self.corruptor.false() for _ in range(rng.randint(1, self.burst))]
        kept = [message for message in found if not isinstance(message, Goodbye | ManifestFrame) or rng.random() < 0.02]
        for message in kept:
            self.tally.note(self._phase, type(message).__name__)
        self._planted.extend(kept)
        return kept


@click.group()
def cli() -> None:
    """Parties that fuzz the other end."""


@cli.command()
@CONFIG
@SEED
@DAMAGED
@BURST
def site(path: Path, seed: int, damaged: float, burst: int) -> None:
    """A listed site."""
    log_to_stderr()
    tally = Tally(path.parent)
    FuzzingClient.damaged, FuzzingClient.burst = damaged, burst
    FuzzingClient.tally, FuzzingClient.corruptor = tally, Corruptor(f"site {seed} {tally.starts}")
    client.Client = FuzzingClient  # type: ignore[misc]
    with ending_well():
        config = SiteConfig.read(path)
        agent = assemble(config, clock=SystemClock(), rng=SystemRandomness(), make_learner=make_number_learner)
        until = lambda stopped: stop_on_signals(stopped.set)  # noqa: E731
        asyncio.run(client.serve(agent, config.coordinator, until=until))


@cli.command()
@CONFIG
@SEED
@DAMAGED
@BURST
def coordinator(path: Path, seed: int, damaged: float, burst: int) -> None:
    """The coordinator."""
    log_to_stderr()
    tally = Tally(path.parent)
    FuzzingService.damaged, FuzzingService.burst = damaged, burst
    FuzzingService.tally, FuzzingService.corruptor = tally, Corruptor(f"coordinator {seed} {tally.starts}")
    with ending_well():
        run_until_stopped(*CoordinatorConfig.read(path), service_type=FuzzingService)


if __name__ == "__main__":
    run_command(cli, "party")
