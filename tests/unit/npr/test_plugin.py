"""Methods of one's own run from memory, once, and are known by what they register."""

from __future__ import annotations

from pathlib import Path

import pytest

from lazaret.errors import ConfigError
from npr import plugin
from npr.methods import registry
from npr.plugin import plugin_of, run_plugin

SOURCE = b"""
from __future__ import annotations
from dataclasses import dataclass
from npr.methods.base import Method
from npr.methods.registry import register

@dataclass
class Something:
    number: int = 1

@register("of-a-test+npr", "two", npr=True)
@register("of-a-test", "one")
class OfATest(Method):
    pass
"""


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.names()
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.setattr(plugin, "_loaded", {})


def test_it_runs_once_and_is_known_by_its_methods() -> None:
    first = run_plugin(SOURCE, "own.py")
    assert run_plugin(SOURCE, "own.py") is first is plugin_of("of-a-test")
    assert first.methods == {"of-a-test", "of-a-test+npr"} and plugin_of("fedavg") is None


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (b"1 / 0", "ZeroDivisionError"),
        (b"def", "SyntaxError"),
        (b"raise SystemExit(0)", "SystemExit"),
        (b"\0", "own.py"),
        (SOURCE.replace(b"of-a-test", b"fedavg"), "registered already"),
        (b"import helper_beside_it", "ModuleNotFoundError"),
    ],
)
def test_its_mistakes_are_its_own(source: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "helper_beside_it.py").touch()  # one file is one digest: nothing beside it is found
    with pytest.raises(ConfigError, match=says):
        run_plugin(source, str(tmp_path / "own.py"))
    assert plugin_of("of-a-test") is None
