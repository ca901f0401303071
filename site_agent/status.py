"""What `site-agent status` shows, read from the state folder; and what a running agent says of itself there.

A running agent writes `now.json` every few seconds: connected or not, since when, its last warning, what it has
declined and until when. So the command and the page can say that an agent has ended or hangs, which no other file does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lazaret.alerts import Alerts, certificate_alerts, disk_alert, manifest_alerts
from lazaret.archive import refuse_moved
from lazaret.control import BY_SIGNAL, NEXT_RUN, NowFile, PauseFile
from lazaret.errors import ToolkitError
from security.clock import Clock, SystemClock
from security.identity.enrolment import Identity
from security.identity.membership import AggregationPolicy, aggregation_policy
from security.log.events import TrainerIsolated
from security.log.reader import LogReader
from security.log.store import LogFolder
from security.rng import SystemRandomness
from security.secagg.site.journal import Journal
from site_agent.assembly import read_membership
from site_agent.config import SiteConfig
from site_agent.privacy import budget_status, ledger_files
from site_agent.state_dir import StateDir
from site_agent.state_writer import read_records

if TYPE_CHECKING:
    from site_agent.run import Agent

CONTACT_MS: Final = 10_000  # a finer time would make every state a new one
ALERT_MS: Final = 60_000
WARNING_MS: Final = 3_600_000
BUDGET_SHARE: Final = 0.9
COMPLETE: Final = "the run is complete, unless lost rounds are made up for"


def overview(config: SiteConfig, clock: Clock | None = None) -> dict[str, Any]:
    refuse_moved(config.state)
    clock = clock or SystemClock()
    identity, now = Identity(folder=config.identity), clock.now_ms()
    site, manifest = read_membership(identity, clock, dated=False)
    state_dir = StateDir(config.state, site=site, sealing_key=identity.sealing_key(), randomness=SystemRandomness())
    journal = Journal.replay(read_records(state_dir.wal))
    policy = aggregation_policy(manifest, now_ms=now, dp_active=manifest.privacy is not None)
    head = journal.head(policy)
    heads = LogFolder(state_dir.log).checkpoint_sizes() if state_dir.log.exists() else []
    pause = PauseFile(config.state).read()
    return {
        "site": site,
        "federation": manifest.federation,
        "manifest_version": manifest.version,
        "manifest_ends_ms": manifest.expires_at_ms,
        "run": manifest.run,
        "rounds_planned": manifest.training.rounds,
        "round": head.round,
        "model": head.state_hash.hex(),
        "certified": head.certified,
        "update_of_round": journal.update.round if journal.update else None,
        "stopped": journal.stopped,
        "waits_for_operator": _waits_for_operator(journal, policy),
        "evidence": sorted(str(path) for path in state_dir.evidence.glob("*")),
        "log": str(state_dir.log),
        "log_size": heads[-1] if heads else 0,
        "metrics": state_dir.read_metrics(),
        "isolation": _isolation(state_dir.log),
        "privacy": budget_status(config, manifest),
        "certificate_ends_ms": certificate_end(identity, manifest.site(site).certificate),
        "paused": None if pause is None else pause.reason,
        "agent": NowFile(config.state).read(now_ms=now),
    }


def _waits_for_operator(journal: Journal, policy: AggregationPolicy) -> bool:
    """Whether this site sends nothing more on its model before `site-agent permit`."""
    if policy.dp_active or journal.uploaded_on != journal.head(policy).state_hash:
        return False
    return journal.updates_left(vote=policy.vote) == 0


def _isolation(log: Path) -> dict[str, Any] | None:
    """What the newest process that saw images could reach, by the privacy log; None if there was none."""
    if not log.exists():
        return None
    newest = next(LogReader(log).backwards(TrainerIsolated.type), None)  # an agent may run for months
    return None if newest is None else dict(newest.body)


def isolation_line(body: Mapping[str, Any]) -> str:
    """For people."""
    mechanisms = {"network_namespace": "network namespace", "seccomp": "seccomp", "landlock": "Landlock"}
    if body["ranks"]:
        return "the process that sees images has a network, to train together with others of this hospital"
    if body["connection"]:
        return "the process that sees images can open a connection"
    held = ", ".join(words for mechanism, words in mechanisms.items() if body[mechanism])
    keys = "; it can read the private keys" if body["keys"] else ""
    return f"the process that sees images cannot open a connection: enforced by {held}{keys}"


def certificate_end(identity: Identity, signing: Any) -> int:
    """The end of the first of this site's two certificates to end."""
    ends = (identity.tls_certificate().not_valid_after_utc, signing.not_valid_after_utc)
    return int(1000 * min(end.timestamp() for end in ends))


def clock_text(ms: int) -> str:
    """A local time with its zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(ms / 1000))


def lines(status: dict[str, Any], now_ms: int) -> list[str]:
    """`status` as text: first whether it runs, last the figures of the rounds."""
    found = [_running(status["agent"]), _standing(status)]
    found += [text for _, text in remarks(status, now_ms) if text != found[0]]
    found += [f"evidence against the coordinator, for the consortium: {path}" for path in status["evidence"]]
    found += [isolation_line(status["isolation"])] if status["isolation"] else []
    ends = status["certificate_ends_ms"]
    found.append(f"certificates valid until {clock_text(ends)} ({(ends - now_ms) // 86_400_000} days)")
    return found


def _running(agent: dict[str, Any]) -> str:
    if not agent.get("at_ms"):
        return "not running: no agent has run here"
    if agent.get("stopped"):
        return f"not running: ended {clock_text(agent['at_ms'])}, {agent['stopped']}"
    if not agent["running"]:
        return f"not running: last sign of the agent {clock_text(agent['at_ms'])}; it was killed, or hangs"
    since, contact = agent.get("connected_ms"), agent.get("contact_ms")
    if not since:
        return "running, not connected to the coordinator"
    doing = f", training round {agent['training']}" if agent.get("training") else ", waiting for the next round"
    newest = clock_text(max(since, contact or 0))  # the contact is told in whole tens of seconds
    return f"running, connected since {clock_text(since)}, last contact {newest}{doing}"


def _standing(status: dict[str, Any]) -> str:
    verified = "verified" if status["certified"] else "not verified yet"
    place = f"round {status['round']} of {status['rounds_planned']}"
    standing = f"site {status['site']}, run {status['run']}: {place} accepted, model {status['model'][:16]}, {verified}"
    return f"{standing}; {COMPLETE}" if complete(status) else standing


def complete(status: dict[str, Any]) -> bool:
    """Whether the last planned round is verified here. Only the coordinator knows whether it makes up for lost ones."""
    done = status["certified"] and status["round"] >= status["rounds_planned"]
    return bool(done) and not status["agent"].get("training")


def remarks(status: dict[str, Any], now_ms: int) -> list[tuple[str, str]]:
    """What needs a person's eyes, worst first: (level, text)."""
    agent, found = status["agent"], []
    if status["stopped"]:
        found.append(("bad", f"stopped, the operator must act: {status['stopped']}"))
    if status["waits_for_operator"]:
        found.append(("bad", "too many updates on one model, the operator must act: see `site-agent permit --help`"))
    if not agent["running"]:
        found.append(("bad", _running(agent)))
    ending = certificate_alerts({"this site": status["certificate_ends_ms"]}, now_ms)
    ending |= manifest_alerts(status["manifest_version"], status["manifest_ends_ms"], now_ms)
    found += [("bad" if "-1:" in name else "look", text) for name, text in ending.items()]
    if status["paused"]:
        found.append(("look", f"paused: {status['paused']}; `site-agent resume` goes on"))
    if agent["running"]:
        found += _of_running(agent, now_ms)
    return sorted(found, key=lambda one: ("bad", "look", "good").index(one[0]))


def _of_running(agent: dict[str, Any], now_ms: int) -> list[tuple[str, str]]:
    found, trouble, declined = [], agent.get("trouble"), agent.get("declined")
    since = agent.get("connected_ms")
    if not since:
        found.append(("look", "not connected to the coordinator"))
    twice = declined and trouble and declined["reason"] in trouble["text"]
    # On a stream that stands, a warning of hours ago is over; the log has it.
    recent = trouble and now_ms - trouble["at_ms"] < WARNING_MS
    if trouble and not twice and (not since or (recent and trouble["at_ms"] > since)):
        found.append(("look", f"last warning, {clock_text(trouble['at_ms'])}: {trouble['text']}"))
    if offered := agent.get("next_run"):
        found.append(("look", _offer_line(offered)))
    if declined:
        until = f", until {clock_text(declined['until_ms'])}" if declined["until_ms"] else ""
        found.append(("look", f"declined round {declined['round']}: {declined['reason']}{until}"))
    return found


def _offer_line(offered: dict[str, Any]) -> str:
    run, reason = offered["run"], offered["reason"]
    if reason is None:
        return f"run {run} is offered and permitted: its model is fetched"
    if offered["final"]:
        return f"run {run} is offered, and not permitted here: {reason}"
    return f"run {run} waits for a person ({reason}): `site-agent accept {run}` begins it"


class LastWarning(logging.Handler):
    """Keeps the newest line of the agent's log that was more than information."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(logging.WARNING)
        self._clock = clock
        self.newest: dict[str, Any] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self.newest = {"text": record.getMessage()[:400], "at_ms": self._clock.now_ms()}


class AgentPresence:
    """Looks at a running agent several times a second, writes down how it is, and tells the hospital's alerts."""

    def __init__(self, config: SiteConfig, agent: Agent, alerts: Alerts | None = None) -> None:
        self._config = config
        self._agent = agent
        self._file = NowFile(config.state)
        self._warning = LastWarning(agent.clock)
        self._alerts = alerts or Alerts("site-agent", config.alerts)
        self._since: int | None = None
        self._contact: tuple[int, int] = (0, 0)  # how many messages, when
        self._away_ms = agent.clock.mono_ms()
        self._alert_ms = 0
        logging.getLogger("site-agent").addHandler(self._warning)

    def look(self) -> None:
        agent, clock = self._agent, self._agent.clock
        now, mono = clock.now_ms(), clock.mono_ms()
        live = agent.session.phase in ("live", "awaiting-run")
        if live != (self._since is not None):
            self._since = now if live else None
            self._away_ms = mono
        if agent.expected != self._contact[0]:
            self._contact = (agent.expected, now // CONTACT_MS * CONTACT_MS)
        self._file.beat(self.state(), now_ms=now, mono_ms=mono)
        if mono >= self._alert_ms:
            self._alert_ms = mono + ALERT_MS
            self._alerts.look(self.conditions(), now_ms=now)

    def state(self) -> dict[str, Any]:
        """What `status` and the page show of a running agent."""
        session = self._agent.session
        declined = session.declined and dict(zip(("round", "reason", "until_ms"), session.declined, strict=True))
        return {
            "connected_ms": self._since,
            "contact_ms": self._contact[1] or None,
            "phase": str(session.phase),
            "training": session.training,
            "declined": declined,
            "trouble": self._warning.newest,
            "next_run": None if (offer := self._agent.next_run.offer) is None else offer.about,
        }

    def conditions(self) -> dict[str, str]:
        """What the hospital's alerts are told of, by name."""
        agent, clock = self._agent, self._agent.clock
        found = disk_alert(self._config.state)
        certificate = agent.manifest.site(agent.session.site).certificate
        found |= certificate_alerts({agent.session.site: certificate_end(agent.identity, certificate)}, clock.now_ms())
        found |= manifest_alerts(agent.manifest.version, agent.manifest.expires_at_ms, clock.now_ms())
        away = (clock.mono_ms() - self._away_ms) // 60_000
        if self._since is None and away >= self._config.alerts.after:
            found["disconnected"] = "the agent has had no connection to the coordinator for a long time"
        if (reason := agent.session.machine.core.journal.stopped) is not None:
            found["stopped"] = f"the agent has stopped and needs a person: {reason}"
        if agent.outbox.blocked:
            found["egress-blocked"] = "the egress filter has blocked a message; `privacy-audit egress` has more"
        return found | self._budget()

    def _budget(self) -> dict[str, str]:
        try:
            state = ledger_files(self._config).peek()
        except ToolkitError as error:
            return {"ledger": str(error)}
        if state is None or state.epsilon < BUDGET_SHARE * state.terms.cap:
            return {}
        return {"budget": f"more than {BUDGET_SHARE:.0%} of the privacy budget is spent"}

    def stop(self, reason: str) -> None:
        """The agent ends. An error that ends it, such as a wrong sum, is an alert that stays."""
        now = self._agent.clock.now_ms()
        self._file.stop(reason, now_ms=now)
        if reason not in (BY_SIGNAL, NEXT_RUN):
            stopped = self._agent.session.machine.core.journal.stopped
            self._alerts.end(f"the agent has stopped and needs a person: {stopped or reason}", now_ms=now)
        logging.getLogger("site-agent").removeHandler(self._warning)
