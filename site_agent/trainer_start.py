"""How a trainer begins to work for an agent.

Isolation goes into the privacy log and is judged before the trainer is told anything; then it gets what it needs to
begin, and what it says of its data is written down.
"""

from __future__ import annotations

import logging
from typing import Any

from lazaret.errors import ConfigError
from security.identity.enrolment import Identity
from security.identity.initial_model import InitialModel
from security.identity.manifest import Manifest
from security.log.writer import AuditLog
from site_agent import log_events
from site_agent.budget import Budget
from site_agent.config import SiteConfig
from site_agent.state_dir import StateDir
from site_agent.supervisor import Supervisor
from site_agent.trainer.channel import DataReady, IsolationReport, TrainerSetup
from site_agent.trainer.isolation import HINT, WHERE, IsolationMode
from site_agent.trainer_process import ChildTrainer, TrainerSocket

log = logging.getLogger("site-agent")


def note_data(state_dir: StateDir, ready: DataReady, *, private: bool) -> str:
    """Write down what the data hold, and say what has changed since the last start; both for the hospital alone."""
    now: dict[str, Any] = {"names": list(ready.class_names), "fingerprint": ready.fingerprint, "version": ready.version}
    now |= {side: list(row) for side, row in ready.counts.items()}
    before = state_dir.data_notes()
    change = log_events.data_change(before, now)
    changed = bool(before) and before.get("fingerprint") != ready.fingerprint
    (log.warning if changed else log.info)("data: %s", change)
    if private and changed and before.get("version") == ready.version:
        log.warning("data: log and federation are not told; to release class counts anew, change [data] version")
    state_dir.note_data(now | {"change": change})
    return change


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

    def setup() -> tuple[TrainerSetup, bytes]:
        terms = None if budget is None else budget.state.terms
        key = identity.data_key().hex()
        return TrainerSetup(site=site, data_key=key, best=state_dir.best_score, terms=terms), manifest.to_bytes()

    asked: IsolationMode = (
        "required" if "required" in (config.site.isolation, manifest.training.isolation) else "best"
    )

    def isolated(report: IsolationReport) -> None:
        """Into the log first, then judged: a start that is refused is known too."""
        privacy_log.append(log_events.trainer_isolated(asked, report), run=manifest.run)
        log.info("%s", report.sentence)
        if asked == "required" and (report.keys_readable or (report.connection_possible and not report.exception)):
            raise ConfigError(f"isolation is required, and {report.sentence}", where=WHERE, hint=HINT)

    def opened(ready: DataReady) -> None:
        private = manifest.privacy is not None
        change = note_data(state_dir, ready, private=private)
        if budget is not None:
            budget.take_version(ready.version)
        event = log_events.data_opened(config.data, ready.version, change, private=private)
        privacy_log.append(event, run=manifest.run, annex=log_events.data_annex(ready))

    waiting = None if config.trainer_socket is None else TrainerSocket(config.trainer_socket)
    supervisor = Supervisor(
        waiting.accept if waiting is not None else lambda: ChildTrainer(config, log_format, module=module),
        setup,
        words=manifest.aggregation.layout.state_words,
        seconds=float(manifest.timing.train),
        budget=budget,
        isolated=isolated,
        opened=opened,
    )
    supervisor.start()
    return supervisor, None
