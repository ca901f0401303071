"""What an operator asks a state folder, also while the coordinator runs; and what a running one says of itself there.

A running coordinator writes `now.json` every few seconds, so that the command can say whether it runs, what it waits
for and how each site is.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from coordinator.config import CoordinatorConfig
from coordinator.database import FILE
from coordinator.round_history import ReadOnlyHistory, RoundHistory, UncheckedSum
from coordinator.run_queue import RunQueue, StopFile
from lazaret.alerts import Alerts, certificate_alerts, disk_alert, manifest_alerts
from lazaret.archive import refuse_moved
from lazaret.control import BY_SIGNAL, NEXT_RUN, NowFile, PauseFile
from security.clock import Clock, SystemClock
from security.identity.enrolment import Identity, installed_manifest
from security.identity.manifest import Manifest
from security.secagg.layout import SCORED

if TYPE_CHECKING:
    from coordinator.run import Shell

PATIENCE_MS: Final = 120_000
ALERT_MS: Final = 60_000


def _unchecked(found: UncheckedSum | None, manifest: Manifest) -> dict[str, Any] | None:
    """The newest sum, while sites have not checked it: without that no further one is made."""
    if found is None:
        return None
    return {
        "round": found.round,
        "since_ms": found.since_ms,
        "certified": sorted(found.acknowledged),
        "missing": [site for site in manifest.sites if site not in found.acknowledged],
    }


def standstill(status: dict[str, Any], now_ms: int) -> str | None:
    """One line for the operator, if a sum has waited for its check for longer than a check takes."""
    unchecked = status["unchecked"]
    if unchecked is None or unchecked["since_ms"] is None or now_ms - unchecked["since_ms"] < PATIENCE_MS:
        return None
    minutes = (now_ms - unchecked["since_ms"]) // 60_000
    missing = ", ".join(unchecked["missing"])
    return (
        f"stalled: the sum of round {unchecked['round']} has had no certificate for {minutes} min; not "
        f"verified by {missing}. See docs/operators.md, \"A sum without a certificate\""
    )


def overview(config_path: Path, clock: Clock | None = None) -> dict[str, Any]:
    """Rounds with their outcomes, sites with their last contact, and whether a coordinator runs."""
    config, base = CoordinatorConfig.read(config_path)
    refuse_moved(base / config.state)
    now = (clock or SystemClock()).now_ms()
    identity = Identity(folder=base / config.identity)
    manifest = installed_manifest(identity, now_ms=now, program="coordinator")
    with ReadOnlyHistory(base / config.state / FILE) as history:
        rounds, sessions = history.rounds(), history.sessions()
        unchecked, completed = history.unchecked_sum(), history.completed()
        scores = scores_json(history, manifest)
    pause = PauseFile(base / config.state).read()
    ends = certificate_ends(manifest)
    return {
        "run": manifest.run,
        "unchecked": _unchecked(unchecked, manifest),
        "rounds_planned": manifest.training.rounds,
        "completed": completed,
        "complete": completed >= manifest.training.rounds,
        "ended_early": StopFile(base / config.state).reason(manifest.run),
        "queue": [one.manifest.run for one in RunQueue(base / config.state).runs()],
        "paused": None if pause is None else pause.reason,
        "service": NowFile(base / config.state).read(now_ms=now),
        "scores": scores,
        "rounds": [row._asdict() for row in rounds],
        "sites": [
            {"site": site, "last_connected_ms": sessions.get(site, (0, None))[1], "certificate_ends_ms": ends[site]}
            for site in manifest.sites
        ],
        "certificate_ends_ms": ends[manifest.coordinator.id],
        "manifest_version": manifest.version,
        "manifest_ends_ms": manifest.expires_at_ms,
    }


def scores_json(history: RoundHistory, manifest: Manifest) -> dict[str, Any] | None:
    """What consenting hospitals scored, and the best round by it; None where the manifest asks for no scores."""
    rule = manifest.scores
    if rule is None:
        return None
    best = history.best(manifest)
    return {
        "figure": rule.figure,
        "hospitals": len(rule.sites),
        "summed": manifest.aggregation.layout.has(SCORED),
        "patience": rule.patience,
        "least_gain": rule.least_gain,
        "best": None if best is None else best.round,
        "since_best": None if best is None else best.since,
        "models": [
            {"round": number, "mean": float(one.mean), "spread": one.spread, "hospitals": one.count}
            for number, one in history.scores().items()
        ],
    }


def _scores_line(scores: dict[str, Any]) -> str:
    if not scores["summed"]:
        return "scores: none are summed, because too few hospitals consent (docs/consortium.md)"
    if scores["best"] is None:
        return "scores: no model has been scored yet"
    one = next(model for model in scores["models"] if model["round"] == scores["best"])
    spread = "" if one["spread"] is None else f", spread {one['spread']:.3f}"
    return (
        f"best round so far: {one['round']}, mean {scores['figure']} score {one['mean']:.3f}{spread} "
        f"over {one['hospitals']} hospitals; {scores['since_best']} scored since"
    )


def certificate_ends(manifest: Manifest) -> dict[str, int]:
    """The last instant of every member's signing certificate."""
    members = (*manifest.roster, manifest.coordinator)
    return {member.id: int(1000 * member.certificate.not_valid_after_utc.timestamp()) for member in members}


def endings(manifest: Manifest, now_ms: int) -> dict[str, str]:
    """What ends soon: certificates, and the manifest."""
    certificates = certificate_alerts(certificate_ends(manifest), now_ms)
    return certificates | manifest_alerts(manifest.version, manifest.expires_at_ms, now_ms)


def lines(status: dict[str, Any], now_ms: int) -> list[str]:
    """`status` as text: whether it runs, what it waits for, sites, rounds."""
    found = [_running(status["service"])]
    found.append(f"run {status['run']}: {status['completed']} of {status['rounds_planned']} rounds completed")
    if status["complete"]:
        found.append("the run is complete")
    if status["ended_early"] is not None:
        found.append(f"the run ends before its last round: {status['ended_early']}")
    if status["scores"] is not None:
        found.append(_scores_line(status["scores"]))
    if status["queue"]:
        found.append(f"runs that wait: {', '.join(status['queue'])}")
    waits = status["service"].get("hindrance") if status["service"]["running"] else None
    paused = f"paused: {status['paused']}" if status["paused"] else None
    found += [line for line in (waits or paused, standstill(status, now_ms)) if line]
    ends = {site["site"]: site["certificate_ends_ms"] for site in status["sites"]}
    found += certificate_alerts(ends | {"the coordinator": status["certificate_ends_ms"]}, now_ms).values()
    found += manifest_alerts(status["manifest_version"], status["manifest_ends_ms"], now_ms).values()
    states = status["service"].get("sites", {}) if status["service"]["running"] else {}
    width = max(len(site) for site in ends)
    for site in status["sites"]:
        state, seen = states.get(site["site"], "not known"), site["last_connected_ms"]
        contact = "never connected" if seen is None else f"last connected {clock_text(seen)}"
        found.append(f"  site {site['site']:<{width}}  {state:<12}  {contact}")
    found += [f"  round {row['number']:>4}  {row['outcome'] or 'open'}" for row in status["rounds"]]
    return found


def _running(service: dict[str, Any]) -> str:
    if not service.get("at_ms"):
        return "not running: no coordinator has run here"
    when = clock_text(service["at_ms"])
    if service.get("stopped"):
        return f"not running: ended {when}, {service['stopped']}"
    if not service["running"]:
        return f"not running: last sign of it {when}; it was killed, or hangs"
    return f"running: {service['phase']}, round {service['round']}"


def clock_text(ms: int) -> str:
    """A local time with its zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(ms / 1000))


class RunPresence:
    """Looks at a running coordinator several times a second, writes down how it is, and tells the operator's alerts."""

    def __init__(
        self, shell: Shell, manifest: Manifest, config: CoordinatorConfig, alerts: Alerts | None = None
    ) -> None:
        self._shell = shell
        self._manifest = manifest
        self._file = NowFile(shell.storage.folder)
        self._alerts = alerts or Alerts("coordinator", config.alerts)
        self._after_ms = 60_000 * config.alerts.after
        self._alert_ms = 0
        self._since: dict[str, int] = {}  # what may become an alert, since when

    def look(self) -> None:
        from coordinator.dashboard.live import Live

        clock, live = self._shell.clock, Live.of(self._shell)
        state = {
            "phase": str(live.phase),
            "round": live.round,
            "hindrance": live.hindrance,
            "sites": {site.name: site.state for site in live.sites},
        }
        self._file.beat(state, now_ms=clock.now_ms(), mono_ms=clock.mono_ms())
        if clock.mono_ms() >= self._alert_ms:
            self._alert_ms = clock.mono_ms() + ALERT_MS
            self._alerts.look(self.conditions(state), now_ms=clock.now_ms())

    def conditions(self, status: dict[str, Any]) -> dict[str, str]:
        """What the operator's alerts are told of, by name."""
        found = disk_alert(self._shell.storage.folder)
        found |= endings(self._manifest, self._shell.clock.now_ms())
        blamed = self._shell.engine.book.excluded
        found |= {f"excluded:{site}": f"{site} is excluded: {reason}" for site, reason in blamed.items()}
        lasting = {} if status["hindrance"] is None else {"stalled": status["hindrance"]}
        away = [site for site, state in status["sites"].items() if state == "away"]
        lasting |= {f"site-missing:{site}": f"{site} is not connected" for site in away}
        if self._shell.engine.check.open:
            lasting["unchecked-sum"] = "the newest sum has no certificate (docs/operators.md)"
        now = self._shell.clock.mono_ms()
        self._since = {name: self._since.get(name, now) for name in lasting}
        return found | {name: text for name, text in lasting.items() if now - self._since[name] >= self._after_ms}

    def stop(self, reason: str) -> None:
        now = self._shell.clock.now_ms()
        self._file.stop(reason, now_ms=now)
        if reason not in (BY_SIGNAL, NEXT_RUN):
            self._alerts.end(f"the coordinator has stopped: {reason}", now_ms=now)
