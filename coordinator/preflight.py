"""`coordinator check`: each line says ok, warning or problem, and what to do."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import NamedTuple

from coordinator.assembly import check_certificate
from coordinator.config import CoordinatorConfig
from security.clock import SystemClock
from security.consortium.enrolment import Identity
from security.consortium.initial_model import pinned_model
from security.consortium.manifest import Manifest
from security.errors import ToolkitError

_DAY_MS = 86_400_000


class Line(NamedTuple):
    verdict: str
    what: str
    hint: str = ""


def look(config_path: Path) -> list[Line]:
    """Every check, as far as the ones before it allow."""
    config, base = CoordinatorConfig.read(config_path)
    lines = [Line("ok", f"configuration {config_path}")]
    identity = Identity(folder=base / config.identity)
    try:
        manifest = identity.manifest(now_ms=SystemClock().now_ms())
    except ToolkitError as error:
        return [*lines, Line("problem", str(error), error.hint or "")]
    if manifest is None:
        return [*lines, Line("problem", "no manifest is installed", "coordinator join --manifest FILE")]
    lines.append(Line("ok", f"manifest version {manifest.version} of {manifest.federation}, signed by the root"))
    lines += [_certificate(identity, manifest), _model(base / config.initial_model, manifest), _port(config.listen)]
    return lines


def _certificate(identity: Identity, manifest: Manifest) -> Line:
    clock = SystemClock()
    try:
        certificate = check_certificate(identity, manifest, clock)
        identity.signing_key(manifest.coordinator.certificate)
    except ToolkitError as error:
        return Line("problem", str(error), error.hint or "")
    left = (certificate.not_valid_after_utc.timestamp() * 1000 - clock.now_ms()) / _DAY_MS
    if left < 30:
        return Line("warning", f"TLS certificate ends in {left:.0f} days", "renew it with the consortium")
    return Line("ok", f"certificates and keys; TLS certificate valid for {left:.0f} days")


def _model(path: Path, manifest: Manifest) -> Line:
    try:
        pinned_model(path, manifest)
    except ToolkitError as error:
        return Line("problem", str(error), error.hint or "")
    return Line("ok", f"initial model {path.name} is the one in the manifest")


def _port(listen: str) -> Line:
    host, _, port = listen.rpartition(":")
    try:
        with socket.create_server((host.strip("[]") or "0.0.0.0", int(port)), reuse_port=False):
            return Line("ok", f"{listen} is free")
    except OSError as error:
        return Line("problem", f"{listen}: {(error.strerror or str(error)).lower()}", "is a coordinator running here?")
