"""docs/errors.md lists every code with its exit code, and nothing else."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import security
from lazaret.errors import ToolkitError

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
ROW = re.compile(r"^\| `([a-z-]+)` \| ([0-9]) \|", re.MULTILINE)


def _all_errors() -> set[type[ToolkitError]]:
    for module in pkgutil.walk_packages(security.__path__, "security."):
        if not module.name.rpartition(".")[2].startswith(("bench", "__main__")):
            importlib.import_module(module.name)
    found, waiting = set(), [ToolkitError]
    while waiting:
        error = waiting.pop()
        found.add(error)
        waiting += error.__subclasses__()
    return found


def test_every_code_is_on_the_page_with_its_exit_code():
    raised = {(error.code, str(error.exit_code)) for error in _all_errors()}
    assert set(ROW.findall(PAGE.read_text(encoding="utf-8"))) == raised
