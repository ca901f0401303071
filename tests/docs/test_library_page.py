"""docs/library.md as it stands: the method that is printed is the file, its commands run, its Python runs."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lazaret.errors import ConfigError
from npr import plugin
from npr.lab import plugins
from npr.methods import registry

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples" / "own_method.py"
FOREIGN = """
from npr.methods.base import Method
from npr.methods.registry import register

@register("{name}", "a method of a test")
class Own(Method):
    pass
"""


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    registry.names()
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.setattr(plugins, "_loaded", set())
    monkeypatch.setattr(plugin, "_loaded", {})
    monkeypatch.delenv(plugins.VARIABLE, raising=False)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_method_on_the_page_is_the_file() -> None:
    printed = blocks("python")[0]
    assert printed in EXAMPLE.read_text(encoding="utf-8")


def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    """In a copy of the example's folder, so that results go there."""
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "own_method.py").write_text(EXAMPLE.read_text(encoding="utf-8"), encoding="utf-8")
    lines = [line.removeprefix("$ ") for line in blocks("console")[0].splitlines()]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    script = "\n".join(["set -euo pipefail", *lines])
    ran = subprocess.run(
        ["timeout", "240", "bash", "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "focal+npr" in ran.stdout
    results = json.loads((tmp_path / "runs" / "focal" / "results.json").read_text())
    assert [row["variant"] for row in results["summary"]].count("focal[gamma=2]") and not results["failed"]


def test_the_objects_of_the_page_work(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(blocks("python")[1], "docs/library.md", "exec"), {})
    first, second, recall = capsys.readouterr().out.splitlines()
    assert first.startswith("1 ") and second.startswith("2 ") and 0 <= float(recall) <= 1


def test_what_the_page_imports_is_there() -> None:
    for dotted in re.findall(r"`((?:npr|security)\.[\w.]+)`", PAGE):
        module, _, name = dotted.rpartition(".")
        try:
            importlib.import_module(dotted)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(module), name), dotted


def test_what_the_page_says_can_be_overridden_is_there() -> None:
    from npr.methods.base import Method

    table = PAGE.split("| override | to |")[1].split("\n\n")[0]
    names = re.findall(r"`(\w+)(?:\([^)]*\))?`", "".join(row.split("|")[1] for row in table.splitlines() if "|" in row))
    assert len(names) > 10 and all(hasattr(Method, name) for name in names)


def test_a_method_that_takes_a_taken_name_is_refused(tmp_path: Path) -> None:
    taken = tmp_path / "taken.py"
    taken.write_text(FOREIGN.format(name="fedavg"))
    plugins.announce((taken,))
    with pytest.raises(ConfigError, match="'fedavg' is registered already"):
        plugins.load_plugins()


def test_a_plugin_is_loaded_once_and_its_mistakes_are_its_own(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(FOREIGN.format(name="of-a-test"))
    bad.write_text("1 / 0")
    plugins.announce((good,))
    plugins.load_plugins()
    plugins.load_plugins()
    assert registry.get("of-a-test").summary == "a method of a test"
    plugins.announce((bad,))
    with pytest.raises(ConfigError, match=r"bad\.py: fails to load: ZeroDivisionError"):
        plugins.load_plugins()
    plugins.announce((tmp_path / "none.py",))
    with pytest.raises(ConfigError, match="no such Python file"):
        plugins.load_plugins()


def test_a_federation_on_the_wire_loads_what_its_manifest_pins_and_nothing_else() -> None:
    """Only the laboratory reads the variable; only one module of a site runs a plugin, whose bytes it has compared."""
    for package in ("site_agent", "coordinator", "lazaret", "security", "protos", "npr/methods", "npr/data"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert plugins.VARIABLE not in text and "npr.lab.plugins" not in text, path
            assert "run_plugin" not in text or path == ROOT / "site_agent" / "trainer" / "plugin.py", path
