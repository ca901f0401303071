"""From a configuration to a coordinator that can run: keys, manifest, storage, log, and the run where it stood."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.x509 import Certificate

from coordinator import database, ingress_log
from coordinator.config import CoordinatorConfig
from coordinator.effects import Effects
from coordinator.ingress_log import IngressLog
from coordinator.phases import RunPlan
from coordinator.results import Chain
from coordinator.round_history import ReadOnlyHistory
from coordinator.rounds import RoundEngine
from coordinator.run import ModelFile, Shell
from coordinator.run_queue import StopFile
from coordinator.storage import Storage
from coordinator.witness import WitnessDesk
from lazaret import archive, control, software
from lazaret.control import PauseFile
from lazaret.errors import ConfigError, ToolkitError
from protos.schema import schema_digest
from security.clock import Clock
from security.crypto import encoding
from security.identity import pki
from security.identity.acceptance import unseal
from security.identity.enrolment import Identity, installed_manifest
from security.identity.manifest import Manifest
from security.identity.membership import AggregationPolicy, Membership, Seat
from security.identity.pinned_files import pinned_model
from security.identity.pki import Purpose, Role, Subject
from security.log.events import AggregatePublished
from security.log.opening import open_own_log, start_entries
from security.log.reader import LogReader
from security.log.roster import Roster
from security.log.witness import Witness
from security.log.writer import AuditLog
from security.rng import Randomness
from security.secagg import records
from security.secagg.coordinator.recovery import restore_round
from security.secagg.coordinator.rounds import BlameBook, CoordinatorRound, RoundStart
from security.secagg.coordinator.spool import FileSpool
from security.secagg.coordinator.uploads import CoordinatorCore, Timeouts
from security.secagg.layout import Vector
from security.secagg.statements import Signer

log = logging.getLogger("coordinator")
MOST_WORKERS: Final = 4  # threads that take masks off a sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """A coordinator ready to be put on the network."""

    shell: Shell
    identity: Identity
    seat: Seat
    first: Effects

    @property
    def manifest(self) -> Manifest:
        return self.seat.manifest

    def begin(self) -> None:
        """Open the first round, or go on with the one that was open. Once."""
        self.shell.execute(self.first)


def assemble(
    config: CoordinatorConfig, base: Path, *, clock: Clock, rng: Randomness, shell_type: type[Shell] = Shell
) -> Assembled:
    """Open everything, and take the run up where it was left."""
    ready = prepare(config, base, clock=clock, rng=rng, shell_type=shell_type)
    ready.begin()
    return ready


def prepare(
    config: CoordinatorConfig, base: Path, *, clock: Clock, rng: Randomness, shell_type: type[Shell] = Shell
) -> Assembled:
    """Open everything, but no round yet: `begin` does, when nothing else can keep the coordinator from running.

    :param shell_type: the class that carries out effects.
    """
    archive.refuse_moved(base / config.state)
    control.refuse_set_back(base / config.state)
    identity = Identity(folder=base / config.identity)
    manifest = read_manifest(identity, clock)
    check_certificate(identity, manifest, clock)
    refuse_lost_database(base / config.state, manifest.run)
    refuse_unchecked_sum(base / config.state, manifest)
    storage = Storage(base / config.state, keep_models=config.storage.keep_models)
    model = config.model_file(base, manifest.model.initial_file)
    _, initial = pinned_model(model, manifest)
    ended = storage.belongs_to(manifest.federation, manifest.run)
    if ended is not None:
        log.info("run %s is over, run %s begins; the old one's files are in %s", ended, manifest.run, storage.runs)
    storage.save_state(initial)
    signer = Signer(manifest.coordinator.id, identity.signing_key(manifest.coordinator.certificate))
    seat = Seat(Membership.of(manifest, signer, now_ms=clock.now_ms()))
    books = IngressLog(_open_log(storage, identity, manifest, seat.roster, clock, rng), manifest.run)
    witness = Witness(storage.log, lambda: seat.roster, identity.cosigner(_subject(manifest)), clock)
    desk = WitnessDesk(manifest.coordinator.id, books, witness)
    engine, first = _engine(config, seat, storage, initial, clock)
    shell = shell_type(engine, storage, books, desk, clock)
    shell.in_force = lambda: seat.manifest
    shell.model = ModelFile(model, bytes.fromhex(manifest.model.initial_file))
    digest = hashlib.sha256(config.model_dump_json().encode()).hexdigest()
    books.log.note_settings(config=digest, who=software.account())
    for entry in start_entries(config=digest, proto=schema_digest()):
        books.write(entry)
    books.log.checkpoint()
    return Assembled(shell=shell, identity=identity, seat=seat, first=first)


def refuse_lost_database(state: Path, run: str) -> None:
    """A result is in the database before the privacy log says that it is published. A database without it was lost,
    emptied or restored from an old copy: the run would begin anew, beside sites that have its results.

    :raises ConfigError: if that is so.
    """
    log = state / "log"
    if not (log / "FORMAT").exists():
        return
    known = 0
    if (state / database.FILE).exists():
        with ReadOnlyHistory(state / database.FILE) as history:
            known = history.newest_result() if history.begun() else 0
    published = LogReader(log).backwards(AggregatePublished.type)  # idle months may lie between it and the end
    newest = next((entry.round or 0 for entry in published if entry.run == run), 0)
    if newest > known:
        raise ConfigError(
            f"the privacy log has published round {newest} of run {run}, the database knows {known or 'none'}",
            where=str(state / database.FILE),
            hint="it was lost or is an old copy: `coordinator recover FILE` continues the run from a site's handover",
        )


ACCEPTED_UNCHECKED: Final = "unchecked-accepted"  # digest of the manifest that `join --unchecked` has installed


def refuse_unchecked_sum(state: Path, manifest: Manifest) -> None:
    """A sum belongs to the manifest it was made under: a site that has not received it cannot take it under another
    one, and without their checks no further round begins. `join` looks too, but lets a manifest in beside a coordinator
    that runs: it has its sum checked before it stops. One that was killed has not.

    :raises ConfigError: if the newest sum is of an older manifest of this run and not checked, and the operator has
        not accepted that. Not if the coordinator has already run under this one: there is no way back from it.
    """
    accepted, in_force = state / ACCEPTED_UNCHECKED, state / "log" / "manifest.json"
    if not (state / database.FILE).exists() or not in_force.exists():
        return
    if accepted.exists() and accepted.read_text("ascii", "replace") == manifest.digest.hex():
        return
    if unseal(in_force.read_bytes(), str(in_force))[0].digest == manifest.digest:
        return
    with ReadOnlyHistory(state / database.FILE) as history:
        same = history.begun() and history.about("run") == f"{manifest.federation}/{manifest.run}"
        found = history.unchecked_sum() if same else None
        made = history.result(history.links()[-1].result_hash).context if found is not None else None
    if made is not None and made.manifest_hash != manifest.digest:
        raise ConfigError(
            f"the sum of round {made.round} is not checked, and was made under another manifest than version "
            f"{manifest.version}, under which it may never be",
            where=str(state),
            hint=f"put {in_force} back as the manifest and start, and install the new one when "
            "the sum is checked; or `coordinator join --manifest FILE --unchecked`",
        )


def read_manifest(identity: Identity, clock: Clock) -> Manifest:
    return installed_manifest(identity, now_ms=clock.now_ms(), program="coordinator")


def check_certificate(identity: Identity, manifest: Manifest, clock: Clock) -> Certificate:
    """Our own TLS certificate, if it is good today: sites would only see a handshake that fails."""
    certificate = identity.tls_certificate()
    pki.verify_certificate(
        certificate,
        identity.root(),
        _subject(manifest),
        Purpose.TLS,
        now_ms=clock.now_ms(),
        where=str(identity.tls_path),
    )
    return certificate


def _subject(manifest: Manifest) -> Subject:
    return Subject(federation=manifest.federation, role=Role.COORDINATOR, member=manifest.coordinator.id)


def _open_log(
    storage: Storage, identity: Identity, manifest: Manifest, roster: Roster, clock: Clock, rng: Randomness
) -> AuditLog:
    log, known = open_own_log(
        storage.log,
        identity,
        _subject(manifest),
        manifest,
        roster=roster,
        policy=manifest.digest.hex(),
        clock=clock,
        rng=rng,
    )
    if known is None or known != identity.manifest_path.read_bytes():
        _note_peers(log, None if known is None else unseal(known)[0], manifest)
    return log


def _note_peers(log: AuditLog, old: Manifest | None, new: Manifest) -> None:
    for event in ingress_log.changes(old, new):
        log.append(event, run=new.run)


def _engine(
    config: CoordinatorConfig,
    seat: Seat,
    storage: Storage,
    initial: Vector,
    clock: Clock,
) -> tuple[RoundEngine, Effects]:
    manifest = seat.manifest
    core = CoordinatorCore(
        mandate=seat,
        spool=FileSpool(storage.spool),
        clock=clock,
        timeouts=Timeouts(step_ms=manifest.timing.message * 1000, upload_ms=manifest.timing.upload * 1000),
        workers=min(MOST_WORKERS, len(os.sched_getaffinity(0))),
        load_deals=storage.history.deals,
    )
    history = storage.history
    book = history.blame_book({entry.site: entry.cert for entry in seat.policy.roster})
    chain = Chain(
        history.links(),
        seat,
        core.spool,
        load_result=history.result,
        load_check=history.certificate,
        load_state=storage.load_state,
    )
    model = storage.load_state(chain.head.state_hash) if chain.head else initial
    core.movements = chain.movements()
    engine = RoundEngine(
        core,
        book,
        run_plan(config, manifest),
        chain,
        model,
        completed=history.completed(),
        renew=seat.renew,
        policy_at=_foresight(seat),
        lost=history.lost_lately(),
        first=initial,
        paused=PauseFile(storage.folder).reason(),
        before=[] if seat.policy.dp_active else history.earlier_attempts(seat.policy.initial_state_hash),
    )
    storage.end_round_of_older_manifest(manifest.digest.hex(), _work(manifest), now_ms=clock.now_ms())
    rebuilt, start = _take_up(core, book, storage, chain)
    if start is not None:
        return engine, engine.restore(start, rebuilt)
    if engine.completed >= engine.plan.rounds or StopFile(storage.folder).reason(manifest.run) is not None:
        return engine, engine.restore_done(rebuilt)
    return engine, engine.start(history.last_round(), rebuilt)


def _foresight(seat: Seat) -> Callable[[int], AggregationPolicy]:
    """The policy at a later instant. It is asked for several times a second, and changes only when a certificate begins
    or ends: the last answer is kept."""
    last = seat.membership

    def policy_at(then_ms: int) -> AggregationPolicy:
        nonlocal last
        known = last if last.manifest is seat.manifest else seat.membership
        last = known.at(then_ms)
        return last.policy

    return policy_at


def _work(manifest: Manifest) -> str:
    """What an update depends on: members, dates and timing may change while sites train."""
    asked = manifest.model_dump(mode="python", include={"run", "model", "training", "aggregation", "privacy"})
    return hashlib.sha256(encoding.dumps(asked)).hexdigest()


def _take_up(
    core: CoordinatorCore, book: BlameBook, storage: Storage, chain: Chain
) -> tuple[CoordinatorRound | None, RoundStart | None]:
    """The newest round with attempts, and the open one. Attempts under an older manifest cannot go on; the check of a
    published sum can.
    """
    found, start = storage.history.newest_records(), storage.history.open_round()
    plans = [record.plan.context for record in found if isinstance(record, records.Planned)]
    if all(plan.manifest_hash == core.policy.manifest_hash for plan in plans):
        return restore_round(core, book, found, storage.load_state, load_check=storage.history.certificate), start
    if chain.head is None or chain.head_check() is not None:
        return None, start
    try:
        return restore_round(core, book, found, storage.load_state, load_check=storage.history.certificate), start
    except ToolkitError as error:
        raise ConfigError(
            "the newest sum is not checked yet, and cannot be under the manifest in force",
            where=str(storage.folder),
            hint="the consortium must publish a manifest with the slots of the vector as they were; docs/operators.md",
        ) from error


def run_plan(config: CoordinatorConfig, manifest: Manifest) -> RunPlan:
    """The manifest's numbers, made stricter where the operator asks for it, never laxer."""
    rounds = config.rounds
    train = manifest.timing.train if rounds.train is None else min(rounds.train, manifest.timing.train)
    return RunPlan(
        rounds=manifest.training.rounds,
        config_hash=bytes.fromhex(manifest.training.config_hashes[0]),
        train_ms=int(train * 1000),
        least=rounds.least_cohort or 0,
        grace_ms=int(rounds.grace * 1000),
        ping_ms=int(rounds.ping * 1000),
        audit_ms=int(rounds.audit * 1000),
    )
