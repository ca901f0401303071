"""`coordinator.toml`: paths, addresses and time limits. What is trained is in the manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from lazaret.alerts import AlertsTable
from lazaret.settings import read_settings

KEPT_MODELS: Final = 10
HIGHEST_PORT: Final = 65_535
# The parts of `coordinator check`, what others depend on first. The names are here and not beside the functions, since
# those take long to import and every command would have to wait for them to offer `--skip`.
CHECK_NAMES: Final = (
    "configuration", "certificates", "keys", "manifest", "rounds", "clock", "model", "names", "port",
    "database", "disk", "memory",
)  # fmt: skip
Seconds = Annotated[float, Field(gt=0, le=7 * 86_400)]

TEMPLATE: Final = """\
# Configuration of a Lazaret coordinator. What is trained, by whom and how is in the consortium's signed manifest.

identity = "{identity}"          # (required) folder with keys, certificates and manifest
state = "{state}"                # (required) folder for the database, models, spool and privacy log
listen = "{listen}"              # (required) address and port that sites connect to
initial_model = "{initial}"      # (required) the model that all sites start from; its hash is in the manifest

[rounds]
# least_cohort = 3               # never below what the manifest demands
# train = 3600.0                 # seconds for local training; never above the manifest's
# grace = 60.0                   # seconds to wait for absent sites when all others are ready
# ping = 3.0                     # seconds to answer a ping before the aggregation
# audit = 15.0                   # seconds without progress before other sites take over the check of a sum

[storage]
# keep_models = 10               # models of the newest rounds that stay on disk, 3 or more

[logging]
# json = false                   # one JSON object a line on stderr

[dashboard]
listen = "127.0.0.1:7480"        # the operator's page and /metrics, for a browser on this machine; delete for none
# token = "dashboard.token"      # a file of mode 0600; on other addresses than this machine's own, this or client_ca is
                                 # required, and the page is served under the coordinator's own certificate
# client_ca = "operators.pem"    # browsers must show a certificate of this authority

[alerts]                         # who hears of a stalled run, a missing site, certificates, the disk
# command = ["/usr/local/bin/page-me"]  # gets one JSON object on its standard input for each alert
# webhook = "https://chat.example/hook" # gets the same object as a POST
# after = 60                     # minutes that a stalled run or a missing site lasts before it is told
"""


def _check_port(listen: str) -> str:
    """gRPC would listen on what is left of a number that is too high."""
    if int(listen.rpartition(":")[2]) > HIGHEST_PORT:
        raise PydanticCustomError("port", "there is no port above 65535")
    return listen


HostPort = Annotated[str, Field(pattern=r"^\S+:[0-9]{1,5}$"), AfterValidator(_check_port)]


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Rounds(_Section):
    least_cohort: Annotated[int, Field(ge=2, le=255)] | None = None
    train: Seconds | None = None
    grace: Seconds = 60.0
    ping: Seconds = 3.0
    audit: Seconds = 15.0


class StorageSection(_Section):
    keep_models: Annotated[int, Field(ge=3)] = KEPT_MODELS


class CoordinatorLogging(_Section):
    json_lines: Annotated[bool, Field(alias="json")] = False


class Dashboard(_Section):
    listen: HostPort | None = None
    token: str | None = None
    client_ca: str | None = None


class CoordinatorConfig(_Section):
    """The whole file. Relative paths are relative to it."""

    identity: str
    state: str
    listen: Annotated[HostPort, Field(description="host:port, such as 0.0.0.0:7443")]
    initial_model: str
    rounds: Rounds = Rounds()
    storage: StorageSection = StorageSection()
    logging: CoordinatorLogging = CoordinatorLogging()
    dashboard: Dashboard = Dashboard()
    alerts: AlertsTable = AlertsTable()

    @classmethod
    def read(cls, path: Path) -> tuple[Self, Path]:
        """The configuration, and the folder that relative paths start from.

        :raises ConfigError: naming file and key.
        """
        return read_settings(cls, path, written_by="coordinator init"), path.resolve().parent

    def model_file(self, base: Path, digest: str) -> Path:
        """The initial model with this SHA-256: the one of a run that was queued, or else the operator's own file."""
        queued = base / self.state / "initial" / f"{digest}.safetensors"
        return queued if queued.exists() else base / self.initial_model
