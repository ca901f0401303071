"""The start of the README: what it is, what it refuses to send, two commands that exist, and the picture."""

from __future__ import annotations

import os
import re
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_two_commands_come_first_and_can_be_run() -> None:
    title, _what_it_is, refusal, block, picture, *_ = TEXT.split("\n\n")
    assert title == "# Lazaret"
    assert "does not send" in refusal
    commands = re.findall(r"^\$ (\S+)", block, re.MULTILINE)
    assert commands == ["scripts/demo", "scripts/test"]
    for command in commands:
        assert os.access(ROOT / command, os.X_OK), command
    assert picture.startswith("![")


def test_the_picture_is_there_and_has_words_for_who_cannot_see_it() -> None:
    (alternative, path) = re.findall(r"!\[([^\]]+)\]\(([^)]+\.svg)\)", TEXT)[0]
    assert len(alternative) > 40
    root = ElementTree.parse(ROOT / path).getroot()
    names = {child.tag.rpartition("}")[2] for child in root}
    assert {"title", "desc"} <= names
    assert not [element for element in root.iter() if element.tag.endswith("script")]


def test_it_says_what_is_not_protected_and_links_the_whole() -> None:
    part = TEXT.split("## What it does not protect against")[1].split("\n## ")[0]
    assert part.count("\n- ") >= 4 and "docs/threat-model.md" in part
