"""`coordinator check`: everything that can be found out before the start. It opens the port briefly."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Final

from coordinator.assembly import refuse_lost_database, refuse_unchecked_sum
from coordinator.config import CHECK_NAMES, CoordinatorConfig
from coordinator.dashboard.server import admission
from lazaret import checks
from lazaret.checks import CheckList, Line, Unchecked, ok, problem, run, shared, warning
from lazaret.errors import ToolkitError
from lazaret.web.access import Address
from security.clock import Clock, SystemClock
from security.identity import credentials, pki
from security.identity.credentials import Credentials
from security.identity.enrolment import Identity
from security.identity.manifest import Manifest
from security.identity.pinned_files import InitialModel, pinned_model
from security.identity.pki import Role
from security.identity.tls_probe import Destination, ask, names_of

# Beside the sum there are its parts, one site's frames and what is read back for the check.
VECTORS_IN_MEMORY: Final = 6
LOG_BYTES_PER_SITE: Final = 100_000


@dataclass(eq=False, kw_only=True)
class CoordinatorCheckContext:
    """One coordinator's set-up.

    :param free: bytes that can still be written to a folder.
    :param available: bytes of memory that can still be taken; None if the system does not report it.
    """

    path: Path
    config: CoordinatorConfig
    base: Path
    clock: Clock = field(default_factory=SystemClock)
    free: Callable[[Path], int] = checks.free_bytes
    available: Callable[[], int | None] = checks.available_memory

    @classmethod
    def read(cls, path: Path) -> CoordinatorCheckContext:
        config, base = CoordinatorConfig.read(path)
        return cls(path=path, config=config, base=base)

    @cached_property
    def credentials(self) -> Credentials:
        identity = Identity(folder=self.base / self.config.identity)
        return Credentials(identity, Role.COORDINATOR, self.clock, program="coordinator")

    @property
    def manifest(self) -> Manifest:
        return self.credentials.manifest

    @property
    def state(self) -> Path:
        return self.base / self.config.state

    @shared("the initial model cannot be used")
    def initial(self) -> InitialModel:
        return pinned_model(self.config.model_file(self.base, self.manifest.model.initial_file), self.manifest)[0]


CHECKS: Final = CheckList[CoordinatorCheckContext](CHECK_NAMES)


@CHECKS.add
def configuration(context: CoordinatorCheckContext) -> Iterator[Line]:
    yield ok(f"{context.path} is valid")


@CHECKS.add
def certificates(context: CoordinatorCheckContext) -> Iterator[Line]:
    yield from credentials.certificates(context.credentials)


@CHECKS.add
def keys(context: CoordinatorCheckContext) -> Iterator[Line]:
    yield from credentials.key_files(context.credentials)
    yield credentials.audit_root(context.credentials, context.state / "log")


@CHECKS.add
def manifest(context: CoordinatorCheckContext) -> Iterator[Line]:
    yield from credentials.manifest(context.credentials)


@CHECKS.add
def clock(context: CoordinatorCheckContext) -> Iterator[Line]:
    """Nobody is there to compare with: sites compare theirs with this one."""
    yield from credentials.clock_by_dates(context.credentials)


@CHECKS.add
def rounds(context: CoordinatorCheckContext) -> Iterator[Line]:
    """Can a round come about at all, with the sites whose certificates are good today?"""
    manifest, now = context.manifest, context.credentials.now_ms
    least = max(manifest.least_cohort, context.config.rounds.least_cohort or 0)
    able = [member.id for member in manifest.roster if pki.days_left(member.certificate, now) >= 0]
    if len(able) < least:
        yield problem(
            f"a round needs {least} sites, and {len(able)} of {len(manifest.roster)} could take part",
            "lower [rounds] least_cohort, or ask the consortium to enrol or renew sites",
        )
        return
    yield ok(f"a round needs {least} of {len(manifest.roster)} sites; {manifest.training.rounds} rounds are planned")
    ended = sorted({member.id for member in manifest.roster} - set(able))
    if ended:
        yield warning(f"expired certificates: {', '.join(ended)}", "these sites are left out until they are renewed")


@CHECKS.add
def model(context: CoordinatorCheckContext) -> Iterator[Line]:
    context.initial  # noqa: B018  # its error is the finding
    yield ok("the initial model is the one that the manifest pins")


@CHECKS.add
def names(context: CoordinatorCheckContext) -> Iterator[Line]:
    """Names that sites may connect to; another name needs another certificate."""
    held = names_of(context.credentials.identity.tls_certificate())
    if held:
        yield ok(f"sites may connect to {', '.join(held)}")
    else:
        yield problem("the certificate is for no host", "enrol again, with --host for every name that sites connect to")


@CHECKS.add
def port(context: CoordinatorCheckContext) -> Iterator[Line]:
    """Free, or ours already."""
    listen, page = context.config.listen, context.config.dashboard.listen
    taken = _taken(listen)
    if taken is None:
        yield ok(f"{listen} is free")
    elif _runs_here(context):
        yield ok(f"this coordinator is running on {listen}")
        return
    else:
        yield problem(f"{listen}: {taken}", "stop the program that listens there, or choose another address and port")
    if page is None:
        return
    address = Address.parse(page, where="coordinator.toml: dashboard.listen")
    admission(context.config.dashboard, context.base, address, context.credentials.identity)  # its error is the finding
    if (taken := _taken(page)) is not None:
        yield warning(f"{page} for the page: {taken}", "choose another [dashboard] listen, or remove it")


def _taken(listen: str) -> str | None:
    """Why nobody can listen there; None if one can."""
    host, _, number = listen.rpartition(":")
    try:
        with socket.create_server((host.strip("[]") or "0.0.0.0", int(number)), reuse_port=False):
            return None
    except OSError as error:
        return (error.strerror or str(error)).lower()


def _runs_here(context: CoordinatorCheckContext) -> bool:
    """Whoever has the port shows our own certificate."""
    there = Destination.parse(context.config.listen)
    nearby = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(there.host, there.host)
    try:
        served = ask(replace(there, host=nearby), seconds=2.0)
        return served.certificate == context.credentials.identity.tls_certificate()
    except ToolkitError:
        return False


@CHECKS.add
def database(context: CoordinatorCheckContext) -> Iterator[Line]:
    """The rounds that the privacy log has published are in the database."""
    refuse_lost_database(context.state, context.manifest.run)  # its error is the finding, as with the next one
    refuse_unchecked_sum(context.state, context.manifest)
    yield ok("the database holds what the privacy log has published")


@CHECKS.add
def disk(context: CoordinatorCheckContext) -> Iterator[Line]:
    """A round fills the spool with one vector of each site; the newest models are kept; the log only grows."""
    layout, sites = context.manifest.aggregation.layout, len(context.manifest.roster)
    log = sites * LOG_BYTES_PER_SITE
    least = sites * layout.byte_length + 3 * 4 * layout.state_words + log
    kept = context.config.storage.keep_models * 4 * layout.state_words
    used = checks.used_bytes(context.state)
    whole = least + max(0, kept - used) + context.manifest.training.rounds * log
    yield checks.disk(context.state, free=context.free(context.state), least=least, whole=whole)


@CHECKS.add
def memory(context: CoordinatorCheckContext) -> Iterator[Line]:
    available = context.available()
    if available is None:
        raise Unchecked("this system does not report how much memory there is")
    needed = VECTORS_IN_MEMORY * 2 * context.manifest.aggregation.layout.memory_bytes
    yield checks.memory(available=available, needed=needed, what="a round")


def look(config_path: Path, *, skip: Collection[str] = ()) -> Iterator[Line]:
    """Every check, whatever the others say.

    :raises ConfigError: if the configuration itself cannot be read.
    """
    return run(CHECKS, CoordinatorCheckContext.read(config_path), skip=skip)
