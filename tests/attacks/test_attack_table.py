"""docs/attacks.md names rules that exist and files that exist, and leaves none out."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
ROOMS = (
    "security.secagg.site",
    "security.secagg.coordinator",
    "security.secagg",
    "security.identity",
    "security.log",
    "security.crypto",
    "security",
    "site_agent",
    "site_agent.trainer",
    "coordinator",
)
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "attacks.md").read_text(encoding="utf-8").splitlines()
    if re.match(r"\| A\d+ ", line)
]


def rules(row: list[str]) -> list[str]:
    return re.findall(r"`([a-z_]+\.[A-Za-z_.]+)`", row[2])


def files(row: list[str]) -> list[str]:
    return re.findall(r"test_\w+\.py", row[3])


def named_tests(name: str) -> list[str]:
    tree = ast.parse((HERE / name).read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def test_every_attack_has_one_row() -> None:
    assert [row[0] for row in ROWS] == [f"A{n}" for n in range(1, len(ROWS) + 1)]


def test_the_files_are_those_in_the_folder() -> None:
    listed = {name for row in ROWS for name in files(row)}
    assert listed == {path.name for path in HERE.glob("test_a[0-9]*.py")}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_rules_exist_and_are_what_the_tests_take_away(row: list[str]) -> None:
    assert any(name.endswith("_twin") for file in files(row) for name in named_tests(file))
    text = "".join((HERE / name).read_text(encoding="utf-8") for name in files(row))
    for rule in rules(row):
        module, *path = rule.split(".")
        where = next(
            found
            for found in ROOMS
            if importlib.util.find_spec(f"{found}.{module}") is not None
        )
        target: object = importlib.import_module(f"{where}.{module}")
        for part in path:
            target = getattr(target, part)
        assert path[-1] in text, f"{rule} is named in {row[0]} but not in its tests"


def test_there_are_as_many_attacks_and_twins_as_we_say() -> None:
    found = [name for row in ROWS for file in set(files(row)) for name in named_tests(file)]
    assert len(set(found)) >= 50
    assert len({name for name in found if name.endswith("_twin")}) >= 22
