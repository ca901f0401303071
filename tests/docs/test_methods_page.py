"""Every method, key and option is on the page that explains them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from npr.config import TrainConfig
from npr.methods import registry

PAGE = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
WORDS = set(re.findall(r"`([^`\n]+)`", PAGE))


@pytest.mark.parametrize("name", registry.names())
def test_method_and_its_options_are_explained(name: str) -> None:
    assert name in WORDS
    entry = registry.get(name)
    (row,) = re.findall(rf"^\| `{re.escape(name)}` \| (.*)$", PAGE, re.MULTILINE) or [""]
    if row and not entry.npr:
        shared = entry.method.shared
        assert ("all four" in row) == ({"extractor", "norm", "statistics", "head"} <= shared and name != "fedper")
    assert set(entry.method.Options.model_fields) <= WORDS


@pytest.mark.parametrize("key", TrainConfig.model_fields)
def test_key_is_explained(key: str) -> None:
    assert key in WORDS
