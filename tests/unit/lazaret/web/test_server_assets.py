"""What the pages are made of: shipped with the package, nothing inline, nothing from elsewhere, text only as text."""

from __future__ import annotations

import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lazaret.web.server import assets

ROOT = Path(__file__).parents[4]
TOP = ("coordinator", "lazaret", "security", "site_agent")
FOLDERS = [path for top in TOP for path in (ROOT / top).rglob("assets")]
FILES = sorted(path for folder in FOLDERS for path in folder.iterdir())


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


class Seen(HTMLParser):
    """Elements and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text_of: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style"):
            self.text_of[self.tags[-1][0]] = self.text_of.get(self.tags[-1][0], "") + data.strip()


def test_there_are_two_pages_and_what_they_share() -> None:
    names = {"coordinator/dashboard", "lazaret/web", "site_agent/page"}
    assert {str(folder.parent.relative_to(ROOT)) for folder in FOLDERS} == names
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["setuptools"]["package-data"]["*"] == ["assets/*", "templates/*"]
    packages = project["tool"]["setuptools"]["packages"]
    assert {name.replace("/", ".") for name in names} <= set(packages)
    assert set(assets("site_agent.page", "index.html", "app.js")) == {"/", "/app.js"}


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".html"], ids=named)
def test_markup_has_nothing_inline_and_names_only_its_neighbours(path: Path) -> None:
    page = Seen(path.read_text(encoding="utf-8"))
    assert not any(page.text_of.values()), "script or style in the page itself"
    here = {file.name for file in FILES if file.parent in (path.parent, ROOT / "lazaret" / "web" / "assets")}
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag
        for name in ("src", "href"):
            target = attributes.get(name)
            assert target is None or target in here or target == "data:,", target
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    labelled = {attributes["aria-labelledby"] for _, attributes in page.tags if "aria-labelledby" in attributes}
    assert labelled <= set(ids)
    assert dict(page.tags)["html"]["lang"] == "en"


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".js"], ids=named)
def test_scripts_make_no_markup_of_text(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)
    assert not re.search(r"setAttribute\(\"(on|style)", text)
    imports = re.findall(r"from \"([^\"]+)\"", text)
    assert all(name == "./kit.js" for name in imports)


@pytest.mark.parametrize("path", FILES, ids=named)
def test_nothing_is_asked_for_elsewhere(path: Path) -> None:
    addresses = set(re.findall(r"https?://[^\s\"')]+", path.read_text(encoding="utf-8")))
    assert addresses <= {"http://www.w3.org/2000/svg"}, "that one is a name, not an address"
    assert path.stat().st_size < 40_000
