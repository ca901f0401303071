"""A coordinator's engine with real storage, and real site machines on the other end of a list of messages.

No network: every message goes through the protocol's codec as bytes. A site trains by adding its own known vector.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.effects import CloseRound, Effects, OpenRound, StoreBlame
from coordinator.phases import RunPlan
from coordinator.results import Chain
from coordinator.rounds import RoundEngine
from coordinator.storage import Storage
from lazaret.errors import ToolkitError
from protos.loopback import LoopbackFederation
from protos.parse import FROM_COORDINATOR, FROM_SITE, Direction, Parcel
from protos.stream_end import empty_log_head
from security.clock import ManualClock
from security.rng import CountedRandomness
from security.secagg import messages
from security.secagg.clips import Clips
from security.secagg.coordinator.recovery import restore_round
from security.secagg.coordinator.spool import FileSpool
from security.secagg.coordinator.uploads import CoordinatorCore
from security.secagg.effects import (
    REFUSED,
    AskVote,
    Certified,
    Compact,
    Discard,
    Ended,
    Persist,
    SaveState,
    Send,
    SendFrames,
    SendUpload,
    VotedDown,
)
from security.secagg.fields import Wire
from security.secagg.fixed_point import encode
from security.secagg.layout import Layout
from security.secagg.relay import FRAMES, Decline, Ping, Pong
from security.secagg.site.attempt import PendingUpdate
from security.secagg.site.journal import Journal
from security.secagg.site.machine import SiteMachine
from security.secagg.state import canonical, state_hash

WORDS = 40
CONFIG = bytes(32)


class EngineWorld:
    """`sites` hospitals, a folder, and a coordinator that can be killed between any two effects."""

    def __init__(
        self,
        folder: Path,
        sites: int = 4,
        rounds: int = 3,
        vote: Callable[[str, np.ndarray, np.ndarray], bool] | None = None,
    ) -> None:
        names = [f"site{number}" for number in range(sites)]
        blocks = [Clips(learning_rate=0.01, steps=10).weights("w", (WORDS,))]
        self.layout = Layout.of(blocks, roster_size=sites, weight_cap=1)
        self.clock = ManualClock()
        self.initial = canonical(np.zeros(WORDS, dtype="<f4"))
        self.base = LoopbackFederation(
            self.layout, names, self.initial, randomness=CountedRandomness(b"engine"), clock=self.clock, vote=vote
        )
        self.folder = folder
        self.plan = RunPlan(rounds=rounds, config_hash=CONFIG, train_ms=10_000, least=0, grace_ms=1000, ping_ms=500)
        self.offline: set[str] = set()
        self.to_site: deque[tuple[str, bytes]] = deque()
        self.to_coordinator: deque[tuple[str, bytes]] = deque()
        self.closed: list[tuple[int, str]] = []
        self.errors: list[ToolkitError] = []
        self.silent: set[tuple[str, type[Wire]]] = set()
        self.states: dict[str, dict[bytes, np.ndarray]] = {
            name: {state_hash(self.initial): self.initial} for name in names
        }
        self.start_coordinator()

    @property
    def names(self) -> list[str]:
        return sorted(self.base.sites)

    # The coordinator's process.

    def start_coordinator(self) -> None:
        self.storage = Storage(self.folder)
        self.storage.save_state(self.initial)
        core = CoordinatorCore(
            mandate=self.base.core.mandate,
            spool=FileSpool(self.storage.spool),
            clock=self.clock,
            load_deals=self.storage.history.deals,
        )
        history = self.storage.history
        book = history.blame_book({entry.site: entry.cert for entry in self.base.policy.roster})
        chain = Chain(
            history.links(),
            core.mandate,
            core.spool,
            load_result=history.result,
            load_check=history.certificate,
            load_state=self.storage.load_state,
        )
        model = self.storage.load_state(chain.head.state_hash) if chain.head else self.initial
        core.movements = chain.movements()
        completed = history.completed()
        before = history.earlier_attempts(core.policy.initial_state_hash)
        options: Any = {"completed": completed, "first": self.initial, "before": before}
        self.engine = RoundEngine(core, book, self.plan, chain, model, **options)
        found = history.newest_records()
        rebuilt = restore_round(core, book, found, self.storage.load_state, load_check=history.certificate)
        start = history.open_round()
        if start is not None:
            first = self.engine.restore(start, rebuilt)
        elif self.engine.completed >= self.plan.rounds:
            first = self.engine.restore_done(rebuilt)
        else:
            first = self.engine.start(history.last_round(), rebuilt)
        self.do_coordinator(first)
        for name in self.names:
            if name not in self.offline:
                self.connect(name)

    def kill_coordinator(self) -> None:
        """Everything on its way is lost; only the folder stays."""
        self.storage.close()
        self.to_site.clear()
        self.to_coordinator.clear()

    def connect(self, name: str) -> None:
        self.offline.discard(name)
        self.do_site(name, (Send(self.base.sites[name].machine.hello()),))

    def restart_site(self, name: str) -> None:
        site = self.base.sites[name]
        journal = Journal.replay(site.wal)
        head, known = journal.head(self.base.policy), self.states[name]
        core = replace(site.machine.core, journal=journal)
        site.machine = SiteMachine(core, known[head.state_hash], known.get(head.trained_on))
        self.engine.gone(name)
        self.do_site(name, site.machine.start())
        self.offline.discard(name)

    def disconnect(self, name: str) -> None:
        self.offline.add(name)
        self.do_coordinator(self.engine.gone(name))

    # Effects.

    def do_coordinator(self, effects: Effects) -> None:
        for effect in effects:
            match effect:
                case Persist() | SaveState() | Certified() | VotedDown() | OpenRound() | StoreBlame():
                    self.storage.keep([effect], now_ms=0)
                case CloseRound(number, outcome):
                    self.closed.append((number, outcome))
                    self.storage.keep([effect], now_ms=0)
                case Send(message, to):
                    self._to(to, message)
                case SendFrames(to, frames):
                    for frame in frames():
                        self._to(to, frame)
                case Discard(keys):
                    for key in keys:
                        self.engine.core.spool.remove(key)

    def _to(self, name: str, message: Wire) -> None:
        if name not in self.offline:
            self.to_site.append((name, _bytes(FROM_COORDINATOR, message)))

    def do_site(self, name: str, effects: tuple) -> None:
        site = self.base.sites[name]
        for effect in effects:
            match effect:
                case Persist(record):
                    site.wal.append(record)
                case Compact(records):
                    site.wal[:] = records
                case Send(message):
                    if (name, type(message)) not in self.silent:
                        self.to_coordinator.append((name, _bytes(FROM_SITE, message)))
                case SendUpload():
                    self.to_coordinator.extend((name, _bytes(FROM_SITE, frame)) for frame in effect.frames())
                case SaveState(digest, state):
                    self.states[name][digest] = state
                case Ended(_, outcome, error) if outcome == REFUSED and error is not None:
                    self.errors.append(error)
                case AskVote() if self.base.vote is not None:
                    accept = self.base.vote(name, effect.before, effect.state)
                    self.do_site(name, site.machine.vote(effect.result, accept=accept))

    # Running.

    def train(self, name: str, order: messages.TrainOrder) -> None:
        """The site's update in round r is (its number + 1) * r / 1000 everywhere."""
        site = self.base.sites[name]
        value = (self.names.index(name) + 1) * order.round / 1000
        words = encode(self.layout, np.full(WORDS, value, dtype=np.float32), weight=1).words
        update = PendingUpdate(round=order.round, state_hash=order.state_hash, config_hash=CONFIG, words=words)
        self.do_site(name, site.machine.load_update(update))
        self.do_site(name, (Send(messages.Ready(site=name, round=order.round)),))

    def step(self) -> bool:
        """Deliver one message; False when nothing is under way."""
        if self.to_site:
            name, data = self.to_site.popleft()
            self._site_receives(name, FROM_COORDINATOR.decode(data).message)
            return True
        if self.to_coordinator:
            name, data = self.to_coordinator.popleft()
            if name not in self.offline:
                try:
                    self.do_coordinator(self.engine.receive(name, FROM_SITE.decode(data).message))
                except ToolkitError as error:
                    self.errors.append(error)
            return True
        return False

    def _site_receives(self, name: str, message: Wire) -> None:
        if name in self.offline:
            return
        machine = self.base.sites[name].machine
        try:
            if isinstance(message, Ping):
                self.do_site(name, (Send(Pong(number=message.number)),))
                return
            self.do_site(name, machine.receive(message))
            if isinstance(message, messages.TrainOrder):
                self.train(name, message)
        except ToolkitError as error:
            self.errors.append(error)
            if isinstance(message, messages.TrainOrder):
                self.do_site(name, (Send(Decline(site=name, round=message.round)),))

    def run(self, *, until: int, most: int = 20_000) -> None:
        """Deliver messages, and let time pass when there are none, until `until` rounds are closed."""
        for _ in range(most):
            if len(self.closed) >= until and not self.to_site and not self.to_coordinator:
                return
            if not self.step():
                self.clock.advance(300)
                for name, site in self.base.sites.items():
                    if name not in self.offline:
                        self.do_site(name, site.machine.tick())
                self.do_coordinator(self.engine.tick())
        raise AssertionError(f"stuck: {self.engine.phase}, closed {self.closed}, errors {self.errors[-3:]}")


HEAD = empty_log_head("somebody", "engine", bytes(32))


def _bytes(direction: Direction, message: Wire) -> bytes:
    """The parcel of the network. Its place on the stream is 1: the order of streams is tested with the shells."""
    head = None if type(message) in FRAMES else HEAD
    return direction.encode(Parcel(message=message, sequence=1, log_head=head))
