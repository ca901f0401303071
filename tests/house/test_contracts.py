"""Each package opens with its contract, and the contract lists the modules that are really there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOP = ("lazaret", "security", "protos", "npr", "site_agent", "coordinator")
PACKAGES = sorted({file.parent for top in TOP for file in (ROOT / top).rglob("__init__.py")})


def parts(package: Path) -> set[str]:
    modules = {file.stem for file in package.glob("*.py")} - {"__init__"}
    return modules | {folder.parent.name for folder in package.glob("*/__init__.py")}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_package_opens_with_its_contract(package: Path) -> None:
    tree = ast.parse((package / "__init__.py").read_text())
    contract = ast.get_docstring(tree)
    assert contract and len(tree.body) == 1, "a contract and no code"
    listed = set(re.findall(r"^    (\w+)  +\S", contract, flags=re.MULTILINE))
    assert listed == parts(package)
