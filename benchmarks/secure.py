"""The shipped agent and coordinator with a clock: when a burst begins, when each site has its result, what checks cost.

`python -m benchmarks.secure coordinator|site CONFIG`
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.times import note
from coordinator.config import CoordinatorConfig
from coordinator.effects import Effect as CoordinatorEffect
from coordinator.service import Service, run_until_stopped
from coordinator.shell import Shell
from coordinator.streams import Stream
from scripts.one_machine.numbers import make_number_learner
from security.clock import SystemClock
from security.rng import SystemRandomness
from security.secagg.effects import Advanced, Certified, Send
from security.secagg.messages import ChunkPiece, Plan
from security.secagg.wire import Wire
from site_agent.agent import Agent
from site_agent.assembly import assemble
from site_agent.cli import stop_on_signals
from site_agent.client import serve
from site_agent.config import SiteConfig
from site_agent.effects import Effect as SiteEffect


class TimedShell(Shell):
    checking = 0

    @property
    def times(self) -> Path:
        return self.storage.folder.parent / "times"

    def perform(self, effect: CoordinatorEffect) -> None:
        if isinstance(effect, Send) and isinstance(effect.message, Plan):
            note(self.times, "plan", effect.message.context.round)
        super().perform(effect)
        if isinstance(effect, Certified):
            note(self.times, "checked", self.results, self.checking)


class TimedService(Service):
    async def deliver(self, stream: Stream, message: Wire, context: Any) -> None:
        before = stream.bytes_out
        await super().deliver(stream, message, context)
        if isinstance(message, ChunkPiece) and isinstance(self.shell, TimedShell):
            self.shell.checking += stream.bytes_out - before


class TimedAgent(Agent):
    def execute(self, effect: SiteEffect) -> Iterator[bytes]:
        yield from super().execute(effect)
        if isinstance(effect, Advanced):
            note(self.vault.folder.parent / "times", "result", effect.round)


def main() -> None:
    role, path = sys.argv[1], Path(sys.argv[2])
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    if role == "coordinator":
        run_until_stopped(*CoordinatorConfig.read(path), shell_type=TimedShell, service_type=TimedService)
        return
    config = SiteConfig.read(path)
    agent = assemble(
        config,
        clock=SystemClock(),
        rng=SystemRandomness(),
        make_learner=make_number_learner,
        agent_type=TimedAgent,
    )
    asyncio.run(serve(agent, config.coordinator, until=stop_on_signals))


if __name__ == "__main__":
    main()
