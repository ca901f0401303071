"""Each package opens with its contract: the modules that are really there, and who really imports it."""

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


NAMES = {package.relative_to(ROOT).as_posix().replace("/", "."): package for package in PACKAGES}


def package_of(module: str) -> str:
    while module and module not in NAMES:
        module = module.rpartition(".")[0]
    return module


def imports(package: str) -> set[str]:
    """The other packages of this project that the modules of a package import, wherever in a file it stands."""
    found = set[str]()
    for file in NAMES[package].glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {package_of(alias.name) for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {package_of(f"{node.module}.{alias.name}") for alias in node.names}
    return found - {"", package}


IMPORTS = {package: imports(package) for package in NAMES}


@pytest.mark.parametrize("package", sorted(NAMES))
def test_a_contract_names_who_imports_the_package(package: str) -> None:
    """Packages of the same top folder by their full name, others by their top folder."""
    top = package.partition(".")[0]
    found = {other for other, imported in IMPORTS.items() if package in imported}
    shown = sorted({other if other.partition(".")[0] == top else other.partition(".")[0] for other in found})
    contract = ast.get_docstring(ast.parse((NAMES[package] / "__init__.py").read_text())) or ""
    line = re.search(r"^Imported by: (.*?)\.$", contract, flags=re.MULTILINE | re.DOTALL)
    assert line, f"write: Imported by: {', '.join(shown)}."
    assert re.split(r",\s+", line[1]) == (shown or ["nothing; it is run"])
