"""A whole federation in one process: real machines on both sides, and between them the bytes of the network.

Each message travels as a parcel, numbered on its stream and with a signed log head, as the shells of site and
coordinator send it. `npr-lab` uses this for secure aggregation on one machine; tests and benchmarks do too. Sites can
be told to fall silent at any message, which is how dropouts are simulated.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lazaret.errors import ToolkitError
from protos.parse import FROM_COORDINATOR, FROM_SITE
from protos.stream_end import StreamEnd, empty_log_head
from security.clock import Clock, SystemClock
from security.crypto.prg import Words
from security.crypto.signing import SigningKey
from security.identity.membership import AggregationPolicy, AuditMode, BareMandate, RosterEntry
from security.rng import Randomness, SystemRandomness
from security.secagg import certificate_checks, messages
from security.secagg import state as states
from security.secagg.certificates import CheckCertificate
from security.secagg.context import SumVerdict
from security.secagg.coordinator.attempt import CoordinatorAttempt
from security.secagg.coordinator.publication import Publication
from security.secagg.coordinator.rounds import BlameBook, CoordinatorRound, RoundLost, RoundStart
from security.secagg.coordinator.spool import MemorySpool, Spool
from security.secagg.coordinator.uploads import CoordinatorCore
from security.secagg.effects import (
    AskVote,
    Compact,
    Discard,
    Effect,
    Effects,
    Ended,
    Leave,
    Persist,
    SaveState,
    Send,
    SendFrames,
    SendUpload,
)
from security.secagg.fields import Wire
from security.secagg.groups import Groups
from security.secagg.layout import Layout, Vector
from security.secagg.site.attempt import PendingUpdate, SiteCore
from security.secagg.site.journal import Journal
from security.secagg.site.machine import SiteMachine
from security.secagg.statements import Signer
from security.secagg.thresholds import LEAST_SURVIVORS, default_colluders
from security.secagg.transitions import CoordinatorState
from security.secrets import Secret

COORDINATOR = "coordinator"
FEDERATION = "loopback"
_OPEN = (
    CoordinatorState.ADVERTISING,
    CoordinatorState.DEALING,
    CoordinatorState.UPLOADING,
    CoordinatorState.AGREEING,
    CoordinatorState.UNMASKING,
    CoordinatorState.ABORTING,
)


def sent_message(sender: str, data: bytes) -> Wire:
    """The message in recorded bytes of a sender, wherever on its stream they were."""
    return (FROM_COORDINATOR if sender == COORDINATOR else FROM_SITE).decode(data).message


@dataclass(frozen=True, slots=True)
class Drop:
    """A site falls silent instead of sending its `after + 1`-th message of a type; it comes back the next round."""

    message: type[Wire]
    after: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOutcome:
    """How a round ended. `total` is None if it was lost."""

    round: int
    attempts: int
    survivors: tuple[str, ...] = ()
    verdict: SumVerdict | None = None
    total: Words | None = field(default=None, repr=False)
    state: Vector | None = field(default=None, repr=False)


@dataclass
class LoopbackSite:
    """A site's machine and what a shell would keep for it."""

    machine: SiteMachine
    wal: list[Wire] = field(default_factory=list)
    online: bool = True
    drop: Drop | None = None
    update: PendingUpdate | None = None
    saved: dict[bytes, Vector] = field(default_factory=dict, repr=False)
    errors: list[ToolkitError] = field(default_factory=list)


class LoopbackFederation:
    """A coordinator and its sites; `run_round` takes encoded updates and brings back the next model."""

    def __init__(
        self,
        layout: Layout,
        sites: Sequence[str],
        model: Vector,
        *,
        c: int | None = None,
        m: int = LEAST_SURVIVORS,
        audit: AuditMode = AuditMode.COVERED,
        single_history: bool = True,
        allow_two_site: bool = False,
        config_hash: bytes = bytes(32),
        dp_active: bool = False,
        movement: states.MovementRule = states.CEILINGS_ALONE,
        groups: Groups | None = None,
        vote: Callable[[str, Vector, Vector], bool] | None = None,
        scorers: Collection[str] = (),
        randomness: Randomness | None = None,
        clock: Clock | None = None,
        spool: Spool | None = None,
        workers: int = 1,
    ) -> None:
        self.randomness = randomness or SystemRandomness()
        self.clock = clock or SystemClock()
        self.config_hash = config_hash
        self.workers = workers
        self.keys = {name: SigningKey.generate(self.randomness) for name in (*sites, COORDINATOR)}
        self.policy = AggregationPolicy(
            federation=FEDERATION,
            manifest_version=1,
            manifest_hash=hashlib.sha256(layout.layout_hash + states.state_hash(model)).digest(),
            run="loopback",
            roster=tuple(self._entry(name) for name in sorted(sites)),
            coordinator=self._entry(COORDINATOR),
            initial_state_hash=states.state_hash(model),
            config_hashes=frozenset({config_hash}),
            layout=layout,
            c=default_colluders(len(sites)) if c is None else c,
            m=m,
            audit=audit,
            single_history=single_history,
            allow_two_site=allow_two_site,
            dp_active=dp_active,
            movement=movement,
            groups=groups,
            strict=vote is not None,
            vote=vote is not None,
            scorers=frozenset(scorers),
        )
        self.vote = vote
        self.core = CoordinatorCore(
            mandate=BareMandate(self.policy, Signer(COORDINATOR, self.keys[COORDINATOR])),
            spool=spool or MemorySpool(),
            clock=self.clock,
            workers=workers,
        )
        self.book = BlameBook()
        self.model = model
        self.round = 0
        self.prev_result = self.policy.manifest_hash
        self.check: CheckCertificate | None = None
        self.coordinator_wal: list[Wire] = []
        self.transcript: list[tuple[str, str, bytes]] | None = None
        self.bytes_up: dict[str, int] = dict.fromkeys(sites, 0)
        # Streams of messages, so that a vector is never under way as a whole.
        self._queue: deque[Iterator[tuple[str, str, bytes]]] = deque()
        self.sites = {name: LoopbackSite(self._machine(name, model)) for name in sorted(sites)}
        self._log_heads = {
            name: empty_log_head(name, FEDERATION, self.randomness.bytes(32)) for name in (*self.sites, COORDINATOR)
        }
        self._streams: dict[str, tuple[StreamEnd, StreamEnd]] = {}
        self.planned: CoordinatorRound
        self._movements = b""  # the lengths of steps up to the newest model that stands
        for name, site in self.sites.items():
            site.saved[states.state_hash(model)] = model
            self._connect(name)
            self._do_site(name, site.machine.start())
        self._queue.clear()

    def _entry(self, name: str) -> RosterEntry:
        key = self.keys[name].verify_key
        return RosterEntry(site=name, cert=hashlib.sha256(key.raw).digest(), key=key)

    def _machine(self, name: str, model: Vector) -> SiteMachine:
        core = SiteCore(
            mandate=BareMandate(self.policy, Signer(name, self.keys[name])),
            journal=Journal(),
            storage_key=Secret(self.randomness.bytes(32)),
            randomness=self.randomness,
            clock=self.clock,
            workers=self.workers,
        )
        return SiteMachine(core, model)

    def _connect(self, name: str) -> None:
        """A new stream: both ends count from one again."""
        ours = StreamEnd.of_coordinator(self._log_heads[COORDINATOR])
        self._streams[name] = (StreamEnd.of_site(self._log_heads[name]), ours)

    # Rounds.

    def run_round(
        self, updates: Mapping[str, Words], *, drops: Mapping[str, Drop] | None = None, audit: bool = True
    ) -> RoundOutcome:
        """Sum the encoded updates of the sites that have one; `drops` says who falls silent where."""
        self.begin_round(updates, drops)
        self._do_coordinator(self.planned.ask_aborts(updates))
        self.pump()
        while True:
            ready = [name for name in updates if self.sites[name].online]
            try:
                attempt = self.planned.next_attempt(ready)
            except RoundLost:
                return RoundOutcome(round=self.round, attempts=len(self.planned.attempts))
            self.run_attempt(attempt)
            newest = self.planned.current
            if newest is not None and newest.publication is not None:
                return self._publish(newest, audit=audit)

    def begin_round(self, updates: Mapping[str, Words], drops: Mapping[str, Drop] | None = None) -> None:
        """Hand every site its update and open the round at the coordinator."""
        self.round += 1
        head = states.state_hash(self.model)
        for name, words in updates.items():
            site = self.sites[name]
            site.online, site.drop = True, (drops or {}).get(name)
            site.update = PendingUpdate(round=self.round, state_hash=head, config_hash=self.config_hash, words=words)
            self._do_site(name, site.machine.load_update(site.update))
        start = RoundStart(
            round=self.round,
            state_hash=head,
            config_hash=self.config_hash,
            prev_result=self.prev_result,
            check=self.check,
        )
        self.book.new_round()
        before = self.planned.known(head, self.planned.start.state_hash) if self.round > 1 else []
        self.planned = CoordinatorRound(self.core, self.book, start, self.model, before=before)

    def run_attempt(self, attempt: CoordinatorAttempt) -> None:
        """Carry messages until the attempt has ended; a step that waits for nobody is closed."""
        self._do_coordinator(attempt.start())
        self.finish_attempt()

    def finish_attempt(self) -> None:
        """Carry on with the newest attempt until it has ended."""
        while True:
            self.pump()
            attempt = self.planned.attempts[-1]
            if attempt.state not in _OPEN:
                return
            effects = attempt.close_step()
            self.planned.note(effects)
            self._do_coordinator(effects)

    def pump(self) -> None:
        """Deliver everything that is under way."""
        while self._queue:
            item = next(self._queue[0], None)
            if item is None:
                self._queue.popleft()
                continue
            sender, receiver, data = item
            message = self.arrived(sender, receiver, data)
            try:
                if receiver == COORDINATOR:
                    self._do_coordinator(self.planned.receive(sender, message))
                elif self.sites[receiver].online:
                    self._do_site(receiver, self.sites[receiver].machine.receive(message))
            except ToolkitError as error:
                self._note_error(receiver, error)

    def arrived(self, sender: str, receiver: str, data: bytes) -> Wire:
        """What the receiver reads, be it silent or not: what is on its way stays in order."""
        of_site, of_coordinator = self._streams[sender if receiver == COORDINATOR else receiver]
        return (of_coordinator if receiver == COORDINATOR else of_site).decode(data)

    def _publish(self, attempt: CoordinatorAttempt, *, audit: bool) -> RoundOutcome:
        publication = attempt.publication
        if publication is None:
            raise RoundLost("there is no result")
        before, self.model = self.model, attempt.model
        if audit and attempt.state is CoordinatorState.PUBLISHED:
            self._cover(attempt, publication)
            self._do_coordinator(attempt.close_vote())
        self.check = publication.certificate()
        self._bring_back(attempt, publication)
        self.prev_result = certificate_checks.link_after(self.policy, publication.result_hash, self.check)
        if self.vote is not None and self.check is not None:
            self._settle_vote(attempt, self.check, before)
        return RoundOutcome(
            round=self.round,
            attempts=len(self.planned.attempts),
            survivors=publication.survivors,
            verdict=SumVerdict(publication.result.verdict),
            total=publication.total,
            state=self.model,
        )

    def _settle_vote(self, attempt: CoordinatorAttempt, check: CheckCertificate, before: Vector) -> None:
        """Everybody is shown the vote set; against the model, the one before it stands."""
        if certificate_checks.accepted(check.acks, attempt.context.t):
            self._movements = self.core.movements
        else:
            self.model, self.core.movements = before, self._movements
        for name, site in self.sites.items():
            if not site.machine.core.head.certified:
                certified = messages.ResultCertificate(result=site.machine.core.head.result, check=check)
                self._send(COORDINATOR, name, certified)
        self.pump()

    def _cover(self, attempt: CoordinatorAttempt, publication: Publication) -> None:
        """Sites that went away leave chunks unchecked; the others take them over."""
        absent = tuple(sorted(set(attempt.context.sites) - set(publication.acks)))
        order = messages.AuditOrder(result=publication.result_hash, absent=absent)
        for name in attempt.context.sites:
            if name not in absent:
                self._send(COORDINATOR, name, order)
        self.pump()

    def _bring_back(self, attempt: CoordinatorAttempt, publication: Publication) -> None:
        """Sites that missed the result get it now, as they would on reconnecting."""
        for name, site in self.sites.items():
            site.online, site.drop = True, None
            head = site.machine.core.head
            if head.link != attempt.context.prev_result:
                continue
            if not head.certified and attempt.plan.check is not None:
                self._send(COORDINATOR, name, messages.ResultCertificate(result=head.result, check=attempt.plan.check))
            self._send(COORDINATOR, name, publication.result)
            for frame in publication.sum_to(name).frames():
                self._send(COORDINATOR, name, frame)
        self.pump()
        self.check = publication.certificate()

    def restart_site(self, name: str) -> None:
        """The site's process dies and starts again: what it knows is what it has written down."""
        site = self.sites[name]
        journal = Journal.replay(site.wal)
        head = journal.head(self.policy)
        core, before = replace(site.machine.core, journal=journal), site.saved.get(head.trained_on)
        site.machine = SiteMachine(core, site.saved[head.state_hash], before)
        site.online = True
        self._connect(name)
        self._do_site(name, site.machine.start())
        if site.update is not None and site.update.round > journal.head(self.policy).round:
            self._do_site(name, site.machine.load_update(site.update))

    # Carrying out effects.

    def _note_error(self, receiver: str, error: ToolkitError) -> None:
        if receiver in self.sites:
            self.sites[receiver].errors.append(error)

    def _send(self, sender: str, receiver: str, message: Wire) -> None:
        self._queue.append(self._stream(sender, receiver, iter([message])))

    def _stream(self, sender: str, receiver: str, source: Iterator[Wire]) -> Iterator[tuple[str, str, bytes]]:
        """Encode messages when their turn has come; a site that has fallen silent sends no more."""
        for message in source:
            if sender in self.sites and not self._still_sends(sender, message):
                return
            of_site, of_coordinator = self._streams[sender if sender in self.sites else receiver]
            data = (of_site if sender in self.sites else of_coordinator).encode(message)
            if sender in self.sites:
                self.bytes_up[sender] += len(data)
            if self.transcript is not None:
                self.transcript.append((sender, receiver, data))
            yield sender, receiver, data

    def _still_sends(self, name: str, message: Wire) -> bool:
        site = self.sites[name]
        if site.drop is not None and isinstance(message, site.drop.message):
            if site.drop.after == 0:
                site.online = False
            site.drop = Drop(site.drop.message, site.drop.after - 1)
        return site.online

    def _do_coordinator(self, effects: Effects) -> None:
        for effect in effects:
            match effect:
                case Persist(record):
                    self.coordinator_wal.append(record)
                case Send(message, to) if to is not None:
                    self._send(COORDINATOR, to, message)
                case SendFrames(to, frames):
                    self._queue.append(self._stream(COORDINATOR, to, frames()))
                case Discard(keys):
                    for key in keys:
                        self.core.spool.remove(key)
                case _:
                    self._note(COORDINATOR, effect)

    def _do_site(self, name: str, effects: Effects) -> None:
        site = self.sites[name]
        for effect in effects:
            match effect:
                case Persist(record):
                    site.wal.append(record)
                case Compact(records):
                    site.wal[:] = records
                case Send(message):
                    self._send(name, COORDINATOR, message)
                case SendUpload():
                    self._queue.append(self._stream(name, COORDINATOR, effect.frames()))
                case AskVote() if self.vote is not None:
                    accept = self.vote(name, effect.before, effect.state)
                    self._do_site(name, site.machine.vote(effect.result, accept=accept))
                case SaveState(state_hash, state):
                    newest = list(site.saved.items())[-1]
                    site.saved = dict([newest, (state_hash, state)])
                case Leave(error) | Ended(_, "refused", error) if error is not None:
                    site.errors.append(error)
                case _:
                    self._note(name, effect)

    def _note(self, party: str, effect: Effect) -> None:
        """A place for subclasses to look at what happens."""
