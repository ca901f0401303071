"""The next run: a signed manifest that came by wire, judged by the hospital, with its initial model fetched.

The coordinator carries both and is believed in nothing. The manifest is signed by the consortium's root and newer than
the one in force; it pins the SHA-256 of the model's file. What remains is the hospital's own decision, `accept_runs` in
site.toml [policy]: "within_policy" begins a run that the policy permits and that protects the data no less than the run
in force; "ask" waits for `site-agent accept`. Nothing is installed before everything was checked: until then the old
run's manifest and files stay as they are.

offered.json              the signed manifest that waits, in the state folder
accepted                  whose run begins, and who decided it, until the privacy log says so
initial/<digest>.part     an initial model while it arrives
initial/<digest>.safetensors    one that was checked
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from lazaret import files
from lazaret.errors import (
    ConfigError,
    DataError,
    LedgerError,
    PolicyViolation,
    RemoteProtocolError,
    ToolkitError,
    VerificationFailed,
)
from security.crypto.ring import FRAME_BYTES
from security.identity import pki
from security.identity.enrolment import Identity
from security.identity.manifest import Manifest, real
from security.identity.pinned_files import InitialModel, pinned_model, pinned_plugin
from security.log.events import RunAccepted, RunOffered
from security.log.writer import AuditLog
from security.secagg.relay import ModelFrame, ModelRequest
from security.secagg.site.journal import most_updates
from site_agent.config import INITIAL, SiteConfig
from site_agent.privacy import LEDGER_HINT, PrivatePlan, check_terms, ledger_files, run_alone

log = logging.getLogger("site-agent")
OFFERED: Final = "offered.json"
ACCEPTED: Final = "accepted"
_ASKS: Final = 'accept_runs is "ask"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Which manifest's run begins here, by whom, and whether its model came by wire; for the privacy log."""

    manifest: str
    by: str
    fetched: bool = False

    def write(self, folder: Path) -> None:
        files.write_atomically(folder / ACCEPTED, json.dumps(asdict(self)).encode() + b"\n", mode=0o600)

    @classmethod
    def read(cls, folder: Path) -> Decision | None:
        try:
            kept = json.loads((folder / ACCEPTED).read_bytes())
            return cls(manifest=str(kept["manifest"]), by=str(kept["by"]), fetched=bool(kept["fetched"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


def accept(config: SiteConfig, identity: Identity, run: str, *, now_ms: int) -> Manifest:
    """An operator's word for the run that waits: the agent that runs goes on with it, without a restart.

    :raises ConfigError: if no such run waits.
    :raises PolicyViolation: if the policy in site.toml does not permit it.
    """
    offered, data = waiting(config, identity, now_ms=now_ms)
    if offered is None or offered.run != run:
        there = "none" if offered is None else f"run {offered.run}"
        raise ConfigError(f"no run {run} waits here", where=str(config.state), hint=f"what waits: {there}")
    check_permitted(config, offered)
    Decision(manifest=hashlib.sha256(data).hexdigest(), by="operator").write(config.state)
    return offered


def about(offered: Manifest) -> list[str]:
    """The terms of a run, for the person who decides."""
    training, private = offered.training, offered.privacy
    terms = "none" if private is None else f"epsilon {private.epsilon} for each {private.unit}, delta {private.delta}"
    return [
        f"run {offered.run} of {offered.federation}, manifest version {offered.version}",
        f"{training.rounds} rounds of {training.method} with {offered.model.architecture}, {len(offered.roster)} sites",
        f"classes: {', '.join(offered.model.classes)}",
        f"differential privacy: {terms}",
        *([] if (own := training.plugin) is None else [f"the method is the plugin {own.name}, SHA-256 {own.sha256}"]),
    ]


def waiting(config: SiteConfig, identity: Identity, *, now_ms: int) -> tuple[Manifest | None, bytes]:
    """The manifest that waits in the state folder, checked as at its arrival."""
    try:
        data = (config.state / OFFERED).read_bytes()
    except FileNotFoundError:
        return None, b""
    try:
        offered, current = identity.check_manifest(data, now_ms=now_ms), identity.manifest(now_ms=now_ms)
    except ToolkitError:  # older than the one that was installed by hand meanwhile
        return None, b""
    return (offered, data) if current is None or offered.run != current.run else (None, b"")


def check_permitted(config: SiteConfig, offered: Manifest) -> None:
    """What no operator's word replaces: a change of site.toml does, or a privacy ledger.

    :raises ToolkitError: by the rule that does not permit the run.
    """
    config.policy.check_federation(offered)
    if offered.training.plugin is not None:
        pinned_plugin(config.plugins, offered.training.plugin)  # read here to tell early; the trainer reads it itself
    identity = Identity(folder=config.identity)
    ours = pki.subject_of(identity.tls_certificate(), str(identity.tls_path))
    config.policy.check_consent(offered, ours.member)
    absent = [name for name in config.policy.required_classes if name not in offered.model.classes]
    if absent:
        raise PolicyViolation(f"the run has no class {absent[0]!r}", where="[policy] required_classes")
    plan = PrivatePlan.of(config, offered)
    if plan is not None:
        state = ledger_files(config).peek()
        if state is None:
            where = str(config.ledger)
            raise LedgerError("there is no privacy ledger for these patients", where=where, hint=LEDGER_HINT)
        check_terms(plan, state.terms)


def weaker(current: Manifest, offered: Manifest) -> str | None:
    """Why a person has to look at a run although the policy permits it; None if its terms are no weaker."""
    if current.privacy is not None and (reason := _weaker_privacy(current, offered)) is not None:
        return reason
    if current.training.isolation == "required" and offered.training.isolation != "required":
        return "it does not require that the process which sees images is isolated"
    if current.audit.mode == "covered" and offered.audit.mode != "covered":
        return "its sums are only sampled"
    if current.audit.vote_drop is not None and offered.audit.vote_drop is None:
        return "its sites do not vote on models"
    if current.audit.vote_drop is None and offered.audit.vote_drop is not None:
        return f"its sites vote on models, and send up to {most_updates(vote=True)} updates on one that stands"
    if offered.model.classes != current.model.classes:
        return f"it has other classes: {', '.join(offered.model.classes)}"
    if offered.model.code_digest != current.model.code_digest:
        return "its model is made by other code, which this site may not have"
    if offered.aggregation.colluders < current.aggregation.colluders:
        return f"it withstands {offered.aggregation.colluders} colluding sites, not {current.aggregation.colluders}"
    if offered.aggregation.least_survivors < current.aggregation.least_survivors:
        return f"its sums may be over {offered.aggregation.least_survivors} sites"
    return _shows_more(current, offered)


_WEIGHTS: Final = ("uniform", "bucketed", "samples")  # each tells more of the number of images than the one before


def _shows_more(current: Manifest, offered: Manifest) -> str | None:
    """What the sums of a run show that those of the run before do not."""
    before, after = current.aggregation, offered.aggregation
    if after.groups is not None and (before.groups is None or after.groups.count > before.groups.count):
        return f"the sums of {after.groups.count} groups of sites are opened, each by itself"
    if _WEIGHTS.index(offered.training.weights) > _WEIGHTS.index(current.training.weights):
        return f"its weights are {offered.training.weights}, those of run {current.run} {current.training.weights}"
    if current.training.local_statistics and not offered.training.local_statistics:
        return "statistics of BatchNorm leave the site"
    if before.single_history and not after.single_history:
        return "two histories of one run could be compared"
    if after.allow_two_sites and not before.allow_two_sites:
        return "its sums may be over two sites"
    return None


def _weaker_privacy(current: Manifest, offered: Manifest) -> str | None:
    """Each promise by itself: a smaller epsilon does not outweigh a larger delta, nor noise that others must add."""
    before, after = current.privacy, offered.privacy
    if before is None or after is None:
        return None if before is None else f"it trains without differential privacy, run {current.run} with it"
    for name, old, new in (("epsilon", before.epsilon, after.epsilon), ("delta", before.delta, after.delta)):
        if real(new) > real(old):
            return f"its {name} is {new}, that of run {current.run} {old}"
    if (alone := run_alone(offered)) > max(run_alone(current), real(after.epsilon)):
        return f"if all other sites collude, its epsilon is {alone:.2f}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A run that was offered, and what keeps it from beginning: `reason` is None if nothing does.

    :ivar final: an operator's word does not change it.
    """

    manifest: Manifest
    data: bytes
    reason: str | None
    final: bool = False

    @property
    def about(self) -> dict[str, str | bool | None]:
        """For `status` and the page."""
        return {"run": self.manifest.run, "reason": self.reason, "final": self.final}

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


class NextRun:
    """The run that a running agent was offered, until it begins."""

    def __init__(self, config: SiteConfig, log: AuditLog) -> None:
        self._config = config
        self._log = log
        self._folder = config.state / INITIAL
        self._requested = False
        self._fetched = False
        self.offer: Offer | None = None

    def offered(self, data: bytes, offered: Manifest, current: Manifest) -> None:
        """A manifest that begins another run; the caller has checked its signature and its place in the chain."""
        final, reason = False, weaker(current, offered)
        if self._config.policy.accept_runs == "ask":
            reason = _ASKS
        try:
            check_permitted(self._config, offered)
        except PolicyViolation as error:
            final, reason = True, str(error)
        except ToolkitError as error:
            final, reason = True, error.message  # without its place: no path goes into the log
        known, offer = self.offer, Offer(manifest=offered, data=data, reason=reason, final=final)
        self._requested = False
        if known is not None and known.digest == offer.digest:
            return  # on another stream
        files.write_atomically(self._config.state / OFFERED, data, mode=0o600)
        self.offer = offer
        if reason is None:
            log.info("run %s is offered (manifest version %d) and permitted", offered.run, offered.version)
        else:
            self._withhold(offer)

    def _withhold(self, offer: Offer) -> None:
        """The run does not begin yet, or not at all: the log and the operator are told why."""
        self.offer, run, reason = offer, offer.manifest.run, str(offer.reason)
        self._log.append(
            RunOffered(next=run, version=offer.manifest.version, manifest=offer.digest, reason=reason[:300])
        )
        todo = "this site does not take part" if offer.final else f"`site-agent accept {run}` begins it"
        log.warning("run %s is offered and does not begin here: %s; %s", run, reason, todo)

    def closed(self) -> None:
        """The stream is gone; what is missing of a model is asked for on the next one."""
        self._requested = False

    @property
    def _accepted_by(self) -> str | None:
        if self.offer is None or self.offer.final:
            return None
        if self.offer.reason is None:
            return "policy"
        word = Decision.read(self._config.state)
        return word.by if word is not None and word.manifest == self.offer.digest else None

    def step(self) -> ModelRequest | Offer | None:
        """What to do now: ask for the model, or begin the run. None: wait."""
        offer, by = self.offer, self._accepted_by
        if offer is None or by is None or self._requested:
            return None
        pinned = offer.manifest.model.initial_file
        path = self._config.model_file(pinned)
        if path.exists() and _digest(path) == pinned:
            try:
                pinned_model(path, offer.manifest)
            except ToolkitError as error:  # a mistake of the consortium: the file is the pinned one
                self._withhold(replace(offer, reason=error.message, final=True))
                return None
            Decision(manifest=offer.digest, by=by, fetched=self._fetched).write(self._config.state)
            return offer
        self._requested = True
        held = self._part.stat().st_size // FRAME_BYTES if self._part.exists() else 0
        return ModelRequest(manifest_version=offer.manifest.version, next_frame=held)

    # The model, piece by piece.

    @property
    def _part(self) -> Path:
        if self.offer is None:
            raise RemoteProtocolError("a model that was not asked for", where="model")
        return self._folder / f"{self.offer.manifest.model.initial_file}.part"

    def piece(self, frame: ModelFrame) -> bool:
        """Keep a piece; returns whether it was the last one.

        :raises RemoteProtocolError: if it is not the piece that comes next.
        :raises VerificationFailed: if the whole is not the model that the manifest pins. Nothing of it is kept.
        """
        part, offer = self._part, self.offer
        if offer is None or not self._requested or frame.digest.hex() != offer.manifest.model.initial_file:
            raise RemoteProtocolError("a model that was not asked for", where="model")
        self._folder.mkdir(mode=0o700, exist_ok=True)
        held = part.stat().st_size if part.exists() else 0
        rest = frame.length - held
        if frame.index * FRAME_BYTES != held or len(frame.data) != min(FRAME_BYTES, rest) or rest <= 0:
            part.unlink(missing_ok=True)
            raise RemoteProtocolError("pieces of the model are out of order", where="model")
        if held == 0 and shutil.disk_usage(self._folder).free < 2 * frame.length:
            raise DataError(
                f"no room for a model of {frame.length / 1e6:.0f} MB", where=str(self._folder), hint="free some space"
            )
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "ab") as file:
            file.write(frame.data)
            file.flush()
            if rest > FRAME_BYTES:
                return False
            os.fsync(file.fileno())
        self._requested = False
        self._finish(part, offer)
        return True

    def _finish(self, part: Path, offer: Offer) -> None:
        """Believe it, or nothing of it: the digest first, so that no other bytes are ever parsed."""
        if _digest(part) != offer.manifest.model.initial_file:
            part.unlink()
            raise VerificationFailed(
                f"the model that came for run {offer.manifest.run} is not the one in the manifest",
                where="coordinator",
                hint="it is asked for again; if that goes on, ask the consortium for the file",
            )
        part.replace(self._folder / f"{offer.manifest.model.initial_file}.safetensors")
        self._fetched = True
        log.info("the initial model of run %s has arrived and is the one in the manifest", offer.manifest.run)


def _digest(path: Path) -> str:
    with open(path, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def begun(config: SiteConfig, identity: Identity, log: AuditLog, manifest: Manifest, model: InitialModel) -> None:
    """At every start, with the manifest in force: say that its run was accepted here, if that is not in the log yet.

    The decision is on disk before the manifest is installed, and goes when the log has it. Initial models of other runs
    go with it: they can be fetched again.
    """
    decided = Decision.read(config.state)
    if decided is None or decided.manifest != _digest(identity.manifest_path):
        return
    entry = RunAccepted(
        version=manifest.version,
        manifest=decided.manifest,
        model=model.digest,
        bytes=model.path.stat().st_size,
        fetched=decided.fetched,
        by=decided.by,
    )
    log.append(entry, run=manifest.run)
    for name in (OFFERED, ACCEPTED):
        (config.state / name).unlink(missing_ok=True)
    for path in (config.state / INITIAL).glob("*"):
        if path.name != f"{model.digest}.safetensors":
            path.unlink()
