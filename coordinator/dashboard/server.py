"""Puts the operator's page and `/metrics` beside a run: who may look, where it listens, and what it looks at."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cryptography import x509
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from coordinator.assembly import Assembled
from coordinator.config import CoordinatorConfig, Dashboard
from coordinator.dashboard.live import EXCLUDED, Live
from coordinator.dashboard.state_json import LogCheckpoints, PageState
from coordinator.phases import RunPhase
from coordinator.round_history import ReadOnlyHistory
from lazaret import software
from lazaret.checks import free_bytes
from lazaret.errors import ConfigError
from lazaret.web.access import Address, Guard, read_token
from lazaret.web.server import Pages, WebServer, assets, exposition
from security.identity.enrolment import Identity
from security.log.roster import audit_roster

log = logging.getLogger("coordinator")
Watch = Callable[[], None]


@contextmanager
def open_dashboard(config: CoordinatorConfig, base: Path, ready: Assembled) -> Iterator[Watch]:
    """The page, for as long as the run goes on. Gives what the engine's loop has to call now and then.

    :raises ConfigError: if others could look who may not.
    """
    listen = config.dashboard.listen
    if listen is None:
        yield lambda: None
        return
    address = Address.parse(listen, where="coordinator.toml: dashboard.listen")
    guard, tls = admission(config.dashboard, base, address, ready.identity)
    shell, manifest, phases = ready.shell, ready.manifest, PhaseClock()
    history = ReadOnlyHistory(shell.storage.path)
    heads = LogCheckpoints(shell.storage.log, audit_roster(manifest), manifest.coordinator.id)
    page = PageState(manifest, history, heads)

    def watch() -> None:
        page.look(Live.of(shell))
        phases.look(shell.engine.phase, shell.clock.mono_ms())

    watch()
    server = WebServer(pages(page, phases, guard).answer, address, tls=tls)
    try:
        server.start()
        log.info("dashboard on %s", server.url)
    except ConfigError as error:
        # A page that cannot be shown is no reason to keep the hospitals waiting.
        log.warning("no dashboard: %s", error)
    try:
        yield watch
    finally:
        server.stop()
        history.close()


def pages(page: PageState, phases: PhaseClock, guard: Guard) -> Pages:
    routes = {
        **assets("lazaret.web", "kit.js", "base.css"),
        **assets("coordinator.dashboard", "index.html", "app.js", "style.css"),
        "/state.json": page.json,
        "/metrics": lambda: exposition(RunCollector(page, phases)),
    }
    return Pages(routes, guard)


def admission(
    settings: Dashboard, base: Path, address: Address, identity: Identity
) -> tuple[Guard, ssl.SSLContext | None]:
    """On this machine's own address whoever is on it may look; anywhere else only who proves to be expected, over TLS.

    :raises ConfigError: if neither a token nor an authority is named where one is needed.
    """
    token = read_token(base / settings.token) if settings.token is not None else None
    if address.is_loopback:
        return Guard(token=token), None
    if token is None and settings.client_ca is None:
        raise ConfigError(
            "on this address the page needs a token or client certificates",
            where="coordinator.toml: dashboard.listen",
            hint="set token or client_ca in [dashboard], or listen on 127.0.0.1",
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(identity.tls_path, identity.tls_key_path())
    if settings.client_ca is not None:
        _require_certificates(context, base / settings.client_ca)
    return Guard(token=token, names=(address.url_host, *_names(identity))), context


def _require_certificates(context: ssl.SSLContext, path: Path) -> None:
    try:
        context.load_verify_locations(cafile=path)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            "not a certificate authority in PEM", where=str(path), hint="dashboard.client_ca names a file"
        ) from error
    context.verify_mode = ssl.CERT_REQUIRED


def _names(identity: Identity) -> list[str]:
    """The names under which the coordinator's own certificate is good."""
    found = identity.tls_certificate().extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = [str(address) for address in found.get_values_for_type(x509.IPAddress)]
    return [*found.get_values_for_type(x509.DNSName), *(f"[{a}]" if ":" in a else a for a in addresses)]


# `/metrics` for Prometheus: how the run goes, nothing of what is learnt, nothing about patients. Names and labels are
# fixed here, and a test holds the output against them. Counts of rounds and aborts come from the database, so that they
# survive a restart; bytes and phases count from this start.

# The reasons that an attempt can end for; any other text counts as "other", so that no text becomes a label.
REASONS: Final = ("sites missing at S1", "sites missing at S2", "a site aborted", "aborted", "given up")
OTHER: Final = "other"


class PhaseClock:
    """Seconds spent in each phase since this start."""

    def __init__(self) -> None:
        self.seconds: dict[RunPhase, float] = dict.fromkeys(RunPhase, 0.0)
        self._last: tuple[RunPhase, int] | None = None

    def look(self, phase: RunPhase, mono_ms: int) -> None:
        if self._last is not None:
            self.seconds[self._last[0]] += (mono_ms - self._last[1]) / 1000
        self._last = (phase, mono_ms)


class RunCollector(Collector):
    """Asked by the registry at every scrape."""

    def __init__(self, page: PageState, phases: PhaseClock) -> None:
        self._page = page
        self._phases = phases

    def collect(self) -> Iterator[Metric]:
        live = self._page.live
        yield GaugeMetricFamily("lazaret_round", "Number of the round under way.", live.round)
        yield GaugeMetricFamily("lazaret_rounds_planned", "Models to be published in this run.", live.planned)
        yield from self._rounds()
        yield from self._of_phases(live)
        hindered = live.hindrance is not None
        yield GaugeMetricFamily("lazaret_hindered", "1 while something keeps the run from going on.", hindered)
        ends = GaugeMetricFamily(
            "lazaret_certificate_end_timestamp_seconds", "When a member's certificate ends.", labels=("member",)
        )
        for member, until in self._page.certificates.items():
            ends.add_metric((member,), until / 1000)
        yield ends
        yield GaugeMetricFamily(
            "lazaret_manifest_end_timestamp_seconds", "When the manifest ends.", self._page.manifest_ends_ms / 1000
        )
        free = free_bytes(self._page.history.path.parent)
        yield GaugeMetricFamily("lazaret_disk_free_bytes", "What may still be written to the state folder.", free)
        yield from _of_sites(live, self._page)
        traffic = CounterMetricFamily(
            "lazaret_bytes", "Bytes of messages since this start.", labels=("direction", "message")
        )
        for direction, counted in (("in", live.received), ("out", live.sent)):
            for message, size in counted.items():
                traffic.add_metric((direction, message), size)
        yield traffic
        yield GaugeMetricFamily("lazaret_log_entries", "Entries in this coordinator's privacy log.", live.log_size)
        build = GaugeMetricFamily("lazaret_build_info", "The version that runs.", labels=("version",))
        build.add_metric((software.version(),), 1)
        yield build

    def _rounds(self) -> Iterator[Metric]:
        history = self._page.history
        rounds = CounterMetricFamily("lazaret_rounds", "Rounds that have ended, by outcome.", labels=("outcome",))
        for outcome, count in history.outcomes().items():
            rounds.add_metric((outcome,), count)
        yield rounds
        count, seconds = history.durations()
        yield SummaryMetricFamily(
            "lazaret_round_seconds", "Seconds from order to end of a round.", count_value=count, sum_value=seconds
        )
        aborts = CounterMetricFamily("lazaret_aborts", "Attempts that ended without a sum.", labels=("reason",))
        counted = dict.fromkeys((*REASONS, OTHER), 0)
        for reason, number in history.abort_reasons().items():
            counted[reason if reason in REASONS else OTHER] += number
        for reason, number in counted.items():
            aborts.add_metric((reason,), number)
        yield aborts

    def _of_phases(self, live: Live) -> Iterator[Metric]:
        phase = GaugeMetricFamily("lazaret_phase", "1 for the phase that the run is in.", labels=("phase",))
        spent = CounterMetricFamily("lazaret_phase_seconds", "Seconds in each phase so far.", labels=("phase",))
        for known in RunPhase:
            phase.add_metric((known,), live.phase is known)
            spent.add_metric((known,), self._phases.seconds[known])
        yield phase
        yield spent


def _of_sites(live: Live, page: PageState) -> Iterator[Metric]:
    sessions = page.page_history().sessions
    counted = {
        "listed": len(live.sites),
        "connected": sum(site.connected for site in live.sites),
        "ready": sum(site.state == "ready" for site in live.sites),
        "excluded": sum(site.state == EXCLUDED for site in live.sites),
    }
    sites = GaugeMetricFamily("lazaret_sites", "Sites of the roster, by state.", labels=("state",))
    for state, count in counted.items():
        sites.add_metric((state,), count)
    yield sites
    up = GaugeMetricFamily("lazaret_site_up", "1 while a site is connected.", labels=("site",))
    seen = GaugeMetricFamily("lazaret_site_seen_timestamp_seconds", "Last contact with a site.", labels=("site",))
    for site in live.sites:
        up.add_metric((site.name,), site.connected)
        seen.add_metric((site.name,), site.heard or sessions.get(site.name, 0) / 1000)
    yield up
    yield seen
