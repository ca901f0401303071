"""`site.toml` as a frozen configuration. A mistake names the file and the key; a misspelt key, its neighbour."""

from __future__ import annotations

import hashlib
import json
import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from security.consortium.manifest import describe
from security.errors import ConfigError
from site_agent.policy import Range, SitePolicy

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)] | Annotated[int, Field(gt=0)]


class Table(BaseModel):
    """Strict: no unknown key, no coercion, no change after construction."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class SiteTable(Table):
    """Where things are. Relative paths start at the folder of the file itself."""

    identity: str = "identity"
    state: str = "state"
    initial_model: str
    threads: Positive | None = None
    ready_slot: Seconds | None = None


class CoordinatorTable(Table):
    address: Annotated[str, Field(pattern=r"^[^\s:/]+:[0-9]{1,5}$|^\[[0-9a-fA-F:]+\]:[0-9]{1,5}$")]
    proxy: Annotated[str, Field(pattern=r"^http://[^\s/]+$")] | None = None
    least_wait: Seconds = 1
    most_wait: Seconds = 60


class DataTable(Table):
    source: str
    site: str | None = None
    fold: int | str = 0
    folds: Annotated[int, Field(ge=2)] = 5
    validation: Annotated[float, Field(ge=0, lt=1)] | Annotated[int, Field(ge=0, le=0)] = 0.1
    seed: Annotated[int, Field(ge=0)] = 0
    class_names: tuple[str, ...] | None = None
    purpose: str = "model training"
    legal_basis: str = ""


class SiteConfig(Table):
    """The whole file, and where it lies."""

    site: SiteTable
    coordinator: CoordinatorTable
    data: DataTable
    policy: SitePolicy = SitePolicy()
    path: Path = Field(default=Path("site.toml"), exclude=True)

    @classmethod
    def read(cls, path: Path) -> SiteConfig:
        """Read and check a file.

        :raises ConfigError: with the file and the key.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise ConfigError(
                "configuration not found", where=str(path), hint="`site-agent init` writes a commented one"
            ) from error
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("configuration cannot be read", where=str(path)) from error
        try:
            told = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"not TOML: {error}".lower(), where=str(path)) from error
        try:
            found = cls.model_validate_json(json.dumps(told, default=str))
        except ValidationError as error:
            raise _mistake(path, error) from None
        return found.model_copy(update={"path": path})

    def _under(self, name: str) -> Path:
        return (self.path.parent / name).resolve()

    @property
    def identity(self) -> Path:
        return self._under(self.site.identity)

    @property
    def state(self) -> Path:
        return self._under(self.site.state)

    @property
    def initial_model(self) -> Path:
        return self._under(self.site.initial_model)

    @property
    def digest(self) -> str:
        """What the privacy log records at every start."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    @property
    def policy_digest(self) -> str:
        return hashlib.sha256(self.policy.model_dump_json().encode()).hexdigest()


_TABLES: Final[dict[str, type[BaseModel]]] = {
    "site": SiteTable,
    "coordinator": CoordinatorTable,
    "data": DataTable,
    "policy": SitePolicy,
}


def _mistake(path: Path, error: ValidationError) -> ConfigError:
    """The first fault as file:key, with the nearest known key where one is misspelt."""
    what = describe(error)
    key, _, told = what.partition(": ")
    return ConfigError(told, where=f"{path}:{key}", hint=_hint(error))


def _hint(error: ValidationError) -> str:
    for fault in error.errors(include_input=False, include_url=False):
        if fault["type"] == "extra_forbidden":
            *tables, name = (str(part) for part in fault["loc"])
            near = get_close_matches(name, _known(tables), n=1)
            if near:
                return f"did you mean {near[0]}?"
    return "the file that `site-agent init` writes explains every key"


def _known(tables: list[str]) -> list[str]:
    if not tables:
        return list(_TABLES)
    model: Any = _TABLES.get(tables[0]) if len(tables) == 1 else Range
    return list(model.model_fields) if model else []
