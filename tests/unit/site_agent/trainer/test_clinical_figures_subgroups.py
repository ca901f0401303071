"""Subgroups from a hospital's own table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lazaret.errors import ConfigError, DataError
from npr.data.dataset import Samples
from site_agent.config import CoordinatorTable, DataTable, EvaluationTable, SiteConfig, SiteTable
from site_agent.trainer.clinical_figures import MOST_GROUPS, band_names, subgroups_of

TABLE = """image,label,patient,sex,age,scanner
a/1.png,x,ann,f,39.9,alpha
./b.png,x,bob,m,40,alpha
c.dcm,y,cid,m,60,
d.png,y,dan,,unknown,beta
"""


def samples(ids: tuple[str, ...] = ("a/1.png", "b.png", "c.dcm#1", "c.dcm#2", "d.png")) -> Samples:
    units = tuple({"a": "ann", "b": "bob", "c": "cid", "d": "dan"}[name[0]] for name in ids)
    return Samples(
        images=np.zeros((len(ids), 2, 2, 1), dtype=np.uint8),
        labels=np.zeros(len(ids), dtype=np.int64),
        ids=ids,
        units=units,
        unit_kind="patient",
        num_classes=2,
    )


def config(folder: Path, text: str = TABLE, *, source: str | None = None, **wanted: object) -> SiteConfig:
    (folder / "list.csv").write_text(text)
    return SiteConfig(
        site=SiteTable(initial_model="m"),
        coordinator=CoordinatorTable(address="hub.example:7443"),
        data=DataTable(source=source or f"csv:{folder / 'list.csv'}"),
        evaluation=EvaluationTable(**wanted),  # type: ignore[arg-type]
        path=folder / "site.toml",
    )


def told(groups: object) -> dict[str, list[int]]:
    return {f"{one.column} {one.name}": np.flatnonzero(one.rows).tolist() for one in groups}  # type: ignore[attr-defined]


def test_values_bands_and_what_is_missing(tmp_path: Path) -> None:
    """A bound belongs to the band above it; a frame has its file's row; what is no number is not recorded."""
    settings = config(tmp_path, subgroups=("sex", "age", "scanner"), bands={"age": (40, 60)})
    assert told(subgroups_of(settings, samples())) == {
        "sex f": [0],
        "sex m": [1, 2, 3],
        "sex not recorded": [4],
        "age below 40": [0],
        "age 40 to below 60": [1],
        "age 60 and above": [2, 3],
        "age not recorded": [4],
        "scanner alpha": [0, 1],
        "scanner beta": [4],
        "scanner not recorded": [2, 3],
    }
    assert subgroups_of(config(tmp_path), samples()) == []
    assert band_names((18.5,)) == ["below 18.5", "18.5 and above"]


def test_a_table_of_its_own_by_patient(tmp_path: Path) -> None:
    (tmp_path / "people.csv").write_text("patient,sex\nann,f\nbob,m\nbob,m\ncid,m\ncid,f\n")
    settings = config(tmp_path, source="generated", subgroups=("sex",), table="people.csv")
    found = told(subgroups_of(settings, samples()))
    assert found == {"sex f": [0], "sex m": [1], "sex not recorded": [2, 3, 4]}, "cid is both, dan is not listed"


def test_an_image_that_two_patients_have_is_each_ones_own(tmp_path: Path) -> None:
    text = "image,label,patient,sex\na/1.png,x,ann,f\na/1.png,x,bob,m\n"
    settings = config(tmp_path, text, subgroups=("sex",))
    assert told(subgroups_of(settings, samples(("a/1.png",)))) == {"sex f": [0]}


@pytest.mark.parametrize("column", ["patient", "image", "label", "StudyInstanceUID"])
def test_columns_that_name_somebody_make_no_groups(tmp_path: Path, column: str) -> None:
    with pytest.raises(ConfigError, match="makes no subgroups"):
        subgroups_of(config(tmp_path, subgroups=(column,)), samples())


def test_too_many_values_are_no_groups_and_are_not_repeated(tmp_path: Path) -> None:
    rows = [f"{number}.png,x,p{number},name-{number}" for number in range(MOST_GROUPS + 1)]
    text = "image,label,patient,insurance\n" + "\n".join(rows) + "\n"
    many = Samples(
        images=np.zeros((len(rows), 2, 2, 1), dtype=np.uint8),
        labels=np.zeros(len(rows), dtype=np.int64),
        ids=tuple(f"{number}.png" for number in range(len(rows))),
        units=tuple(f"p{number}" for number in range(len(rows))),
        unit_kind="patient",
        num_classes=2,
    )
    with pytest.raises(ConfigError, match="21 different values") as refused:
        subgroups_of(config(tmp_path, text, subgroups=("insurance",)), many)
    assert "name-" not in str(refused.value)


def test_what_the_table_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="column 'weight' is missing"):
        subgroups_of(config(tmp_path, subgroups=("weight",)), samples())
    with pytest.raises(ConfigError, match="in no table"):
        subgroups_of(config(tmp_path, source="generated", subgroups=("sex",)), samples())
    with pytest.raises(ConfigError, match="which is no subgroup"):
        subgroups_of(config(tmp_path, bands={"age": (40,)}), samples())
    with pytest.raises(DataError, match="'image' or 'patient' is missing"):
        subgroups_of(config(tmp_path, "sex\nf\n", subgroups=("sex",)), samples())
