"""A coordinator that is assembled from real keys and files and not on the network, and its page beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from coordinator.assembly import Assembled, assemble
from coordinator.config import CoordinatorConfig
from coordinator.dashboard.live import Live
from coordinator.dashboard.server import PhaseClock, pages
from coordinator.dashboard.state_json import LogCheckpoints, PageState
from coordinator.effects import CloseRound, OpenRound
from coordinator.round_history import ReadOnlyHistory
from coordinator.storage import Storage
from lazaret.web.access import Address, Guard
from lazaret.web.server import WebServer
from security.log.roster import audit_roster
from security.rng import CountedRandomness
from security.secagg import records
from security.secagg.certificates import CheckCertificate
from security.secagg.coordinator.rounds import RoundStart
from security.secagg.effects import Certified, Persist
from security.secagg.published import result_digests
from tests.support.consortium_world import World
from tests.support.engine_world import EngineWorld

CONFIG = """
identity = "hub"
state = "state"
listen = "127.0.0.1:0"
initial_model = "consortium/initial.safetensors"
"""


@dataclass
class Hub:
    """Everything of a coordinator but the network."""

    world: World
    config: CoordinatorConfig
    ready: Assembled
    page: PageState
    phases: PhaseClock

    @classmethod
    def make(cls, folder: Path, sites: Sequence[str] = ("graz", "linz", "vienna"), more: str = "") -> Hub:
        world = World.make(folder, sites)
        world.publish()
        world.identity("hub").install_manifest(world.published(), now_ms=world.now)
        (folder / "coordinator.toml").write_text(CONFIG + more)
        config, base = CoordinatorConfig.read(folder / "coordinator.toml")
        ready = assemble(config, base, clock=world.clock, rng=CountedRandomness(b"hub"))
        storage, manifest = ready.shell.storage, ready.manifest
        heads = LogCheckpoints(storage.log, audit_roster(manifest), manifest.coordinator.id)
        page = PageState(manifest, ReadOnlyHistory(storage.path), heads)
        hub = cls(world, config, ready, page, PhaseClock())
        hub.look()
        return hub

    @property
    def storage(self) -> Storage:
        return self.ready.shell.storage

    def look(self) -> Live:
        """What the service does several times a second."""
        self.page.look(Live.of(self.ready.shell))
        self.phases.look(self.ready.shell.engine.phase, self.world.clock.mono_ms())
        return self.page.live

    def close(self) -> None:
        self.page.history.close()
        self.ready.shell.books.log.close()
        self.storage.close()

    @contextmanager
    def serving(self) -> Iterator[WebServer]:
        server = WebServer(pages(self.page, self.phases, Guard()).answer, Address(host="127.0.0.1", port=0))
        server.start()
        try:
            yield server
        finally:
            server.stop()


@dataclass(frozen=True)
class Sample:
    """The records of one round that real machines have made, to be written again under other numbers."""

    planned: records.Planned
    shown: records.SurvivorsShown
    result: records.ResultShown
    check: CheckCertificate

    @classmethod
    def of(cls, folder: Path, sites: int) -> Sample:
        world = EngineWorld(folder, sites=sites, rounds=1)
        world.run(until=1, most=200_000)
        found = {type(record): record for record in world.storage.history.newest_records()}
        link = world.storage.history.links()[0]
        check = world.storage.history.certificate(link.result_hash)
        assert check is not None
        world.kill_coordinator()
        return cls(
            found[records.Planned],
            found[records.SurvivorsShown],
            found[records.ResultShown],
            check,
        )

    def write(self, storage: Storage, number: int, *, now_ms: int, open_round: bool = True) -> None:
        """One published and checked round, as the engine's effects would have it."""
        plan, result = self.planned.plan, self.result.result
        context = replace(plan.context, round=number)
        digest = number.to_bytes(32, "big")
        start = RoundStart(
            round=number, state_hash=digest, config_hash=context.config_hash, prev_result=context.prev_result
        )
        planned = records.Planned(plan=replace(plan, context=context))
        shown = replace(result, context=context, state_hash=digest)
        if open_round:
            storage.keep([OpenRound(start)], now_ms=now_ms)
        storage.keep([Persist(planned, number)], now_ms=now_ms + 30_000)
        storage.keep(
            [
                Persist(self.shown, number),
                Persist(records.ResultShown(result=shown), number),
                Certified(result_digests(shown)[2], self.check),
                CloseRound(number, "published"),
            ],
            now_ms=now_ms + 60_000,
        )
