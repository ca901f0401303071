"""TOML files of people, read strictly: a mistake names the file and the key; a misspelt key, its neighbour."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from lazaret.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)


def read_settings(model: type[Model], path: Path, *, what: str = "configuration", written_by: str) -> Model:
    """A file as the frozen settings it holds.

    :param what: what people call the file.
    :param written_by: the command that writes a commented one.
    :raises ConfigError: with the file and the key.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = f"if its folder was moved, --config says where it is now; `{written_by}` writes a new one"
        raise ConfigError(f"{what} not found", where=str(path), hint=hint) from None
    except tomllib.TOMLDecodeError as error:
        hint = _unreadable(written_by)
        raise ConfigError(f"not TOML: {error}".lower(), where=str(path), hint=hint) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} cannot be read", where=str(path), hint=_unreadable(written_by)) from error
    try:
        # As JSON, because there a list may become a tuple while everything else stays strict.
        return model.model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        raise _mistake(error, model, path, written_by) from None


def _unreadable(written_by: str) -> str:
    return f"may this user read it, and is it the text file that `{written_by}` has written?"


def _mistake(error: ValidationError, model: type[BaseModel], path: Path, written_by: str) -> ConfigError:
    """The first fault, without the value: it may be long, and it may be secret.

    An unknown key comes before a missing one: where one name is misspelt, both are reported.
    """
    faults = error.errors(include_input=False, include_url=False)
    fault = min(faults, key=lambda fault: fault["type"] != "extra_forbidden")
    place = [str(part) for part in fault["loc"]]
    unknown = fault["type"] == "extra_forbidden"
    message = "unknown key" if unknown else fault["msg"].lower()
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    hint = _neighbour(model, place) if unknown else _expected(model, place)
    where = f"{path}: {'.'.join(place)}" if place else str(path)
    hint = hint or f"the file that `{written_by}` writes explains every key"
    return ConfigError(message + more, where=where, hint=hint)


def _neighbour(model: type[BaseModel], place: Sequence[str]) -> str:
    known = sorted(_fields(_table(model, place[:-1])))
    near = get_close_matches(place[-1], known, n=1)
    return f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}" if known else ""


def _expected(model: type[BaseModel], place: Sequence[str]) -> str:
    """The description of a field, where it has one."""
    field = _fields(_table(model, place[:-1])).get(place[-1]) if place else None
    return f"expected {field.description}" if field is not None and field.description else ""


def _fields(model: type[BaseModel] | None) -> dict[str, Any]:
    """Fields by the name they have in the file."""
    return {field.alias or name: field for name, field in model.model_fields.items()} if model else {}


def _table(model: type[BaseModel] | None, place: Sequence[str]) -> type[BaseModel] | None:
    """The model of the table at a place; None where there is none of our own."""
    kind: Any = model
    for part in place:
        if get_origin(kind) is dict:
            kind = get_args(kind)[1]
            continue
        field = _fields(_model_in(kind)).get(part)
        kind = field.annotation if field is not None else None
    return _model_in(kind)


def _model_in(kind: Any) -> type[BaseModel] | None:
    """A model, or the one in a union with None."""
    for choice in (kind, *get_args(kind)):
        if isinstance(choice, type) and issubclass(choice, BaseModel):
            return choice
    return None
