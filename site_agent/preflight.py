"""`site-agent check`: each line says ok, warning or problem, and what to do. Starts nothing, sends nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from security import pki
from security.clock import SystemClock
from security.consortium.enrolment import Identity
from security.consortium.initial_model import pinned_model
from security.consortium.manifest import Manifest
from security.errors import ToolkitError
from site_agent.assembly import config_hash_of, read_membership
from site_agent.config import SiteConfig

EXPIRY_WARNING_DAYS: Final = 30


@dataclass(frozen=True, slots=True)
class Line:
    verdict: str
    what: str
    hint: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def look(config_path: Path) -> list[Line]:
    """Every check, as far as the ones before it allow."""
    config = SiteConfig.read(config_path)
    return [Line("ok", f"configuration {config_path}"), *_membership(config)]


def _membership(config: SiteConfig) -> Iterator[Line]:
    identity = Identity(folder=config.identity)
    try:
        site, manifest = read_membership(identity, SystemClock())
        identity.signing_key(manifest.site(site).certificate)
    except ToolkitError as error:
        yield _problem(error)
        return
    left = pki.days_left(identity.tls_certificate(), SystemClock().now_ms())
    words = f"site {site}: keys and certificates, valid for {left} days"
    yield Line("ok", words) if left >= EXPIRY_WARNING_DAYS else Line("warning", words, "renew them with the consortium")
    yield Line("ok", f"manifest version {manifest.version} of {manifest.federation}, run {manifest.run}")
    yield _try("policy permits this federation", lambda: config.policy.check_federation(manifest))
    yield _try("one training configuration", lambda: config_hash_of(manifest))
    yield _try("initial model is the pinned one", lambda: pinned_model(config.initial_model, manifest))
    yield _try("learning code and settings are the manifest's", lambda: _check_code(manifest))
    yield _try("data can be opened", lambda: _open_data(config, manifest, site))


def _check_code(manifest: Manifest) -> None:
    from npr.initial import check_code
    from site_agent.trainer import recipe_of

    check_code(manifest.model.code_digest)
    recipe_of(manifest)


def _open_data(config: SiteConfig, manifest: Manifest, site: str) -> None:
    from site_agent.data import open_data
    from site_agent.trainer import recipe_of

    open_data(config.data, site=site, image_size=recipe_of(manifest).image_size, classes=manifest.model.classes)


def _try(what: str, check: Callable[[], object]) -> Line:
    try:
        check()
    except ToolkitError as error:
        return _problem(error)
    return Line("ok", what)


def _problem(error: ToolkitError) -> Line:
    return Line("problem", str(error), error.hint or "")
