"""A whole federation in one process: the coordinator and the agents that ship, with their files, and a clock by hand.

Only sockets and TLS handshakes are left out: every message is the bytes of the wire, counted for each party by the
network that carries it, and who speaks is checked by its certificate as the service does. So weeks pass in a moment,
and certificates end in mid-run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from coordinator.assembly import assemble as assemble_coordinator
from coordinator.config import CoordinatorConfig, Rounds
from coordinator.round_history import RoundRow
from coordinator.run import Shell
from coordinator.send_queue import Stream
from coordinator.service import Service
from lazaret.control import BY_SIGNAL, NEXT_RUN
from lazaret.errors import ToolkitError
from protos.parse import FROM_SITE
from security.clock import Clock, ManualClock
from security.identity.manifest import Manifest
from security.identity.peers import check_tls_peer
from security.identity.pki import key_fingerprint
from security.log.egress import KernelByteLog
from security.rng import CountedRandomness
from security.secagg.context import PROTOCOL_VERSION
from security.secagg.fields import Wire
from security.secagg.relay import Goodbye, Open, Welcome, manifest_frames
from site_agent.assembly import assemble as assemble_site
from site_agent.client import WITNESS_SECONDS, end_log
from site_agent.config import SiteConfig
from site_agent.local_work import Job
from site_agent.run import Agent, Left, RunEnds
from tests.support.consortium_world import PLAN, World
from tests.support.memory_network import MemoryNetwork
from tests.support.site_world import Counting, write_config, write_wide_model
from tests.support.stand_in import standing_in

SITES = ("graz", "linz", "vienna", "wels")
STEP_MS = 250
TIMING = "\n[timing]\ntrain = 100\nmessage = 5\nupload = 10\n"


@contextmanager
def whole_federation(
    folder: Path, *, sites: tuple[str, ...] = SITES, rounds: int = 50, policy: str = "", more: str = ""
) -> Iterator[WholeFederation]:
    """One that is gone afterwards, with its files let go.

    :param policy: the sites' table of that name.
    :param more: of the consortium's plan.
    """
    made = WholeFederation(folder, sites=sites, rounds=rounds, policy=policy, more=more)
    try:
        yield made
    finally:
        if made.shell is not None:
            made.kill_hub()
        for site in list(made.agents):
            made.kill(site)


class WholeFederation:
    """Four hospitals and a hub that can be stopped, killed and started again."""

    learner_type: type[Counting] = Counting

    def __init__(
        self, folder: Path, *, sites: tuple[str, ...] = SITES, rounds: int = 50, policy: str = "", more: str = ""
    ) -> None:
        self.folder = folder
        self.policy = policy
        self.hub = "hub"
        self.clocks: dict[str, Clock] = {}  # of sites whose clock is another one
        self.world = World.make(folder, sites)
        self.clock: ManualClock = self.world.clock  # type: ignore[assignment]
        self.world.write_plan(PLAN.replace("rounds = 5", f"rounds = {rounds}") + TIMING + more)
        self.model_path = self.world.authority.folder / "initial.safetensors"
        write_wide_model(self.model_path)
        self.manifest: Manifest = self.world.publish()
        self.rng = CountedRandomness(b"whole federation")
        self.network = MemoryNetwork()
        self.configs: dict[str, Path] = {}
        self.agents: dict[str, Agent] = {}
        self.counts: dict[str, KernelByteLog] = {}
        self.learners: dict[str, Counting] = {}
        self.streams: dict[str, Stream] = {}
        self.jobs: dict[str, deque[Job]] = {}
        self.left: dict[str, ToolkitError] = {}
        self.refused: dict[str, ToolkitError] = {}
        self.started: list[str] = []  # agents that have gone on with the next run by themselves
        self.deaf: set[tuple[str, type[Wire]]] = set()  # what is lost on its way to the coordinator
        self.shell: Shell | None = None
        self.heartbeats = False  # as the client does it, twice a minute: also of sites that take part in nothing
        for member in ("hub", *sites):
            self.give_manifest(member)

    def give_manifest(self, member: str) -> None:
        self.world.identity(member).install_manifest(self.world.published(), now_ms=self.world.now)

    # Processes.

    def start_hub(self) -> Shell:
        config = CoordinatorConfig(
            identity=self.hub,
            state="hub-state",
            listen="127.0.0.1:1",
            initial_model=str(self.model_path),
            rounds=Rounds(grace=2.0, ping=1.0, audit=1.0),
        )
        ready = assemble_coordinator(config, self.folder, clock=self.clock, rng=self.rng)
        self.shell, self.service = ready.shell, Service(ready.shell, ready.identity, ready.seat)
        self.service.traffic = KernelByteLog(ready.shell.books.log, self.network.meter(self.hub))
        return ready.shell

    def kill_hub(self) -> None:
        """As SIGKILL would: files are let go, nothing is said."""
        assert self.shell is not None
        for site in list(self.streams):
            del self.streams[site]
            self.network.close(site, self.hub)
            self.agents[site].closed()
        self.shell.storage.close()
        self.shell.books.log._writer.close()
        self.shell = None

    def start(self, site: str) -> Agent:
        identity = self.world.identity(site)
        if site not in self.configs:
            folder = self.folder / f"{site}-agent"
            self.configs[site] = write_config(folder, identity.folder, self.model_path, self.policy)
        learner = self.learners[site] = self.learner_type(self.manifest.aggregation.layout.state_words)
        config = SiteConfig.read(self.configs[site])
        self.agents[site] = assemble_site(
            config,
            clock=self.clocks.get(site, self.clock),
            rng=self.rng,
            make_learner=standing_in(learner, "ab" * 32),
        )
        self.counts[site] = KernelByteLog(self.agents[site].log, self.network.meter(site))
        self.jobs[site] = deque()
        self.agents[site].submit = self.jobs[site].append
        return self.agents[site]

    def kill(self, site: str) -> None:
        agent = self.agents.pop(site)
        self._hang_up(site)
        agent.wal.close()
        agent.log._writer.close()

    def start_all(self) -> None:
        self.start_hub()
        for site in self.manifest.sites:
            self.start(site)

    def stop(self, *sites: str) -> None:
        """In order, as the client does: the end of the log is offered to witnesses, the last reading is taken."""
        for site in sites:
            if site in self.streams:
                self.agents[site].witnessing.expect_last()
                self._take(site, self.agents[site].last_head())
        for _ in range(int(1000 * WITNESS_SECONDS / STEP_MS)):
            if all(self.agents[site].witnessing.settled for site in sites if site in self.streams):
                break
            self.step()
        for site in sites:
            self._hang_up(site)
            agent = self.agents.pop(site)
            agent.closed()
            agent.log.close(partial(end_log, self.counts.pop(site), BY_SIGNAL))
            agent.wal.close()

    def stop_all(self) -> None:
        """In order: the coordinator has the last heads witnessed, and what it owes is given."""
        assert self.shell is not None
        self.shell.settle_receipts()
        self.shell.call_witnesses()
        self.pump()
        self.stop(*self.agents)
        self.service.traffic.close()
        self.shell.close(BY_SIGNAL)
        self.shell = None

    def adopt_at_hub(self) -> None:
        """The operator installs the newest manifest and restarts."""
        self.kill_hub()
        self.give_manifest(self.hub)
        self.start_hub()

    # Connections.

    def connect(self, site: str) -> None:
        """What the service does with a caller, from its certificate to the greeting."""
        assert self.shell is not None
        self.world.identity(site).settle_tls(now_ms=self.clock.now_ms())
        certificate = self.world.identity(site).tls_certificate()
        try:
            check_tls_peer(self.service.manifest, self.world.authority.root, certificate, now_ms=self.clock.now_ms())
        except ToolkitError as error:
            self.refused[site] = error
            return
        self.network.open(site, self.hub)
        (data,) = list(self.agents[site].opened())
        self.network.carry(site, self.hub, len(data))
        parcel = FROM_SITE.decode(data)
        told = parcel.message
        assert isinstance(told, Open)
        stream = Stream(site, told.session, key_fingerprint(certificate.public_key()))  # type: ignore[arg-type]
        refusal = self.service._refusal(site, told)
        if refusal is not None:
            self._deliver(site, stream, Goodbye(code=refusal))
            self.network.close(site, self.hub)
            if site in self.agents:  # for some reasons it stops for good
                self.agents[site].closed()
            return
        self.service._take(stream, parcel, data)
        manifest = self.service.manifest
        stream.put(
            [Welcome(protocol=PROTOCOL_VERSION, manifest_version=manifest.version, manifest_hash=manifest.digest)]
        )
        if told.manifest_version < manifest.version:
            stream.put(manifest_frames(self.service.identity.manifest_path.read_bytes(), manifest.version))
        self.streams[site] = stream
        self.shell.connected(stream)

    def _hang_up(self, site: str) -> None:
        stream = self.streams.pop(site, None)
        self.network.close(site, self.hub)
        if stream is not None and self.shell is not None:
            self.shell.disconnected(stream)

    def disconnect(self, site: str) -> None:
        self._hang_up(site)
        self.agents[site].closed()

    # Messages.

    def _deliver(self, site: str, stream: Stream, message: Wire) -> None:
        assert self.shell is not None
        data = stream.encode(message, self.shell.books)
        self.network.carry(self.hub, site, len(data))
        self._take(site, self.agents[site].received(data))

    def _take(self, site: str, payloads: Iterator[bytes]) -> None:
        try:
            for payload in payloads:
                stream = self.streams.get(site)
                if stream is None or self.shell is None:
                    continue
                self.network.carry(site, self.hub, len(payload))
                parcel = FROM_SITE.decode(payload)
                arrived = self.service._take(stream, parcel, payload)
                if (site, type(parcel.message)) not in self.deaf:
                    self.shell.received(stream, arrived)
        except RunEnds:
            self._next_run(site)
        except Left as left:
            self.left[site] = left.error
            self._hang_up(site)
            self.agents[site].closed()
            if not left.retry:
                self.kill(site)

    def _next_run(self, site: str) -> None:
        """As `serve` and the command do: the log ends in order, and everything is opened again in the same process."""
        self._hang_up(site)
        agent = self.agents.pop(site)
        agent.closed()
        agent.log.close(partial(end_log, self.counts.pop(site), NEXT_RUN))
        agent.wal.close()
        self.started.append(site)
        self.start(site)

    def _send_next(self) -> bool:
        """One message to one site; False when nothing waits."""
        for site, stream in list(self.streams.items()):
            while not stream.idle:
                message = stream.take()
                if message is not None:
                    self._deliver(site, stream, message)
                    return True
        return False

    def pump(self) -> None:
        while self._send_next():
            pass

    def step(self) -> None:
        """Everything that is under way, then a little time."""
        self.pump()
        for site in list(self.agents):
            jobs = self.jobs[site]
            while jobs and site in self.agents:
                self._take(site, self.agents[site].run(jobs.popleft()()()))
        self.pump()
        self.clock.advance(STEP_MS)
        for site in list(self.agents):
            if self.heartbeats:
                self.agents[site].heartbeat()
            self._take(site, self.agents[site].ticked())
        self.count()
        if self.shell is not None:
            self.shell.tick()
            self.service._witness_round()
        self.pump()

    def count(self) -> None:
        """Every party looks at its counter, as it does several times a second."""
        seconds = self.clock.mono_ms() / 1000
        for site in self.agents:
            self.counts[site].tick(seconds)
        if self.shell is not None:
            self.service.traffic.tick(seconds)

    def run(self, until: Callable[[], bool], *, seconds: float = 600) -> None:
        """Let time pass until something is true; sites that are not connected dial again."""
        for _ in range(int(1000 * seconds / STEP_MS)):
            if until():
                return
            for site in list(self.agents):
                if site not in self.streams and self.shell is not None:
                    self.connect(site)
            self.step()
        raise AssertionError(f"did not happen: {self.rounds[-3:]}, left {self.left}, refused {self.refused}")

    def run_for(self, seconds: float) -> None:
        """Let time pass; sites that are not connected dial again."""
        end = self.clock.mono_ms() + 1000 * seconds
        self.run(lambda: self.clock.mono_ms() >= end, seconds=seconds + 1)

    # What came of it.

    @property
    def rounds(self) -> list[RoundRow]:
        assert self.shell is not None
        return self.shell.storage.history.rounds()

    @property
    def published(self) -> int:
        return sum(row[3] == "published" for row in self.rounds)

    def run_rounds(self, count: int) -> None:
        """So many more results, the last one checked."""
        wanted = self.published + count
        self.run(lambda: self.published >= wanted and not self.engine.check.open)

    @property
    def engine(self):  # type: ignore[no-untyped-def]  # the engine's own type
        assert self.shell is not None
        return self.shell.engine

    def survivors(self) -> list[set[str]]:
        """Who was in each sum, oldest first."""
        assert self.shell is not None
        history = self.shell.storage.history
        return [{line.site for line in history.result(link.result_hash).uploads} for link in history.links()]
