"""`dicomweb:`, taken apart; what is wrong with it is said without repeating it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lazaret.errors import ConfigError
from npr.data.sources import SourceName
from site_agent.archive.source import ArchiveSource, absolute
from site_agent.config import SiteConfig

URL = "https://pacs.example/dicom-web"
SITE = '[site]\ninitial_model = "m"\n[coordinator]\naddress = "hub:1"\n'


def test_a_table_becomes_a_local_source(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(
        f'{SITE}[data]\nsource = "dicomweb:{URL}/?labels=labels.csv&window=40/80&modality=CT, MR"\n'
    )
    config = SiteConfig.read(tmp_path / "site.toml")
    assert config.data.source == f"dicom:{tmp_path}/labels.csv?files={tmp_path}/archive&window=40/80"
    assert SourceName.parse(config.data.source).options["files"] == tmp_path / "archive"
    assert config.fetched is not None
    assert (config.fetched.url, config.fetched.modalities) == (URL, ("CT", "MR"))
    assert URL not in config.model_dump_json()


def test_new_cases_are_chosen_by_a_search(tmp_path: Path) -> None:
    found = ArchiveSource.parse(f"dicomweb:{URL}?StudyDate=20261118&ModalitiesInStudy=CT", tmp_path)
    assert found.filters == {"StudyDate": "20261118", "ModalitiesInStudy": "CT"}
    with pytest.raises(ConfigError, match="labels= is missing"):
        found.local_source(tmp_path)


def test_init_takes_a_path_from_here(tmp_path: Path) -> None:
    found = absolute(f"dicomweb:{URL}?labels=t.csv&window=1/2", tmp_path)
    assert found == f"dicomweb:{URL}?labels={tmp_path}/t.csv&window=1/2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dicomweb:https://me:s3cret@pacs.example/x?labels=t.csv", "holds a login"),
        ("dicomweb:http://pacs.example/s3cret?labels=t.csv", "is not https"),
        ("dicomweb:ftp://pacs.example/s3cret?labels=t.csv", "is not https"),
        ("dicomweb:https://pacs.example:s3cret/x?labels=t.csv", "cannot be read"),
        ("dicomweb:https:///s3cret?labels=t.csv", "cannot be read"),
        (f"dicomweb:{URL}?labels=t.csv&token=s3cret", "unknown, repeated or empty"),
        (f"dicomweb:{URL}?labels=t.csv&labels=s3cret.csv", "unknown, repeated or empty"),
        (f"dicomweb:{URL}?labels=t.csv&AccessionNumber=s3cret", "says which studies are taken"),
        ("dicom:s3cret", "this is no archive"),
    ],
)
def test_mistakes_are_named_and_not_repeated(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ArchiveSource.parse(text, tmp_path)
    assert "s3cret" not in f"{caught.value} {caught.value.hint}"


def test_this_machine_needs_no_tls(tmp_path: Path) -> None:
    assert ArchiveSource.parse("dicomweb:http://127.0.0.1:8042/dicom-web?labels=t", tmp_path).url.startswith("http:")


def test_elsewhere_an_archive_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="archive-fetch"):
        SourceName.parse(f"dicomweb:{URL}?labels=t.csv")
