"""Processes killed (SIGKILL) at named steps of the protocol, for the demo and the tests; no shipped command uses it.

A site is killed before, during or after sending S1 to S5, or while it writes the next model; a coordinator before or
after sending C0 to C5 (docs/spec/secure-aggregation.md, section 1). The process sends SIGKILL to itself, so nothing is
cleaned up. The order is a file with one line such as `before-S3`; the process deletes the file first, so that it is
killed once only.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from coordinator.effects import Effect as CoordinatorEffect
from coordinator.run import Shell
from coordinator.send_queue import Stream
from coordinator.service import Service
from security.secagg import messages
from security.secagg.certificates import Advert
from security.secagg.effects import DraftState, SaveState, Send, SendUpload
from security.secagg.fields import Wire
from site_agent.effects import Effect as SiteEffect
from site_agent.run import Agent

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
# What a party may say once only in an attempt; words about one thing must always be the same words.
PROMISES: Final = (
    Advert, messages.Shares, messages.UploadHeader, messages.Agree, messages.Unmask,
    messages.Plan, messages.Adverts, messages.Survivors, messages.Result,
)  # fmt: skip


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Fate:
    """At which step one party is to be killed, and what it has sent so far."""

    def __init__(self, folder: Path, steps: dict[str, type[Any]]) -> None:
        self._order = folder / "ending"
        self._said = folder / "said.jsonl"
        self._steps = steps

    def of(self, thing: object) -> str | None:
        """`before`, `amid` or `after` if this is what to die at."""
        try:
            when, _, step = self._order.read_text().strip().partition("-")
        except FileNotFoundError:
            return None
        return when if isinstance(thing, self._steps[step]) else None

    def meet(self) -> None:
        self._order.unlink()
        die()

    def note(self, message: Wire) -> None:
        """Write down what is about to be said, for whoever compares later."""
        if isinstance(message, PROMISES):
            about = getattr(message, "kx", None) or getattr(message, "ctx", None) or message.context.ctx()
            line = [type(message).__name__, about.hex(), hashlib.sha256(message.to_bytes()).hexdigest()]
            with self._said.open("a") as file:
                file.write(json.dumps(line) + "\n")


class MortalAgent(Agent):
    """A site that kills itself at the step that its order names."""

    @property
    def fate(self) -> Fate:
        return Fate(self.state_dir.folder.parent, SITE_STEPS)

    def execute(self, effect: SiteEffect) -> Iterator[bytes]:
        thing = effect.message if isinstance(effect, Send) else effect
        end = self.fate.of(thing) if isinstance(effect, Send | SendUpload | DraftState | SaveState) else None
        if end == "before":
            self.fate.meet()
        if isinstance(effect, Send):
            self.fate.note(effect.message)
        for sent, data in enumerate(super().execute(effect)):
            if end == "amid" and sent:
                self.fate.meet()
            yield data
        if end == "after":
            self.fate.meet()


class MortalShell(Shell):
    """A coordinator that kills itself before the first message of a step is put into a queue, when its record is on
    disk."""

    @property
    def fate(self) -> Fate:
        return Fate(self.storage.folder.parent, COORDINATOR_STEPS)

    def perform(self, effect: CoordinatorEffect) -> None:
        if isinstance(effect, Send):
            if self.fate.of(effect.message) == "before":
                self.fate.meet()
            self.fate.note(effect.message)
        super().perform(effect)


class MortalService(Service):
    """A coordinator that kills itself when the first site has been sent a step's message, and the others have not."""

    async def deliver(self, stream: Stream, message: Wire, context: Any) -> None:
        await super().deliver(stream, message, context)
        if isinstance(self.shell, MortalShell) and self.shell.fate.of(message) == "after":
            self.shell.fate.meet()
