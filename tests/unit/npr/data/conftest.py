"""Small data sets on disk, as a hospital would bring them."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def paint():
    """Write one small image of one colour; returns its path."""

    def write(path: Path, colour=(200, 120, 90), size=(24, 18)) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, colour).save(path)
        return path

    return write


@pytest.fixture
def write_manifest(tmp_path, paint):
    """Write a manifest and the images it names (unless told not to); returns its path."""

    def write(rows, columns=("image", "label", "patient", "split"), images=True) -> Path:
        path = tmp_path / "manifest.csv"
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(rows)
        if images:
            for number, row in enumerate(rows):
                paint(tmp_path / row[0], colour=(10 * number % 256, 100, 50))
        return path

    return write


@pytest.fixture
def make_samples():
    from npr.data.dataset import Samples

    def make(rows=10, size=8, channels=3, classes=3, seed=0, per_unit=1) -> Samples:
        rng = np.random.default_rng(seed)
        return Samples(
            images=rng.integers(0, 256, (rows, size, size, channels), dtype=np.uint8),
            labels=rng.integers(0, classes, rows),
            ids=tuple(f"i{row}" for row in range(rows)),
            units=tuple(f"u{row // per_unit}" for row in range(rows)),
            unit_kind="patient",
            num_classes=classes,
        )

    return make
