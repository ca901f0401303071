"""docs/configuration.md has every key of the three files, with the default of the code, and no other key."""

from __future__ import annotations

import json
import re
import types
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from coordinator.config import CoordinatorConfig
from security.consortium.plan import FederationPlan
from site_agent.config import SiteConfig
from site_agent.policy import Range

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
FILES: dict[str, type[BaseModel]] = {
    "site.toml": SiteConfig,
    "coordinator.toml": CoordinatorConfig,
    "federation.toml": FederationPlan,
}
ROW = re.compile(r"^\| `([a-z_]+)` \| [^|\n]+ \| ([^|\n]+) \| [^|\n]+ \|$", re.MULTILINE)
TOP = "The top of the file"


def key_of(name: str, field: FieldInfo) -> str:
    return field.alias or name


def table_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model behind a field that is a table of its own, optional or not."""
    kinds = get_args(field.annotation) if isinstance(field.annotation, types.UnionType) else (field.annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def shown_default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "none" if value is None else f"`{json.dumps(value)}`"


def keys_in_code() -> dict[tuple[str, str], dict[str, str]]:
    """(file, table) -> key -> default, as the page has to show it."""
    found: dict[tuple[str, str], dict[str, str]] = {("site.toml", "`[policy.settings]`"): _keys(Range)}
    for file, model in FILES.items():
        top = _keys(model)
        if top:
            found[file, TOP] = top
        for name, field in model.model_fields.items():
            inner = table_of(field)
            if inner is not None:
                found[file, f"`[{key_of(name, field)}]`"] = _keys(inner)
    return found


def _keys(model: type[BaseModel]) -> dict[str, str]:
    """The keys of one table, without the tables in it."""
    own = {name: field for name, field in model.model_fields.items() if not field.exclude and table_of(field) is None}
    return {key_of(name, field): shown_default(field) for name, field in own.items()}


def keys_on_page() -> dict[tuple[str, str], dict[str, str]]:
    found = {}
    for file, part in re.findall(r"^## ([a-z]+\.toml)\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL):
        for table, rows in re.findall(r"^### ([^\n]+)\n(.*?)(?=^### |\Z)", part, re.MULTILINE | re.DOTALL):
            found[file, table] = dict(ROW.findall(rows))
    return found


def test_the_tables_are_those_of_the_files() -> None:
    assert set(keys_on_page()) == set(keys_in_code())


@pytest.mark.parametrize(("file", "table"), keys_in_code())
def test_keys_and_defaults_are_those_of_the_code(file: str, table: str) -> None:
    assert keys_on_page()[file, table] == keys_in_code()[file, table]


def test_every_variable_that_is_read_is_on_the_page() -> None:
    packages = ("lazaret", "security", "protos", "npr", "site_agent", "coordinator")
    sources = [path for name in packages for path in (ROOT / name).rglob("*.py")]
    read = {name for path in sources for name in re.findall(r'"(LAZARET_[A-Z_]+)"', path.read_text(encoding="utf-8"))}
    assert read
    assert read == set(re.findall(r"^\| `(LAZARET_[A-Z_]+)` \|", PAGE, re.MULTILINE))
