"""The first screen of the README: one sentence, one refusal, three commands that are there, and a picture."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_opens_with_a_sentence_a_refusal_and_three_commands() -> None:
    title, sentence, refusal, block, *_ = TEXT.split("\n\n")
    assert title == "# Lazaret"
    assert sentence.count(".") == 1 and refusal.startswith("It will not ")
    commands = re.findall(r"^\$ (\S+)", block, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        if command.startswith(".venv/bin/"):
            assert shutil.which(command.removeprefix(".venv/bin/"), path=str(Path(sys.executable).parent)), command
        else:
            assert os.access(ROOT / command, os.X_OK), command


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
