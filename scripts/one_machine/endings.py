"""Sudden deaths at named steps of the protocol, for the demo and the tests. The shipped commands know nothing of it.

A site dies before or after it sends S1 to S5, a coordinator before or after it sends C0 to C5
(docs/spec/secure-aggregation.md names them), always by SIGKILL from its own hand: nothing is tidied up.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from coordinator.effects import Effect as CoordinatorEffect
from coordinator.service import Service
from coordinator.shell import Shell
from coordinator.streams import Stream
from security.secagg import messages
from security.secagg.certificates import Advert
from security.secagg.effects import Send
from security.secagg.wire import Wire
from site_agent.agent import Agent
from site_agent.effects import Effect as SiteEffect
from site_agent.effects import Post, PostVector, Train

SITE_STEPS: Final[dict[str, type[Any]]] = {
    "T": Train,
    "S1": Advert,
    "S2": messages.Shares,
    "S3": PostVector,
    "S4": messages.Agree,
    "S5": messages.Unmask,
}
COORDINATOR_STEPS: Final[dict[str, type[Wire]]] = {
    "C0": messages.Plan,
    "C1": messages.Adverts,
    "C2": messages.Deliver,
    "C3": messages.Survivors,
    "C4": messages.Quorum,
    "C5": messages.Result,
}


@dataclass(frozen=True, slots=True)
class Ending:
    """When to die: `before-S3@4` is before the upload of round 4, `after-C1@2` once the first site has its C1."""

    when: str
    step: str
    round: int

    @classmethod
    def parse(cls, text: str) -> Ending:
        found = re.fullmatch(r"(before|after|amid)-([A-Z][0-9]?)@([0-9]+)", text)
        if found is None or found[2] not in SITE_STEPS | COORDINATOR_STEPS:
            raise ValueError(f"no such ending: {text}")
        return cls(found[1], found[2], int(found[3]))

    def __str__(self) -> str:
        return f"{self.when}-{self.step}@{self.round}"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class MortalAgent(Agent):
    """A site that dies at its ending."""

    ending: Ending | None = None

    def execute(self, effect: SiteEffect) -> Iterator[bytes]:
        met = self._meets(effect)
        if met == "before":
            die()
        for sent, data in enumerate(super().execute(effect)):
            if met == "amid" and sent:
                die()
            yield data
        if met == "after":
            die()

    def _meets(self, effect: SiteEffect) -> str | None:
        """How, if at all, this effect is the one to die at."""
        if self.ending is None:
            return None
        kind = SITE_STEPS[self.ending.step]
        named = effect.message if isinstance(effect, Post) else effect
        number = getattr(effect, "round", None)
        return self.ending.when if isinstance(named, kind) and number == self.ending.round else None


class MortalShell(Shell):
    """A coordinator that dies before the first message of a step is put into a queue, when its record is on disk."""

    ending: Ending | None = None

    def perform(self, effect: CoordinatorEffect) -> None:
        if isinstance(effect, Send) and meets(self, effect.message, "before"):
            die()
        super().perform(effect)


class MortalService(Service):
    """A coordinator that dies when the first site has been sent a step's message, and the others have not."""

    async def deliver(self, stream: Stream, message: Wire, context: Any) -> None:
        await super().deliver(stream, message, context)
        if isinstance(self.shell, MortalShell) and meets(self.shell, message, "after"):
            die()


def meets(shell: MortalShell, message: Wire, when: str) -> bool:
    ending = shell.ending
    if ending is None or ending.when != when or not isinstance(message, COORDINATOR_STEPS[ending.step]):
        return False
    current = shell.engine.round if ending.step != "C5" else None
    number = message.context.round if isinstance(message, messages.Plan | messages.Result) else None
    return (number if number is not None else current.start.round if current else None) == ending.round
