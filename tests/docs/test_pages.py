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
BARE_FILE = re.compile(r"`([a-z0-9_]+\.py)`")
NAMES = {path.name for folder in FOLDERS.split("|") for path in (ROOT / folder).rglob("*.py")}


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
    text = page.read_text(encoding="utf-8")
    missing = [name for name in FILE.findall(text) if not (ROOT / name).exists()]
    missing += [name for name in BARE_FILE.findall(text) if name not in NAMES]
    assert not missing


def test_each_name_in_the_map_is_in_a_file_of_its_row() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("## Where to change what")[1]
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| you want")]
    assert len(rows) > 20
    for row in rows:
        spans = re.findall(r"`([^`]+)`", row)
        files = [ROOT / span for span in spans if (ROOT / span).is_file()]
        held = "".join(path.read_text(encoding="utf-8") for path in files)
        names = [word for span in spans if "/" not in span for word in re.findall(r"\w+", span)]
        assert files, row
        assert [name for name in names if not re.search(rf"\b{name}\b", held)] == [], row


def test_the_phases_that_are_drawn_are_those_of_the_engine() -> None:
    text = (ROOT / "docs" / "operators.md").read_text(encoding="utf-8")
    drawn = set(re.findall(r"^    (\w+) --> (\w+):", text, re.MULTILINE))
    assert drawn == {(str(phase), str(target)) for phase, turns in TURNS.items() for target in turns.values()}
