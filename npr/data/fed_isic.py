"""Fed-ISIC2019 as FLamby lays it out: a folder of ISIC images, the benchmark's split file, ISIC's own metadata.

The preprocessing of the benchmark is here too: colour constancy and brightness.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lazaret.errors import DataError
from npr.data.catalogue import Catalogue
from npr.data.columns import ColumnEntry, read_table
from npr.data.generated import ISIC_CLASSES, ISIC_SITES
from npr.data.manifest import Decoding, Row, catalogue_of
from npr.data.store import Fault, FaultKind, ImageStorage, open_image, squash

# Colour constancy and brightness of dermoscopy images, before they are resized to a square.


def shorter_side(image: Image.Image, size: int) -> Image.Image:
    """Bilinear, aspect kept, so that the shorter side is `size`."""
    factor = size / min(image.size)
    width, height = (max(size, round(side * factor)) for side in image.size)
    return image.resize((width, height), Image.Resampling.BILINEAR)


def shades_of_gray(pixels: NDArray[np.uint8], power: int = 6) -> NDArray[np.uint8]:
    """Divide out the colour of the light, estimated by a Minkowski mean per channel (Finlayson and Trezzi, 2004).

    A gain can lift a value above 255: it is clipped, where a plain cast to bytes would wrap a highlight to black.
    """
    values = pixels.astype(np.float64)
    light = np.mean(values**power, axis=(0, 1)) ** (1.0 / power)
    norm = float(np.linalg.norm(light))
    if norm == 0.0:
        return pixels
    gain = norm / (np.sqrt(len(light)) * np.maximum(light, norm * 1e-6))
    return np.asarray(np.clip(np.rint(values * gain), 0, 255), dtype=np.uint8)


def normal_brightness(pixels: NDArray[np.uint8], target: float = 140.0) -> NDArray[np.uint8]:
    """One gain for all channels that brings the mean to `target`, at most a factor of two either way."""
    mean = float(pixels.mean())
    gain = float(np.clip(target / max(mean, 1e-6), 0.5, 2.0))
    return np.asarray(np.clip(np.rint(pixels * gain), 0, 255), dtype=np.uint8)


SPLITS = ("train_test_split", "train_test_split.csv", "train_test_split.csv.gz")
INPUTS = ("ISIC_2019_Training_Input", "ISIC_2019_Training_Input_preprocessed")
METADATA = "ISIC_2019_Training_Metadata.csv"


def load_fed_isic(
    path: Path,
    *,
    image_size: int,
    storage: ImageStorage,
    colour_constancy: bool = True,
    brightness: bool = False,
) -> Catalogue:
    """The six hospitals, with the benchmark's split under the name `fold`.

    That split is by image. Where ISIC's metadata file lies beside the images, lesions are known and numbered folds
    keep them together.
    """
    images = next((path / name for name in INPUTS if os.path.isdir(path / name)), path)
    split = next((path / name for name in SPLITS if os.path.isfile(path / name)), None)
    if split is None:
        raise DataError(f"split file {SPLITS[0]} is missing", where=str(path), hint="copy FLamby's file there")
    lesions = _lesions(path / METADATA, storage)
    # What FLamby has preprocessed already went through colour constancy once.
    fresh = images.name != INPUTS[1]
    return catalogue_of(
        read_split(split, images, lesions, storage),
        ISIC_CLASSES,
        name="fed-isic2019",
        where=split.name,
        unit_kind="image" if lesions is None else "lesion",
        decoding=decoding(image_size, colour_constancy and fresh, brightness),
        storage=storage,
        split_name="fold",
        split_grouped=False,
    )


def read_split(
    split: Path, images: Path, lesions: dict[str, str] | None = None, storage: ImageStorage | None = None
) -> list[Row]:
    """The rows of the split file; nothing is said yet about whether the images are there."""
    kept, rows = storage or ImageStorage(), list[Row]()

    def refuse(error: DataError) -> None:
        kept.report(Fault(kind=FaultKind.EMPTY, error=error))

    for entry in read_table(split, ("image", "target", "center", "fold"), refuse=refuse, each=kept.per_unit).entries:
        try:
            rows.append(_row(entry, images, lesions or {}))
        except DataError as error:
            refuse(error)
    return rows


def _row(entry: ColumnEntry, images: Path, lesions: dict[str, str]) -> Row:
    name, where = entry.fields["image"], entry.where
    if not name:
        raise DataError("image is empty", where=where)
    try:
        target, centre = int(entry.fields["target"]), int(entry.fields["center"])
    except ValueError:
        raise DataError("target and center must be whole numbers", where=where) from None
    if not 0 <= target < len(ISIC_CLASSES):
        raise DataError(f"target {target} is not one of {len(ISIC_CLASSES)} classes", where=where)
    if not 0 <= centre < len(ISIC_SITES):
        raise DataError(f"center {centre} is not one of {len(ISIC_SITES)} hospitals", where=where)
    return Row(
        id=name,
        path=images / f"{name}.jpg",
        label=ISIC_CLASSES[target],
        where=where,
        unit=lesions.get(name) or name,
        site=ISIC_SITES[centre],
        side=entry.fields["fold"],
    )


def _lesions(metadata: Path, storage: ImageStorage) -> dict[str, str] | None:
    """The lesion of each image. A file without that column is refused: units would be images and be called lesions."""
    if not os.path.lexists(metadata):
        return None
    table = read_table(
        metadata,
        ("image", "lesion_id"),
        refuse=lambda error: storage.report(Fault(kind=FaultKind.EMPTY, error=error)),
        each=storage.per_unit,
    )
    return {entry.fields["image"]: entry.fields["lesion_id"] for entry in table.entries}


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
