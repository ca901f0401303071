"""From a configuration to a site that can run: keys, manifest, state directory, log, and the promises it has made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from lazaret import archive, control, process, software
from lazaret.control import PauseFile
from lazaret.errors import CertificateNameMismatch, ConfigError
from protos.schema import schema_digest
from security.clock import Clock
from security.identity import pki
from security.identity.enrolment import Identity, installed_manifest
from security.identity.manifest import Manifest
from security.identity.membership import Seat
from security.identity.peers import check_tls_peer
from security.identity.pinned_files import InitialModel, pinned_model
from security.identity.pki import Role, Subject
from security.log.events import Egress
from security.log.note import checkpoint_of
from security.log.opening import open_own_log, start_entries
from security.log.reader import LogReader
from security.log.witness import Witness
from security.log.writer import AuditLog
from security.rng import Randomness
from security.secagg.layout import Vector
from security.secagg.site.attempt import AdvertisedLog, SiteCore
from security.secagg.site.journal import Journal
from security.secagg.site.machine import SiteMachine
from security.secrets import Secret
from site_agent import log_events
from site_agent.budget import Budget, open_budget
from site_agent.config import SiteConfig
from site_agent.local_work import Learner, LocalWork
from site_agent.next_run import NextRun, begun
from site_agent.outbox import Outbox
from site_agent.ready_slots import slots_of
from site_agent.run import Agent, site_membership
from site_agent.session import Session
from site_agent.state_dir import StateDir
from site_agent.state_writer import WriteAheadLog
from site_agent.witness import Witnessing

LearnerFactory = Callable[
    [SiteConfig, Manifest, InitialModel, StateDir, Identity, str, Budget | None, AuditLog], tuple[Learner, str | None]
]


def assemble(
    config: SiteConfig,
    *,
    clock: Clock,
    rng: Randomness,
    make_learner: LearnerFactory,
    agent_type: type[Agent] = Agent,
) -> Agent:
    """Open everything, and take up what an earlier run has promised.

    :param agent_type: the class that carries out effects.
    """
    process.limit_heaps()
    archive.refuse_moved(config.state)
    control.refuse_set_back(config.state)
    identity = Identity(folder=config.identity)
    site, manifest = read_membership(identity, clock)
    config.policy.check_federation(manifest)
    config.policy.check_consent(manifest, site)
    initial, start = pinned_model(config.model_file(manifest.model.initial_file), manifest)
    state_dir = StateDir(config.state, site=site, sealing_key=identity.sealing_key(), randomness=rng)
    state_dir.claim(manifest.run)
    wal = WriteAheadLog(state_dir.wal)
    state_dir.tidy()
    seat = Seat(site_membership(identity, manifest, site, now_ms=clock.now_ms()))
    log, _ = open_own_log(
        state_dir.log,
        identity,
        _subject(manifest, site),
        manifest,
        roster=seat.roster,
        policy=config.policy_digest,
        clock=clock,
        rng=rng,
    )
    begun(config, identity, log, manifest, initial)
    log.note_settings(config=config.digest, policy=config.policy_digest, who=software.account())
    for entry in start_entries(config=config.digest, proto=schema_digest()):
        log.append(entry)
    budget = open_budget(config, manifest, log, state_dir.log, key=identity.data_key(), clock=clock)
    learner, fingerprint = make_learner(config, manifest, initial, state_dir, identity, site, budget, log)
    with ExitStack() as unfinished:  # a trainer does not outlive a start that fails
        unfinished.callback(learner.close)
        if fingerprint is not None:
            change, private = state_dir.data_notes().get("change", "not known"), manifest.privacy is not None
            log.append(log_events.data_opened(config.data, fingerprint, change, private=private), run=manifest.run)
        log.checkpoint()
        machine = _machine(identity, seat, state_dir, wal, start, log, clock, rng, config.site.threads or 1, budget)
        session = Session(
            machine,
            seat,
            config.policy,
            clock,
            config_hash=manifest.training.config_hash,
            slots=slots_of(manifest.timing.train, config.site.ready_slot),
            pending=state_dir.unseal(manifest.aggregation.layout),
            rounds_done=state_dir.rounds_done,
        )
        outbox = Outbox(log, config.policy, seat, spent=logged_bytes(state_dir.log, manifest.run))
        session.stopped = state_dir.stopped.exists()
        session.spent, session.paused = outbox.spent, PauseFile(state_dir.folder).reason
        witness = Witness(state_dir.log, lambda: seat.roster, identity.cosigner(_subject(manifest, site)), clock)
        agent = agent_type(
            identity=identity,
            seat=seat,
            policy=config.policy,
            session=session,
            outbox=outbox,
            state_dir=state_dir,
            wal=wal,
            log=log,
            witnessing=Witnessing(seat, log, witness),
            work=LocalWork(
                seat=seat, policy=config.policy, session=session, learner=learner, state_dir=state_dir, rng=rng
            ),
            next_run=NextRun(config, log),
            clock=clock,
            budget=budget,
        )
        unfinished.pop_all()
    return agent


def read_membership(identity: Identity, clock: Clock, *, dated: bool = True) -> tuple[str, Manifest]:
    """Who we are, and the manifest in force.

    :param dated: our own certificates must be good today. Commands that only read local files do not need that.
    """
    now = clock.now_ms()
    identity.settle_tls(now_ms=now)
    certificate = identity.tls_certificate()
    subject = pki.subject_of(certificate, str(identity.tls_path))
    if dated:
        pki.check_dates(certificate, now, str(identity.tls_path))
    manifest = installed_manifest(identity, now_ms=now, program="site-agent")
    if subject.role is not Role.SITE:
        raise ConfigError(
            "the certificate is not a site's", where=str(identity.tls_path), hint="is this the right identity folder?"
        )
    if not identity.tls_key_path().exists():
        # Another site's would be believed until its log is to be written, and the error there misleads.
        raise CertificateNameMismatch(
            f"is a certificate of {subject.member} for a key that is not in this folder",
            where=str(identity.tls_path),
            hint="it may be another site's: `site-agent join` this site's own answer again",
        )
    then = now if dated else min(now, int(certificate.not_valid_after_utc.timestamp() * 1000))
    check_tls_peer(manifest, identity.root(), certificate, now_ms=then)
    return subject.member, manifest


def _subject(manifest: Manifest, site: str) -> Subject:
    return Subject(federation=manifest.federation, role=Role.SITE, member=site)


def logged_bytes(log: Path, run: str) -> Counter[int]:
    """What each of the newest rounds has cost so far, so that a restart does not give a round its limit once more.

    Every message has its entry before it leaves; two segments reach back far beyond a round that is still open.
    """
    spent: Counter[int] = Counter()
    for record in LogReader(log).checked(Egress.type, newest=2):
        if record.run == run and record.round is not None:
            spent[record.round] += record.body["bytes"]
    return spent


def _machine(
    identity: Identity,
    seat: Seat,
    state_dir: StateDir,
    wal: WriteAheadLog,
    start: Vector,
    log: AuditLog,
    clock: Clock,
    rng: Randomness,
    workers: int,
    budget: Budget | None,
) -> SiteMachine:
    journal = Journal.replay(wal.records)
    head = journal.head(seat.policy)
    model = start if journal.last is None else state_dir.state(seat.layout, head.state_hash)

    def heads() -> AdvertisedLog:
        newest = checkpoint_of(log.newest_checkpoint)
        paid = bytes(32) if budget is None else budget.commitment()
        return AdvertisedLog(log_size=newest.size, log_root=newest.root, ledger=paid)

    core = SiteCore(
        mandate=seat,
        journal=journal,
        storage_key=Secret(identity.sealing_key()),
        randomness=rng,
        clock=clock,
        heads=heads,
        workers=workers,
    )
    undecided = seat.policy.vote and not head.certified
    return SiteMachine(core, model, state_dir.state(seat.layout, head.trained_on) if undecided else None)
