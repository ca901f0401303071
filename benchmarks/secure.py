"""The shipped agent and coordinator with a clock: begin of an aggregation, result at each site, cost of checks.

`python -m benchmarks.secure coordinator CONFIG` and `python -m benchmarks.secure site CONFIG...`: several sites may
share a process where only the coordinator is looked at.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.times import note
from coordinator.config import CoordinatorConfig
from coordinator.effects import Effect as CoordinatorEffect
from coordinator.run import Shell
from coordinator.send_queue import Stream
from coordinator.service import Service, run_until_stopped
from lazaret.kernel_bytes import Meter
from scripts.local_federation.known_updates import make_number_learner
from security.clock import SystemClock
from security.rng import SystemRandomness
from security.secagg.certificates import Ack, Advert
from security.secagg.effects import Advanced, Certified, Send
from security.secagg.fields import Wire
from security.secagg.messages import ChunkPiece, Plan, SumFrame
from site_agent.assembly import assemble
from site_agent.client import serve
from site_agent.config import SiteConfig
from site_agent.effects import Effect as SiteEffect
from site_agent.run import Agent


class TimedShell(Shell):
    """Its burst is from the plan to the last frame of the sum; the check of the sum goes on until its certificate."""

    checking, sent = 0, 0.0

    @property
    def times(self) -> Path:
        return self.storage.folder.parent / "times"

    def perform(self, effect: CoordinatorEffect) -> None:
        if isinstance(effect, Send) and isinstance(effect.message, Plan):
            note(self.times, "plan", effect.message.context.round, time.process_time())
        super().perform(effect)
        if isinstance(effect, Certified):
            note(self.times, "checked", self.results, self.checking)
            note(self.times, "burst over", self.results, self.sent)
            note(self.times, "check over", self.results, time.process_time())


class TimedService(Service):
    async def deliver(self, stream: Stream, message: Wire, context: Any) -> None:
        before, kind, one = stream.bytes_out, type(message), [message]
        del message  # as in the service: it is not held while its bytes are under way
        await super().deliver(stream, one.pop(), context)
        if kind is ChunkPiece and isinstance(self.shell, TimedShell):
            self.shell.checking += stream.bytes_out - before
        if kind is SumFrame and isinstance(self.shell, TimedShell):
            self.shell.sent = time.process_time()


class TimedAgent(Agent):
    """Its burst is from the message that it answers with its advert to the model that follows from the sum; its check
    of the sum goes on until it has acknowledged it.
    """

    bursts, began = 0, 0.0

    @property
    def times(self) -> Path:
        return self.state_dir.folder.parent / "times"

    def received(self, data: bytes) -> Iterator[bytes]:
        self.began = time.process_time()
        yield from super().received(data)

    def execute(self, effect: SiteEffect) -> Iterator[bytes]:
        message = effect.message if isinstance(effect, Send) else None
        if isinstance(message, Advert):
            self.bursts += 1
            note(self.times, "burst", self.bursts, self.began)
        yield from super().execute(effect)
        if isinstance(effect, Advanced):
            note(self.times, "result", effect.round)
            note(self.times, "burst over", self.bursts, time.process_time())
        if isinstance(message, Ack):
            note(self.times, "check over", self.bursts, time.process_time())


async def take_part(paths: list[Path]) -> None:
    """Several agents in one process. The connections of a process are counted once: each agent would look at those of
    all others ten times a second, which no agent with a process of its own does.
    """
    stopped: list[asyncio.Event] = []
    agents = []
    counted: Meter | None = None
    for path in paths:
        config = SiteConfig.read(path)
        agent = assemble(
            config,
            clock=SystemClock(),
            rng=SystemRandomness(),
            make_learner=make_number_learner,
            agent_type=TimedAgent,
        )
        agents.append(serve(agent, config.coordinator, counted=counted, until=stopped.append))
        counted = Meter(lambda: None)
    tasks = [asyncio.create_task(agent) for agent in agents]
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, lambda: [event.set() for event in stopped])
    await asyncio.gather(*tasks)


def main() -> None:
    role, *paths = sys.argv[1], *(Path(word) for word in sys.argv[2:])
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    if role == "coordinator":
        run_until_stopped(*CoordinatorConfig.read(paths[0]), shell_type=TimedShell, service_type=TimedService)
        return
    asyncio.run(take_part(paths))


if __name__ == "__main__":
    main()
