"""Fed-ISIC2019 as FLamby lays it out: a folder of ISIC images, the benchmark's split file, ISIC's own metadata."""

from __future__ import annotations

import csv
import gzip
import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from npr.data.catalogue import Catalogue
from npr.data.colour import normal_brightness, shades_of_gray, shorter_side
from npr.data.counts import ISIC_CLASSES, ISIC_SITES
from npr.data.decode import open_image, squash
from npr.data.rows import Decoding, Row, catalogue_of
from npr.data.store import Storage
from security.errors import DataError

SPLITS = ("train_test_split", "train_test_split.csv", "train_test_split.csv.gz")
INPUTS = ("ISIC_2019_Training_Input", "ISIC_2019_Training_Input_preprocessed")
METADATA = "ISIC_2019_Training_Metadata.csv"


def load_fed_isic(
    path: Path,
    *,
    image_size: int,
    storage: Storage,
    colour_constancy: bool = True,
    brightness: bool = False,
) -> Catalogue:
    """The six hospitals, with the benchmark's split under the name `fold`.

    That split is by image. Where ISIC's metadata file lies beside the images, lesions are known and numbered folds
    keep them together.
    """
    images = next((path / name for name in INPUTS if (path / name).is_dir()), path)
    split = next((path / name for name in SPLITS if (path / name).is_file()), None)
    if split is None:
        raise DataError(f"split file {SPLITS[0]} is missing", where=str(path), hint="copy FLamby's file there")
    lesions = _lesions(path / METADATA)
    # What FLamby has preprocessed already went through colour constancy once.
    fresh = images.name != INPUTS[1]
    return catalogue_of(
        read_split(split, images, lesions),
        ISIC_CLASSES,
        name="fed-isic2019",
        where=split.name,
        unit_kind="lesion" if lesions else "image",
        decoding=decoding(image_size, colour_constancy and fresh, brightness),
        storage=storage,
        split_name="fold",
        split_grouped=False,
    )


def read_split(split: Path, images: Path, lesions: dict[str, str] | None = None) -> list[Row]:
    """The rows of the split file; nothing is said yet about whether the images are there."""
    data = split.read_bytes()
    text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
    reader = csv.DictReader(io.StringIO(text))
    missing = {"image", "target", "center", "fold"} - set(reader.fieldnames or ())
    if missing:
        raise DataError(f"column {min(missing)!r} is missing", where=f"{split.name} row 1")
    return [_row(entry, f"{split.name} row {reader.line_num}", images, lesions or {}) for entry in reader]


def _row(entry: dict[str, str], where: str, images: Path, lesions: dict[str, str]) -> Row:
    try:
        target, centre = int(entry["target"]), int(entry["center"])
    except (TypeError, ValueError):
        raise DataError("target and center must be whole numbers", where=where) from None
    if not 0 <= target < len(ISIC_CLASSES):
        raise DataError(f"target {target} is not one of {len(ISIC_CLASSES)} classes", where=where)
    if not 0 <= centre < len(ISIC_SITES):
        raise DataError(f"center {centre} is not one of {len(ISIC_SITES)} hospitals", where=where)
    name = entry["image"]
    return Row(
        id=name,
        path=images / f"{name}.jpg",
        label=ISIC_CLASSES[target],
        where=where,
        unit=lesions.get(name) or name,
        site=ISIC_SITES[centre],
        side=entry["fold"],
    )


def _lesions(metadata: Path) -> dict[str, str] | None:
    if not metadata.is_file():
        return None
    with metadata.open(newline="", encoding="utf-8-sig") as file:
        return {row["image"]: row.get("lesion_id") or "" for row in csv.DictReader(file)}


def decoding(image_size: int, colour_constancy: bool, brightness: bool) -> Decoding:
    """An original image: shorter side to size, colours balanced, then squashed."""

    def read(path: Path, where: str) -> NDArray[np.uint8]:
        image = shorter_side(open_image(path, channels=3, where=where), image_size)
        pixels = np.asarray(image, dtype=np.uint8)
        if colour_constancy:
            pixels = shades_of_gray(pixels)
        if brightness:
            pixels = normal_brightness(pixels)
        return squash(Image.fromarray(pixels), image_size)

    settings = f"shorter side, shades of gray {colour_constancy}, brightness {brightness}, squash"
    return Decoding(read=read, channels=3, image_size=image_size, settings=settings)
