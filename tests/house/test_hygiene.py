"""Rules about the source of `security` and `lazaret` that no type checker knows."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import security
from security import labels

ROOT = Path(security.__file__).parent
PROJECT = ROOT.parent
FORBIDDEN = {"random", "pickle", "cPickle", "shelve", "marshal", "dill", "joblib"}


def sources() -> list[Path]:
    rooms = ("lazaret", "security", "protos")
    found = sorted(path for room in rooms for path in (PROJECT / room).rglob("*.py") if "_pb2" not in path.name)
    assert len(found) > 10
    return found


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_predictable_randomness_and_no_pickle() -> None:
    for path in sources():
        tree = ast.parse(path.read_text())
        for name in imported(tree):
            assert name.split(".")[0] not in FORBIDDEN, f"{path}: {name}"
            assert not name.startswith("numpy.random"), f"{path}: {name}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr == "random" and isinstance(node.value, ast.Name):
                assert node.value.id not in ("np", "numpy"), f"{path}:{node.lineno}"


def test_the_operating_system_is_asked_for_randomness_in_one_place() -> None:
    for path in sources():
        if path.name != "rng.py":
            assert "urandom" not in path.read_text(), path


def test_counted_randomness_stays_in_tests() -> None:
    for package in ("lazaret", "security", "protos", "npr", "site_agent", "coordinator"):
        for path in (PROJECT / package).rglob("*.py"):
            assert path.name == "rng.py" or "CountedRandomness" not in path.read_text(), path


def all_labels() -> dict[str, bytes]:
    return {name: value for name, value in vars(labels).items() if isinstance(value, bytes) and name != "PROTOCOL"}


def test_labels_are_distinct_and_none_begins_another() -> None:
    found = all_labels()
    assert len(set(found.values())) == len(found) > 20
    for one in found.values():
        assert one.startswith(labels.PROTOCOL + b"/") and one.endswith(b"\0") and one.count(b"\0") == 1
        assert not any(other != one and other.startswith(one) for other in found.values())


def test_labels_are_written_in_one_file() -> None:
    """A hash, key derivation or signature elsewhere takes no literal of its own."""
    for path in sources():
        if path.name == "labels.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, bytes):
                assert labels.PROTOCOL not in node.value, f"{path}:{node.lineno}"
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "sha256":
                literal = [arg for arg in node.args if isinstance(arg, ast.Constant) and arg.value]
                assert not literal, f"{path}:{node.lineno} hashes a literal"
