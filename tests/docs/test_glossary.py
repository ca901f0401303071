"""docs/glossary.md defines each term once, in order, with a link; the pages for readers lead to it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
ROWS = re.findall(
    r"^\| (?!term \||---)([^|]+) \| ([^|]+) \| ([^|]+) \|$", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE
)
# The glossary itself, and the overview that people read before it.
WITHOUT = {"glossary.md"}
PAGES = [ROOT / "README.md", *(page for page in (ROOT / "docs").rglob("*.md") if page.name not in WITHOUT)]


def test_terms_are_in_order_and_each_is_defined_once() -> None:
    terms = [re.sub(r" \(.*\)", "", term).casefold() for term, _, _ in ROWS]
    assert len(terms) > 40
    assert terms == sorted(set(terms))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_term_has_a_meaning_and_a_link(row: tuple[str, str, str]) -> None:
    _, meaning, link = row
    assert meaning.strip() and re.search(r"\]\([^)]+\.md", link)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_link_the_glossary(page: Path) -> None:
    assert "glossary.md)" in page.read_text(encoding="utf-8")
