"""How a trainer begins to work for an agent.

Isolation goes into the privacy log and is judged before the trainer is told anything; then it gets what it needs to
begin, and what it says of its data is written down.
"""

from __future__ import annotations

import logging
from typing import Any

from lazaret.errors import ConfigError
from security.identity.enrolment import Identity
from security.identity.manifest import Manifest
from security.identity.pinned_files import InitialModel
from security.log.writer import AuditLog
from site_agent import log_events
from site_agent.budget import Budget
from site_agent.config import SiteConfig
from site_agent.state_dir import StateDir
from site_agent.supervisor import IDLE_SECONDS, Supervisor
from site_agent.trainer.channel import DataReady, IsolationReport, TrainerSetup
from site_agent.trainer.isolation import HINT, WHERE, IsolationMode
from site_agent.trainer_process import ChildTrainer, TrainerSocket

log = logging.getLogger("site-agent")


def note_data(state_dir: StateDir, ready: DataReady, *, private: bool) -> str:
    """Write down what the data hold, and say what has changed since the last start; both for the hospital alone."""
    now: dict[str, Any] = {"names": list(ready.class_names), "fingerprint": ready.fingerprint, "version": ready.version}
    now |= {side: list(row) for side, row in ready.counts.items()}
    if ready.images is not None:
        now["images"] = dict(ready.images)
    before = state_dir.data_notes()
    change = log_events.data_change(before, now)
    changed = bool(before) and before.get("fingerprint") != ready.fingerprint
    (log.warning if changed else log.info)("data: %s", change)
    if private and changed and before.get("version") == ready.version:
        log.warning(
            "data: this change is not written to the privacy log and not sent; "
            "to release class counts anew, change [data] version"
        )
    state_dir.note_data(now | {"change": change})
    return change


class TrainerStart:
    """How every trainer of one agent begins, by the manifest in force then; `outdates` says when that changes."""

    def __init__(
        self,
        config: SiteConfig,
        manifest: Manifest,
        state_dir: StateDir,
        identity: Identity,
        site: str,
        budget: Budget | None,
        privacy_log: AuditLog,
    ) -> None:
        self._config, self._in_force, self._state_dir = config, manifest, state_dir
        self._identity, self._site, self._budget, self._privacy_log = identity, site, budget, privacy_log

    def outdates(self, newer: Manifest) -> bool:
        """Go on with a newer manifest; whether it matters to a trainer. Who takes part does not."""
        before, self._in_force = self._in_force, newer
        return _given(before) != _given(newer)

    @property
    def asked(self) -> IsolationMode:
        modes = (self._config.site.isolation, self._in_force.training.isolation)
        return "required" if "required" in modes else "best"

    def setup(self) -> tuple[TrainerSetup, bytes]:
        terms = None if self._budget is None else self._budget.state.terms
        key, best = self._identity.data_key().hex(), self._state_dir.best_score
        return TrainerSetup(site=self._site, data_key=key, best=best, terms=terms), self._in_force.to_bytes()

    def isolated(self, report: IsolationReport) -> None:
        """Into the log first, then judged: a start that is refused is known too."""
        asked = self.asked
        self._privacy_log.append(log_events.trainer_isolated(asked, report), run=self._in_force.run)
        log.info("%s", report.sentence)
        if asked == "required" and (report.keys_readable or (report.connection_possible and not report.exception)):
            raise ConfigError(f"isolation is required, and {report.sentence}", where=WHERE, hint=HINT)

    def opened(self, ready: DataReady) -> None:
        self._take_plugin(ready.plugin)
        private = self._in_force.privacy is not None
        change = note_data(self._state_dir, ready, private=private)
        if self._budget is not None:
            self._budget.take_version(ready.version)
        event = log_events.data_opened(self._config.data, ready.version, change, private=private)
        self._privacy_log.append(event, run=self._in_force.run, annex=log_events.data_annex(ready))

    def _take_plugin(self, loaded: str | None) -> None:
        """Into the log first, then judged: whatever was run in that process, the log says so."""
        pinned = self._in_force.training.plugin
        if loaded is not None:
            self._privacy_log.append(log_events.plugin_loaded(loaded), run=self._in_force.run)
        if loaded != (None if pinned is None else pinned.sha256):
            due = "none" if pinned is None else pinned.sha256
            raise ConfigError(
                f"the trainer has run the plugin {loaded or 'none'}, the manifest pins {due}",
                where="trainer",
                hint="restart agent and trainer with one site.toml",
            )


def _given(manifest: Manifest) -> tuple[object, ...]:
    """What of a manifest a trainer works by."""
    return manifest.model, manifest.training, manifest.privacy, manifest.aggregation.layout, manifest.timing.train


def start_trainer(
    config: SiteConfig,
    manifest: Manifest,
    initial: InitialModel,
    state_dir: StateDir,
    identity: Identity,
    site: str,
    budget: Budget | None,
    privacy_log: AuditLog,
    *,
    log_format: str | None = None,
    module: str = "site_agent.trainer",
) -> tuple[Supervisor, str | None]:
    """A trainer of this site in a process of its own, with its data open. It has logged that itself: hence the None."""
    del initial  # the trainer reads it itself
    start = TrainerStart(config, manifest, state_dir, identity, site, budget, privacy_log)
    waiting = None if config.trainer_socket is None else TrainerSocket(config.trainer_socket)
    supervisor = Supervisor(
        waiting.accept if waiting is not None else lambda: ChildTrainer(config, log_format, module=module),
        start.setup,
        words=manifest.aggregation.layout.state_words,
        seconds=float(manifest.timing.train),
        budget=budget,
        idle=IDLE_SECONDS + float(config.site.worker_wait),  # it may wait for other processes
        outdates=start.outdates,
        isolated=start.isolated,
        opened=start.opened,
    )
    supervisor.start()
    return supervisor, None
