"""`site.toml` as a frozen configuration. A mistake names the file and the key; a misspelt key, its neighbour."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr

from lazaret.alerts import AlertsTable
from lazaret.settings import read_settings
from npr.config import DEVICE, DeviceSettings, Precision
from site_agent.archive.source import KIND, ArchiveSource
from site_agent.policy import SitePolicy

Positive = Annotated[int, Field(ge=1)]
Real = Annotated[float, Field(gt=0)] | Annotated[int, Field(gt=0)]
Seconds = Real
# The checks of `site-agent check`, in this order: what others depend on first, what takes long last.
CHECK_NAMES: Final = (
    "configuration", "certificates", "keys", "manifest", "policy", "coordinator", "clock", "state", "model", "disk",
    "device", "isolation", "privacy", "processing", "data", "images", "code", "trial",
)  # fmt: skip


# As npr/clinical.py reads it, which loads numpy; the trainer reads this file before it is isolated.
OPERATING_POINT: Final = r"^(youden|(sensitivity|specificity)=0\.[0-9]{1,4})$"

INITIAL: Final = "initial"
"""The folder in the state folder for initial models that came by wire."""
ADDRESS: Final = r"^[^\s:/?#@\[\]]+:[0-9]{1,5}$|^\[[0-9a-fA-F:]+\]:[0-9]{1,5}$"
LAST_PORT: Final = 65_535


def _check_address(text: str) -> str:
    _check_dialled(f"//{text}")
    return text


def _check_proxy(text: str) -> str:
    _check_dialled(text)
    return text


def _check_dialled(url: str) -> None:
    """Read as it is when the agent connects, where a port that cannot be would be a bug of ours. Repeats nothing of it:
    a proxy's address may hold a password.
    """
    try:
        parts = urlsplit(url)
        good = bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise ValueError(f"the host is missing, or the port is not a number from 1 to {LAST_PORT}")


def _check_listened(text: str) -> str:
    """Port 0 takes a free one."""
    if int(text.rpartition(":")[2]) > LAST_PORT:
        raise ValueError(f"ports go up to {LAST_PORT}")
    return text


class ConfigTable(BaseModel):
    """Strict: no unknown key, no coercion, no change after construction."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class SiteTable(ConfigTable):
    """Where things are. Relative paths start at the folder of the file itself."""

    identity: str = "identity"
    state: str = "state"
    initial_model: str
    plugins: str = "plugins"
    threads: Positive | None = None
    ready_slot: Seconds | None = None
    worker_wait: Seconds = 120
    isolation: Literal["required", "best"] = "best"
    trainer_socket: str | None = None
    device: Annotated[str, Field(pattern=DEVICE)] = "auto"
    precision: Precision = "auto"
    deterministic: bool = False
    micro_batch: Positive | None = None
    checkpointing: bool = False
    compiled: bool = False

    @property
    def computing(self) -> DeviceSettings:
        """Where this site trains, and how."""
        return DeviceSettings(**{name: getattr(self, name) for name in DeviceSettings.model_fields})


NO_ADDRESS: Final = "coordinator.invalid:7443"
"""What `init` writes where nobody knows the address yet: a name that never exists. A kit brings the right one."""


class CoordinatorTable(ConfigTable):
    address: Annotated[
        str, Field(pattern=ADDRESS, description="host:port, such as hub.example:7443"), AfterValidator(_check_address)
    ]
    proxy: Annotated[str, Field(pattern=r"^http://[^\s/]+$"), AfterValidator(_check_proxy)] | None = Field(
        default=None, description="http://host:port, such as http://proxy.example:3128"
    )
    least_wait: Seconds = 1
    most_wait: Seconds = 60


# What a site states about its processing, written to the log when data are opened (GDPR Art. 30).
STATED: Final = ("controller", "purpose", "legal_basis", "subjects", "categories", "retention")


class DataTable(ConfigTable):
    source: str
    site: str | None = None
    fold: int | str = 0
    folds: Annotated[int, Field(ge=2)] = 5
    validation: Annotated[float, Field(ge=0, lt=1)] | Annotated[int, Field(ge=0, le=0)] = 0.1
    seed: Annotated[int, Field(ge=0)] = 0
    class_map: Annotated[dict[str, str], Field(min_length=1)] | None = None
    version: Annotated[str, Field(min_length=1, max_length=64)] = "1"
    controller: str = ""
    purpose: str = "model training"
    legal_basis: str = ""
    subjects: str = ""
    categories: str = ""
    retention: str = ""


class PrivacyTable(ConfigTable):
    """Differential privacy at this site; without effect where the manifest has no [privacy]."""

    population: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "patients"
    ledger: str = "ledger"
    anchor: str = "ledger-anchor"
    cap: Real | None = None
    cap_alone: Real | None = None
    noise: Real | None = None
    metrics_noise: Real | None = None
    micro_batch: Positive = 64


def _check_rising(bounds: tuple[float, ...]) -> tuple[float, ...]:
    if not bounds or any(one >= other for one, other in pairwise(bounds)):
        raise ValueError("bounds must rise, such as [40, 60, 80]")
    return bounds


class EvaluationTable(ConfigTable):
    """What `site-agent evaluate` tells, to this hospital alone."""

    operating_point: Annotated[
        str, Field(pattern=OPERATING_POINT, description="youden, or a bound such as sensitivity=0.95")
    ] = "youden"
    findings: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    subgroups: tuple[str, ...] = ()
    bands: dict[str, Annotated[tuple[float | int, ...], AfterValidator(_check_rising)]] = Field(default_factory=dict)
    table: str | None = None


class SiteLogging(ConfigTable):
    json_lines: Annotated[bool, Field(alias="json")] = False


class MetricsTable(ConfigTable):
    listen: Annotated[str, Field(pattern=r"^\S+:[0-9]{1,5}$"), AfterValidator(_check_listened)] | None = None


class ArchiveTable(ConfigTable):
    """The hospital's image archive, for sources `dicomweb:`; read by the archive commands alone."""

    cache: str = "archive"
    most_bytes: Positive = 100_000_000_000
    ca: str | None = None
    token_file: str | None = None
    login_file: str | None = None
    certificate: str | None = None
    key: str | None = None
    hosts: tuple[Annotated[str, Field(pattern=ADDRESS), AfterValidator(_check_address)], ...] = ()
    timeout: Seconds = 60


def placed(source: str, base: Path) -> str:
    """A data source whose relative paths start at `base`: a service has another current folder than its operator."""
    kind, _, rest = source.partition(":")
    if kind in ("generated", "dicomweb") or not rest:
        return source
    path, mark, options = rest.partition("?")
    found = [
        f"files={(base / part.removeprefix('files=')).resolve()}" if part.startswith("files=") else part
        for part in options.split("&")
    ]
    return f"{kind}:{(base / path).resolve()}{mark}{'&'.join(found)}"


class SiteConfig(ConfigTable):
    """The whole file, and where it lies."""

    site: SiteTable
    coordinator: CoordinatorTable
    data: DataTable
    policy: SitePolicy = SitePolicy()
    privacy: PrivacyTable = PrivacyTable()
    evaluation: EvaluationTable = EvaluationTable()
    metrics: MetricsTable = MetricsTable()
    logging: SiteLogging = SiteLogging()
    archive: ArchiveTable = ArchiveTable()
    alerts: AlertsTable = AlertsTable()
    path: Path = Field(default=Path("site.toml"), exclude=True)
    _fetched: ArchiveSource | None = PrivateAttr(default=None)

    @classmethod
    def read(cls, path: Path) -> SiteConfig:
        """Read and check a file.

        :raises ConfigError: with the file and the key.
        """
        found = read_settings(cls, path, written_by="site-agent init").model_copy(update={"path": path})
        if not found.data.source.startswith(KIND):
            data = found.data.model_copy(update={"source": placed(found.data.source, path.parent)})
            return found.model_copy(update={"data": data})
        # Whoever reads images reads files: what an archive gave is in a folder, and the archive itself is for others.
        fetched = ArchiveSource.parse(found.data.source, path.parent)
        data = found.data.model_copy(update={"source": fetched.local_source(found.cache)})
        placed_there = found.model_copy(update={"data": data})
        placed_there._fetched = fetched
        return placed_there

    def under(self, name: str) -> Path:
        """A path of the file, from its own folder."""
        return (self.path.parent / name).resolve()

    @property
    def identity(self) -> Path:
        return self.under(self.site.identity)

    @property
    def state(self) -> Path:
        return self.under(self.site.state)

    @property
    def trainer_socket(self) -> Path | None:
        """Where the agent waits for a trainer that is a service of its own; None if it starts one itself."""
        return None if self.site.trainer_socket is None else self.under(self.site.trainer_socket)

    @property
    def fetched(self) -> ArchiveSource | None:
        """The archive that the data come from, if they do."""
        return self._fetched

    @property
    def cache(self) -> Path:
        """The folder of files that were fetched from the archive."""
        return self.under(self.archive.cache)

    @property
    def secret_files(self) -> list[Path]:
        """What this site shows its archive, which whoever sees images has no business with. A certificate's file may
        hold its key.
        """
        table = self.archive
        named = (table.token_file, table.login_file, table.certificate, table.key)
        return [path for name in named if name and (path := self.under(name)).exists()]

    @property
    def sides(self) -> Path:
        """Which patients train and which are held out: the key under differential privacy, else the list."""
        return self.state / "sides"

    @property
    def subgroup_table(self) -> Path | None:
        """A table with columns for subgroups, where it is not the one that lists the images."""
        return None if self.evaluation.table is None else self.under(self.evaluation.table)

    @property
    def initial_model(self) -> Path:
        return self.under(self.site.initial_model)

    @property
    def plugins(self) -> Path:
        """The folder of methods of one's own; a manifest names the file."""
        return self.under(self.site.plugins)

    def model_file(self, digest: str) -> Path:
        """The initial model with this SHA-256: the one that came by wire, or else the hospital's own file."""
        fetched = self.state / INITIAL / f"{digest}.safetensors"
        return fetched if fetched.exists() else self.initial_model

    @property
    def ledger(self) -> Path:
        """The privacy ledger of the patients named in the file."""
        return self.under(self.privacy.ledger) / f"{self.privacy.population}.jsonl"

    @property
    def ledger_anchor(self) -> Path:
        return self.under(self.privacy.anchor) / f"{self.privacy.population}.head"

    @property
    def digest(self) -> str:
        """What the privacy log records at every start."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    @property
    def policy_digest(self) -> str:
        return hashlib.sha256(self.policy.model_dump_json().encode()).hexdigest()
