"""Real site agents on disk and a small coordinator in memory: every message as the bytes of the wire, no network."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from lazaret.errors import RemoteProtocolError
from protos.parse import FROM_COORDINATOR, FROM_SITE, Parcel
from security.clock import ManualClock
from security.identity.manifest import Manifest
from security.identity.membership import BareMandate, aggregation_policy
from security.identity.pinned_files import pinned_model
from security.log.egress import KernelByteLog
from security.rng import CountedRandomness
from security.secagg import messages, relay
from security.secagg import state as states
from security.secagg.certificates import CheckCertificate
from security.secagg.coordinator.attempt import CoordinatorAttempt
from security.secagg.coordinator.rounds import BlameBook, CoordinatorRound, RoundStart
from security.secagg.coordinator.spool import MemorySpool
from security.secagg.coordinator.uploads import CoordinatorCore
from security.secagg.effects import Effects, Send, SendFrames
from security.secagg.fields import Wire
from security.secagg.layout import Vector
from security.secagg.relay import FRAMES, HeadSignature, SignedHead
from security.secagg.statements import Signer
from security.secagg.transitions import CoordinatorState
from site_agent.assembly import LearnerFactory, assemble
from site_agent.config import SiteConfig
from site_agent.contribution import LocalResult
from site_agent.local_work import Job
from site_agent.run import Agent, Left
from site_agent.setup_commands import site_toml
from tests.support.consortium_world import PLAN, SITES, World
from tests.support.memory_network import MemoryNetwork
from tests.support.stand_in import standing_in

HUB = "hub"
SLOT_SECONDS = 5
MORE = "\n[timing]\ntrain = 100\n"


def write_wide_model(path: Path) -> None:
    """Enough words for the look of noise to mean something."""
    tensors = {
        "conv.weight": np.linspace(-1, 1, 3000, dtype=np.float32),
        "bn.running_mean": np.array([0.5, -0.25], np.float32),
        "bn.running_var": np.array([1.0, 0.01], np.float32),
        "head.weight": np.zeros((3, 2), np.float32),
    }
    save_file(tensors, path)


class Dies(Exception):
    """Stands for SIGKILL, raised by an agent's own hands."""


@dataclass
class Counting:
    """A learner that makes numbers: no torch, and it counts how often it was asked."""

    words: int
    step: float = 0.001
    trained: list[int] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)
    manifests: list[int] = field(default_factory=list)
    error: Exception | None = None

    def train(self, round_number: int, state: Vector) -> LocalResult:
        self.trained.append(round_number)
        if self.error is not None:
            raise self.error
        update = np.full(len(state), self.step * round_number, dtype=np.float32)
        return LocalResult(
            update=update,
            samples=10,
            loss_sum=3.5,
            hits=7,
            steps=4,
            wall_ms=1,
            artefacts=(("prototypes", 12, bytes(32)),),
        )

    def evaluate(self, round_number: int, state: Vector) -> dict[str, Any]:
        self.evaluated.append(round_number)
        return {"round": round_number, "test": {"bacc": 0.5, "bauc": 0.5, "images": 1}}

    def adopted(self, manifest: Manifest) -> None:
        self.manifests.append(manifest.version)

    def close(self) -> None:
        pass


def write_config(folder: Path, identity: Path, model: Path, extra: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = site_toml(
        identity=str(identity),
        state="state",
        initial_model=str(model),
        address="localhost:1",
        source="generated",
        legal_basis="none: generated images",
    )
    text = text.replace("# ready_slot = 600", f"ready_slot = {SLOT_SECONDS} #")
    path = folder / "site.toml"
    path.write_text(text + extra)
    return path


class SiteWorld:
    """A consortium, a hub of machines in memory, and agents that can be killed and started again."""

    def __init__(self, folder: Path, *, sites: tuple[str, ...] = SITES, policy: str = "", plan: str = PLAN + MORE):
        self.base = World.make(folder, sites)
        self.clock: ManualClock = self.base.clock  # type: ignore[assignment]
        self.base.write_plan(plan)
        self.model_path = self.base.authority.folder / "initial.safetensors"
        self.write_model()
        self.manifest: Manifest = self.base.publish()
        self.rng = CountedRandomness(b"site world")
        self.configs = {
            site: write_config(folder / f"{site}-agent", self.base.identity(site).folder, self.model_path, policy)
            for site in sites
        }
        for member in (HUB, *sites):
            self.base.identity(member).install_manifest(self.base.published(), now_ms=self.base.now)
        self.learners = {site: Counting(self.manifest.aggregation.layout.state_words) for site in sites}
        self.agents: dict[str, Agent] = {}
        self.network = MemoryNetwork()
        self.counts: dict[str, KernelByteLog] = {}
        self.jobs: dict[str, deque[Job]] = {site: deque() for site in sites}
        self.left: dict[str, Left] = {}
        self.hub = Hub(self)

    def write_model(self) -> None:
        write_wide_model(self.model_path)

    def make_learner(self, site: str) -> LearnerFactory:
        return standing_in(self.learners[site], "ab" * 32)

    def start(self, site: str, agent_type: type[Agent] = Agent) -> Agent:
        config = SiteConfig.read(self.configs[site])
        agent = assemble(
            config,
            clock=self.clock,
            rng=self.rng,
            make_learner=self.make_learner(site),
            agent_type=agent_type,
        )
        self.jobs[site].clear()
        agent.submit = self.jobs[site].append
        self.agents[site] = agent
        self.counts[site] = KernelByteLog(agent.log, self.network.meter(site))
        return agent

    def kill(self, site: str) -> None:
        """As SIGKILL would: files are let go, nothing is said."""
        agent = self.agents.pop(site)
        self.hub.connected.pop(site, None)
        self.network.close(site, HUB)
        self.hub.drop(site)
        self.jobs[site].clear()
        agent.wal.close()
        agent.log._writer.close()
        if agent.budget is not None:
            agent.budget.close()

    def start_all(self) -> None:
        for site in self.learners:
            self.start(site)
            self.hub.connect(site)

    def work(self, site: str) -> None:
        """What the training thread does, and what comes of it."""
        while self.jobs[site]:
            finish = self.jobs[site].popleft()()
            self.hub.take(site, self.agents[site].run(finish()))
        self.hub.pump()

    def tick(self, milliseconds: int) -> None:
        self.clock.advance(milliseconds)
        for site in list(self.agents):
            self.hub.take(site, self.agents[site].ticked())
        self.hub.pump()

    def entries(self, site: str, kind: str) -> list[dict[str, Any]]:
        """Entries of one type in a site's log: the body, and the round beside it."""
        found = []
        for segment in sorted((self.agents[site].state_dir.log / "segments").glob("*.jsonl")):
            found += [json.loads(line) for line in segment.read_text().splitlines()]
        return [entry["body"] | {"round": entry["round"]} for entry in found if entry["type"] == kind]

    def run_round(self, *, sites: tuple[str, ...] | None = None) -> None:
        """Order, training, READY at its slot, aggregation, result and check."""
        sites = sites or tuple(self.agents)
        self.hub.order(sites)
        for site in sites:
            self.work(site)
        self.tick(SLOT_SECONDS * 1000)
        self.hub.aggregate()
        for site in sites:
            self.work(site)


@dataclass
class Connection:
    """One stream of a site, seen from the hub."""

    number: int
    received: int = 0
    sent: int = 0
    sent_bytes: int = 0


class Hub:
    """The coordinator's machines, a queue of bytes, and hardly anything else."""

    def __init__(self, world: SiteWorld) -> None:
        self.world = world
        manifest = world.manifest
        self.policy = aggregation_policy(manifest, now_ms=world.clock.now_ms())
        key = world.base.identity(HUB).signing_key(manifest.coordinator.certificate)
        self.core = CoordinatorCore(
            mandate=BareMandate(self.policy, Signer(HUB, key)), spool=MemorySpool(), clock=world.clock
        )
        self.book = BlameBook()
        _, self.model = pinned_model(world.model_path, manifest)
        self.round = 0
        self.prev_result = self.policy.manifest_hash
        self.check: CheckCertificate | None = None
        self.planned: CoordinatorRound | None = None
        self.connected: dict[str, Connection] = {}
        self.seen: list[tuple[str, Wire]] = []
        self.payloads: list[tuple[str, Wire, bytes]] = []
        self.ready: set[str] = set()
        self.hook: Callable[[str, Wire], bool] | None = None
        self._queue: deque[tuple[str, bytes]] = deque()

    def head(self) -> SignedHead:
        origin = f"{HUB}.lesions/audit"
        line = HeadSignature(name=origin, key_id=bytes(4), value=bytes(64))
        return SignedHead(origin=origin, size=1, root=bytes(32), signatures=(line,))

    # The wire.

    def connect(self, site: str) -> None:
        self.connected[site] = Connection(number=len(self.connected))
        self.world.network.open(site, HUB)
        self.take(site, self.world.agents[site].opened())
        self.pump()

    def disconnect(self, site: str) -> None:
        del self.connected[site]
        self.world.network.close(site, HUB)
        self.world.agents[site].closed()

    def take(self, site: str, payloads: Iterator[bytes]) -> None:
        try:
            for payload in payloads:
                self._queue.append((site, payload))
        except Left as left:
            self.world.left[site] = left
        except Dies:
            self.world.kill(site)

    def drop(self, site: str) -> None:
        """What a dead process had not yet handed to the network is gone; what it had is on its way."""
        self._queue = deque(item for item in self._queue if item[0] != site)

    def pump(self) -> None:
        """Read what sites have sent, until nothing more comes."""
        while self._queue:
            site, payload = self._queue.popleft()
            connection = self.connected.get(site)
            if connection is None:
                continue
            parcel = FROM_SITE.decode(payload)
            connection.received += 1
            connection.sent_bytes += len(payload)
            self.world.network.carry(site, HUB, len(payload))
            assert parcel.sequence == connection.received
            self.seen.append((site, parcel.message))
            self.payloads.append((site, parcel.message, payload))
            if self.hook is None or self.hook(site, parcel.message):
                self._receive(site, parcel.message)

    def send(self, site: str, message: Wire) -> None:
        connection = self.connected.get(site)
        agent = self.world.agents.get(site)
        if connection is None or agent is None:
            return
        connection.sent += 1
        head = None if type(message) in FRAMES else self.head()
        data = FROM_COORDINATOR.encode(Parcel(message=message, sequence=connection.sent, log_head=head))
        self.world.network.carry(HUB, site, len(data))
        self.take(site, agent.received(data))

    def _receive(self, site: str, message: Wire) -> None:
        if isinstance(message, relay.Open):
            manifest = self.world.manifest
            self.send(site, relay.Welcome(protocol=1, manifest_version=manifest.version, manifest_hash=manifest.digest))
        elif isinstance(message, messages.Ready):
            self.ready.add(site)
        elif self.planned is not None and not isinstance(message, relay.Pong | relay.Decline):
            with suppress(RemoteProtocolError):  # late answers; a coordinator notes and drops them
                self.do(self.planned.receive(site, message))

    def do(self, effects: Effects) -> None:
        for effect in effects:
            match effect:
                case Send(message=message, to=to) if to is not None:
                    self.send(to, message)
                case SendFrames(to, frames):
                    for frame in frames():
                        self.send(to, frame)

    # Rounds.

    def order(self, sites: tuple[str, ...]) -> messages.TrainOrder:
        self.round += 1
        self.ready.clear()
        order = messages.TrainOrder(
            round=self.round,
            state_hash=states.state_hash(self.model),
            config_hash=next(iter(self.policy.config_hashes)),
            prev_result=self.prev_result,
            check=self.check,
        )
        for site in sites:
            self.send(site, order)
        self.pump()
        return order

    def plan(self, sites: tuple[str, ...] | None = None) -> CoordinatorAttempt:
        """Open the round at the coordinator, if it is not, and begin an attempt."""
        if self.planned is None or self.planned.start.round != self.round:
            start = RoundStart(
                round=self.round,
                state_hash=states.state_hash(self.model),
                config_hash=next(iter(self.policy.config_hashes)),
                prev_result=self.prev_result,
                check=self.check,
            )
            self.book.new_round()
            self.planned = CoordinatorRound(self.core, self.book, start, self.model)
        attempt = self.planned.next_attempt(sorted(sites or self.ready))
        self.do(attempt.start())
        return attempt

    def aggregate(self, sites: tuple[str, ...] | None = None) -> CoordinatorAttempt:
        return self.go_on(self.plan(sites))

    def go_on(self, attempt: CoordinatorAttempt) -> CoordinatorAttempt:
        """Carry an attempt to its end; a step that waits for nobody is closed."""
        self.pump()
        while attempt.state not in (CoordinatorState.PUBLISHED, CoordinatorState.CERTIFIED):
            if attempt.state in (CoordinatorState.DEAD, CoordinatorState.LOST):
                return attempt
            effects = attempt.close_step()
            assert self.planned is not None
            self.planned.note(effects)
            self.do(effects)
            self.pump()
        self.finish(attempt)
        return attempt

    def finish(self, attempt: CoordinatorAttempt) -> None:
        publication = attempt.publication
        assert publication is not None
        self.model, self.prev_result = attempt.model, publication.result_hash
        absent = tuple(sorted(set(attempt.context.sites) - set(publication.acks)))
        for site in attempt.context.sites:
            if site not in absent:
                self.send(site, messages.AuditOrder(result=publication.result_hash, absent=absent))
        self.pump()
        self.check = publication.certificate()

    def sent_by(self, site: str, kind: type[Wire]) -> list[Wire]:
        return [message for sender, message in self.seen if sender == site and isinstance(message, kind)]


def policy_table(**values: str) -> str:
    """Lines for the end of site.toml: its last table is [policy]."""
    return "\n" + "\n".join(f"{name} = {value}" for name, value in values.items()) + "\n"
