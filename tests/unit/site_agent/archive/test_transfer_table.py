"""The identifiers of a table: what could mean something else is refused by row, never by value."""

from __future__ import annotations

from pathlib import Path

import pytest

from lazaret.errors import DataError
from site_agent.archive.dicomweb import is_uid
from site_agent.archive.transfer import identifiers_in


def test_the_narrowest_identifier_counts_and_each_value_once(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("AccessionNumber,StudyInstanceUID,label\nA1,1.2.3,a\nA1,1.2.3,a\nA2, 1.2.4 ,b\n")
    assert [(one.key, one.value, one.where) for one in identifiers_in(table)] == [
        ("StudyInstanceUID", "1.2.3", "t.csv row 2"),
        ("StudyInstanceUID", "1.2.4", "t.csv row 4"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("image,label\nMeier.dcm,a\n", "row 1: the table names no studies"),
        ("StudyInstanceUID,label\n1.2,a\n../Meier,a\n", "row 3: StudyInstanceUID is no UID"),
        ("StudyInstanceUID,label\n,a\n", "row 2: StudyInstanceUID is empty"),
        ("AccessionNumber,label\nMeier*,a\n", "row 2: AccessionNumber cannot be searched for"),
        ("AccessionNumber,label\nMeier?,a\n", "row 2: AccessionNumber cannot be searched for"),
        ("AccessionNumber,label\n" + "Meier" * 20 + ",a\n", "row 2: AccessionNumber cannot be searched for"),
    ],
)
def test_a_row_that_is_no_identifier(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        list(identifiers_in(tmp_path / "t.csv"))
    assert "Meier" not in f"{caught.value} {caught.value.hint}"


def test_what_is_no_table(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"StudyInstanceUID\n\xff\n")
    with pytest.raises(DataError, match="not a UTF-8 CSV file"):
        list(identifiers_in(tmp_path / "t.csv"))
    with pytest.raises(DataError, match="no such table"):
        list(identifiers_in(tmp_path / "none.csv"))


@pytest.mark.parametrize("text", ["..", ".", "1", "1.", "1..2", "1/2", "1.2\n", "1.2" * 30, "", None, 7])
def test_what_is_no_uid_is_no_name_of_a_file_either(text: object) -> None:
    assert not is_uid(text)
