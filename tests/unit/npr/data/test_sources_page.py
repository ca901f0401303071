"""docs/data.md against the code: every source, column and variable is on the page, and its Python runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from npr.data import manifest, npz, sources, store

PAGE = (Path(__file__).parents[4] / "docs" / "data.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", [*sources._BY_PATH, "ham10000", "generated"])
def test_every_source_is_documented(kind):
    assert f"`{kind}:PATH" in PAGE or f"`{kind}`" in PAGE


@pytest.mark.parametrize(
    "name",
    [
        *manifest.COLUMNS,
        *npz.REQUIRED,
        *(column for column, _ in npz.UNIT_COLUMNS),
        *npz.SPLIT_COLUMNS,
        sources.DATA_VARIABLE,
        store.CACHE_VARIABLE,
    ],
)
def test_every_column_and_variable_is_documented(name):
    assert f"`{name}`" in PAGE or f"`{name}[" in PAGE or f"`{name}:" in PAGE


def test_the_python_on_the_page_runs(capsys):
    for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        exec(compile(block, "docs/data.md", "exec"), {})
    assert "bcn" in capsys.readouterr().out


def test_the_table_on_the_page_is_read_as_it_says(tmp_path, paint):
    text = re.search(r"```\n(image,label,patient,split\n.*?)```", PAGE, flags=re.DOTALL)
    assert text is not None
    path = tmp_path / "manifest.csv"
    path.write_text(text.group(1))
    for line in text.group(1).splitlines()[1:]:
        paint(tmp_path / line.split(",")[0])
    dataset = sources.open_dataset(f"csv:{path}", fold="split", image_size=16)
    assert dataset.class_names == ("melanoma", "nevus") and dataset.counts().tolist() == [[1, 1]]


def test_the_error_on_the_page_is_the_one_that_is_raised(write_manifest):
    from lazaret.errors import DataError

    rows = [["a.png", "x", "p1", "train"], ["b.png", "x", "p2", "train"], ["c.png", "x", "p3", "test"]]
    with pytest.raises(DataError) as caught:
        sources.open_catalogue(f"csv:{write_manifest([*rows, ['d.png', 'x', 'p3', 'train']])}", image_size=16)
    assert str(caught.value) in PAGE and caught.value.hint is not None and caught.value.hint in PAGE


@pytest.mark.parametrize("option", ["partition", *(name for options in sources._OPTIONS.values() for name in options)])
def test_every_option_is_documented(option):
    assert f"?{option}=" in PAGE
