"""The digest of the learning code covers every file that decides what a round computes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from lazaret.errors import LocalProtocolError
from npr import recipe

NPR = Path(recipe.__file__).parent
# What a training step imports and yet does not decide its numbers: reading data, judging, comparing, running.
NOT_COVERED = {
    "bootstrap.py",
    "clinical.py",
    "data/catalogue.py",
    "data/columns.py",
    "data/dataset.py",
    "data/dicom.py",
    "data/dicom_decoding.py",
    "data/dicom_pixels.py",
    "data/fed_isic.py",
    "data/generated.py",
    "data/manifest.py",
    "data/npz.py",
    "data/sides.py",
    "data/sources.py",
    "data/store.py",
    "deployed.py",
    "dp/audit.py",
    "dp/federation.py",
    "federation.py",
    "metrics.py",
    "tracking.py",
}


def test_every_name_stands_for_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe.code_digest()
    monkeypatch.setattr(recipe, "_CODE", (*recipe._CODE, "dp/gone.py"))
    with pytest.raises(LocalProtocolError, match=r"dp/gone\.py"):
        recipe.code_digest()


def test_a_file_is_covered_or_listed_as_not() -> None:
    """A file that is new or renamed has to be decided on."""
    covered = {path for pattern in recipe._CODE for path in NPR.glob(pattern)}
    rest = {path.relative_to(NPR).as_posix() for path in NPR.rglob("*.py") if path not in covered and not _door(path)}
    assert {name for name in rest if not name.startswith("lab/")} == NOT_COVERED


def _door(path: Path) -> bool:
    return all(isinstance(node, ast.Expr) for node in ast.parse(path.read_text(encoding="utf-8")).body)


def test_a_changed_byte_changes_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "npr"
    for path in NPR.rglob("*.py"):
        target = copy / path.relative_to(NPR)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    monkeypatch.setattr(recipe, "__file__", str(copy / "recipe.py"))
    before = recipe.code_digest()
    (copy / "dp" / "releases.py").write_bytes((copy / "dp" / "releases.py").read_bytes() + b"#")
    assert recipe.code_digest() != before
