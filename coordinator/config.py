"""`coordinator.toml`: where things lie and how patient the operator is. What is learned stands in the manifest."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from security.errors import ConfigError

Seconds = Annotated[float, Field(gt=0, le=7 * 86_400)]

TEMPLATE: Final = """\
# Configuration of a Lazaret coordinator. What is learned, by whom and how stands in the consortium's signed manifest.

identity = "{identity}"          # (required) folder with keys, certificates and manifest
state = "{state}"                # (required) folder for the database, models, spool and privacy log
listen = "{listen}"              # (required) address and port that sites connect to
initial_model = "{initial}"      # (required) the model everybody starts from; its hash is in the manifest

[rounds]
# least_cohort = 3               # never below what the manifest asks for
# train = 3600.0                 # seconds for local training; never above the manifest's
# grace = 60.0                   # seconds that absent sites are waited for when all others are ready
# ping = 3.0                     # seconds to answer before a burst
# audit = 15.0                   # seconds without progress before the check of a sum is handed on

[logging]
# json = false                   # one JSON object a line on stderr
"""


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Rounds(_Section):
    least_cohort: Annotated[int, Field(ge=2, le=255)] | None = None
    train: Seconds | None = None
    grace: Seconds = 60.0
    ping: Seconds = 3.0
    audit: Seconds = 15.0


class Logging(_Section):
    json_lines: Annotated[bool, Field(alias="json")] = False


class CoordinatorConfig(_Section):
    """The whole file. Relative paths are relative to it."""

    identity: str
    state: str
    listen: Annotated[str, Field(pattern=r"^\S+:[0-9]{1,5}$")]
    initial_model: str
    rounds: Rounds = Rounds()
    logging: Logging = Logging()

    @classmethod
    def read(cls, path: Path) -> tuple[Self, Path]:
        """The configuration, and the folder that relative paths start from.

        :raises ConfigError: naming file and key.
        """
        try:
            told = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                "configuration not found", where=str(path), hint="`coordinator init` writes a commented one"
            ) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"not TOML: {error}".lower(), where=str(path)) from None
        try:
            return cls.model_validate(told), path.resolve().parent
        except ValidationError as error:
            raise _explain(error, path, cls) from None


def _explain(error: ValidationError, path: Path, cls: type[BaseModel]) -> ConfigError:
    fault = error.errors(include_input=False, include_url=False)[0]
    where = f"{path}: {'.'.join(str(part) for part in fault['loc'])}"
    if fault["type"] == "extra_forbidden":
        known = _keys(cls, fault["loc"][:-1])
        near = difflib.get_close_matches(str(fault["loc"][-1]), known, 1)
        hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
        return ConfigError("unknown key", where=where, hint=hint)
    if fault["type"] == "missing":
        return ConfigError("is required", where=where, hint="`coordinator init` writes a commented example")
    if fault["type"] == "string_pattern_mismatch":
        return ConfigError("is not of the form host:port", where=where, hint="for example 0.0.0.0:7443")
    return ConfigError(str(fault["msg"]).lower(), where=where)


def _keys(cls: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    for part in path:
        inner = cls.model_fields[str(part)].annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            cls = inner
    return [field.alias or name for name, field in cls.model_fields.items()]
