"""The commands before they connect: what they refuse, and where they may write."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from lazaret.errors import ConfigError
from site_agent.cli import cli

SITE = '[site]\ninitial_model = "m"\n[coordinator]\naddress = "hub:1"\n[data]\nsource = "{source}"\n'
ARCHIVE = "dicomweb:http://127.0.0.1:9/dicom-web"


def run(folder: Path, *words: str, source: str = "generated", more: str = "") -> None:
    (folder / "site.toml").write_text(SITE.format(source=source) + more)
    found = CliRunner().invoke(cli, [words[0], "--config", str(folder / "site.toml"), *words[1:]])
    if found.exception:
        raise found.exception


@pytest.mark.parametrize(
    ("words", "source", "message"),
    [
        (("archive-fetch",), "generated", "no archive is named"),
        (("archive-fetch", f"{ARCHIVE}?StudyDate=20261118"), "generated", "not the training data"),
        (("archive-fetch", ARCHIVE, "--into", "new"), "generated", "the whole archive"),
        (("archive-send", "reports"), "generated", "no archive is named"),
        (("archive-send", "reports", "--to", "http://pacs.example"), "generated", "not https"),
        (("archive-send", "reports", "--to", ARCHIVE), "generated", "no reports here"),
        (("archive-erase",), "generated", "no such folder"),
    ],
)
def test_refusals(words: tuple[str, ...], source: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, *words, source=source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["site.toml"]


@pytest.mark.parametrize("place", ["identity", "identity/keys", "state", "state/archive", ".", "..", "ledger/x"])
def test_the_folder_lies_apart_from_what_belongs_to_the_federation(place: str, tmp_path: Path) -> None:
    """Otherwise the process with a network could write there."""
    site = tmp_path / "site"
    site.mkdir()
    with pytest.raises(ConfigError, match="belongs to the federation"):
        run(site, "archive-fetch", source=f"{ARCHIVE}?labels=t.csv", more=f'[archive]\ncache = "{place}"\n')
    assert sorted(path.name for path in site.iterdir()) == ["site.toml"]


def test_a_foreign_folder_is_not_erased(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    (mine / "1.2").mkdir()
    (mine / "1.2" / "1.3.dcm").write_text("from somewhere else")
    with pytest.raises(ConfigError, match="were not fetched"):
        run(tmp_path, "archive-erase", "--folder", str(mine))
    assert (mine / "1.2" / "1.3.dcm").exists()
