"""Puts the operator's page beside a run: who may look, where it listens, and what it looks at."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cryptography import x509

from coordinator.assembly import Assembled
from coordinator.config import CoordinatorConfig, Dashboard
from coordinator.dashboard.live import Live
from coordinator.dashboard.metrics import PhaseClock, RunCollector
from coordinator.dashboard.state_json import Board, LogCheckpoints
from coordinator.round_history import ReadOnlyHistory
from lazaret.errors import ConfigError
from lazaret.web.access import Address, Guard, read_token
from lazaret.web.pages import Pages, assets, exposition
from lazaret.web.server import WebServer
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
    board = Board(manifest, history, LogCheckpoints(shell.storage.log, audit_roster(manifest), manifest.coordinator.id))

    def watch() -> None:
        board.look(Live.of(shell))
        phases.look(shell.engine.phase, shell.clock.mono_ms())

    watch()
    server = WebServer(pages(board, phases, guard).answer, address, tls=tls)
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


def pages(board: Board, phases: PhaseClock, guard: Guard) -> Pages:
    routes = {
        **assets("lazaret.web", "kit.js", "base.css"),
        **assets("coordinator.dashboard", "index.html", "app.js", "style.css"),
        "/state.json": board.state,
        "/metrics": lambda: exposition(RunCollector(board, phases)),
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
