"""The pages agree with the tree: links lead somewhere, files that are named exist, drawn phases are the engine's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from coordinator.phases import TURNS

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "deploy").glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
FOLDERS = "lazaret|security|npr|protos|coordinator|site_agent|scripts|tests|docs|benchmarks|deploy|examples"
FILE = re.compile(rf"`((?:{FOLDERS})/[\w./-]+)`")


def anchors(page: Path) -> set[str]:
    """The names under which a page's headings can be linked to."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    missing = [name for name in FILE.findall(page.read_text(encoding="utf-8")) if not (ROOT / name).exists()]
    assert not missing


def test_the_phases_that_are_drawn_are_those_of_the_engine() -> None:
    text = (ROOT / "docs" / "operators.md").read_text(encoding="utf-8")
    drawn = set(re.findall(r"^    (\w+) --> (\w+):", text, re.MULTILINE))
    assert drawn == {(str(phase), str(target)) for phase, turns in TURNS.items() for target in turns.values()}
