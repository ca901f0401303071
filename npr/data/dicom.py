"""CT slices from DICOM: Hounsfield units, a window, one channel of bytes; and the layout of RSNA-ICH."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from numpy.typing import NDArray
from PIL import Image
from pydicom.pixels import apply_rescale

from lazaret.errors import ConfigError, DataError
from npr.data.catalogue import Catalogue
from npr.data.columns import Arrays
from npr.data.generated import ICH_CLASSES
from npr.data.manifest import Decoding, Row, catalogue_of, load_csv, load_folders
from npr.data.store import ImageStorage, squash


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The Hounsfield units that are spread over black to white. The default is the usual brain window."""

    level: float = 40.0
    width: float = 80.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.level) and 0.0 < self.width < math.inf):
            raise ConfigError(f"window {self.level}/{self.width} shows nothing", hint="a width above 0, e.g. 40/80")

    def apply(self, hounsfield: NDArray[np.floating[Any]]) -> NDArray[np.uint8]:
        low = self.level - self.width / 2
        return np.asarray(np.rint(np.clip((hounsfield - low) / self.width, 0, 1) * 255), dtype=np.uint8)


def hounsfield(path: Path, where: str) -> NDArray[np.float64]:
    """The slice in Hounsfield units; padding outside the scanned circle becomes air."""
    header = _read(path, where)
    with _as_data_error("header cannot be read", where, "export the slice again"):
        if header.get("Modality") != "CT" or "RescaleSlope" not in header or "RescaleIntercept" not in header:
            raise DataError(
                "not a CT slice with rescale slope and intercept", where=where, hint="export original CT slices"
            )
        if header.get("SamplesPerPixel", 1) != 1 or int(header.get("NumberOfFrames", 1) or 1) != 1:
            raise DataError("not a single grey slice", where=where, hint="export one file per slice")
    with _as_data_error("pixels cannot be read", where, "export uncompressed, e.g. gdcmconv --raw"):
        stored = header.pixel_array
        values = np.asarray(apply_rescale(stored, header), dtype=np.float64)
        if "PixelPaddingValue" in header:
            values[stored == header.PixelPaddingValue] = -1000.0
    return values


@contextmanager
def _as_data_error(what: str, where: str, hint: str) -> Iterator[None]:
    """pydicom and its decoders raise many types for damaged files, some only when a value is looked at."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError("image file is missing", where=where) from None
    except Exception as error:
        raise DataError(f"{what} ({type(error).__name__})", where=where, hint=hint) from None


def _read(path: Path, where: str, *, pixels: bool = True) -> pydicom.Dataset:
    with _as_data_error("not a DICOM file", where, "export the slice again"):
        return pydicom.dcmread(path, stop_before_pixels=not pixels)


def ct_decoding(image_size: int, window: Window | None = None) -> Decoding:
    """Window first, then resize: bone beside the brain is clipped before it can bleed into it."""
    chosen = window or Window()
    return Decoding(
        read=lambda path, where: squash(Image.fromarray(chosen.apply(hounsfield(path, where))), image_size),
        channels=1,
        image_size=image_size,
        settings=f"ct window {chosen.level} {chosen.width} squash",
    )


def load_dicom(
    path: Path,
    *,
    image_size: int,
    storage: ImageStorage,
    class_names: Sequence[str] | None = None,
    window: Window | None = None,
) -> Catalogue:
    """CT slices listed by a CSV manifest, sorted into folders per class, or in the layout of RSNA-ICH."""
    decoding = ct_decoding(image_size, window)
    if path.is_dir() and any(path.glob("*.npz")):
        if class_names is not None and tuple(class_names) != ICH_CLASSES:
            raise ConfigError(
                "the classes of RSNA-ICH are fixed: the split file has only their numbers",
                where=str(path),
                hint=f"leave the class list out, or give {', '.join(ICH_CLASSES)}",
            )
        return load_rsna(path, image_size=image_size, storage=storage, window=window)
    load = load_folders if path.is_dir() else load_csv
    catalogue = load(path, image_size=image_size, storage=storage, class_names=class_names, decoding=decoding)
    if catalogue.unit_kind != "image":
        return catalogue
    root = path if path.is_dir() else path.parent
    units, kind = header_units([root / name for name in catalogue.ids], catalogue.row_names)
    return replace(catalogue, units=units, unit_kind=kind) if kind != "image" else catalogue


def header_units(paths: Sequence[Path], names: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """The patient of every slice by its header, else its study, else the slice itself: the first that all have."""
    found = [_units(path, where) for path, where in zip(paths, names, strict=True)]
    for number, kind in enumerate(("patient", "study")):
        values = tuple(units[number] for units in found)
        if all(values):
            return values, kind
    return tuple(path.name for path in paths), "image"


def _units(path: Path, where: str) -> tuple[str, str]:
    """Patient and study of one slice, empty where the header does not tell."""
    header = _read(path, where, pixels=False)
    with _as_data_error("header cannot be read", where, "export the slice again"):
        return str(header.get("PatientID") or ""), str(header.get("StudyInstanceUID") or "")


def load_rsna(path: Path, *, image_size: int, storage: ImageStorage, window: Window | None = None) -> Catalogue:
    """`ID_*.dcm` files beside (or in a folder beside) one npz of ids, labels, clients and folds.

    The published split is by slice, so one patient's slices are on both sides and at several sites.
    """
    splits = sorted(path.glob("*.npz"))
    if len(splits) != 1:
        raise DataError(f"folder holds {len(splits)} split files, not one", where=str(path))
    images = next((path / name for name in ("stage_2_train", "images") if os.path.isdir(path / name)), path)
    catalogue = catalogue_of(
        read_rsna_split(splits[0], images),
        ICH_CLASSES,
        name="rsna-ich",
        where=splits[0].name,
        unit_kind="image",
        decoding=ct_decoding(image_size, window),
        storage=storage,
        split_name="fold",
        split_grouped=False,
    )
    units, kind = header_units([images / f"{name}.dcm" for name in catalogue.ids], catalogue.row_names)
    return replace(catalogue, units=units, unit_kind=kind)


def read_rsna_split(split: Path, images: Path) -> list[Row]:
    """Rows of the split file: arrays image_id, label, client and fold of equal length, no pickles."""
    arrays = Arrays.read(split, ("image_id", "label", "client", "fold"))
    labels = arrays.numbers("label").tolist()
    ids, folds = arrays.words("image_id", len(labels)), arrays.words("fold", len(labels))
    clients = arrays.numbers("client", len(labels)).tolist()
    rows = []
    for number, (image, label, client, fold) in enumerate(zip(ids, labels, clients, folds, strict=True)):
        where = f"{split.name} row {number}"
        if not 0 <= label < len(ICH_CLASSES):
            raise DataError(f"label {label} is not one of {len(ICH_CLASSES)} classes", where=where)
        rows.append(
            Row(
                id=image,
                path=images / f"{image}.dcm",
                label=ICH_CLASSES[label],
                where=where,
                site=f"client_{client:02d}",
                side=fold,
            )
        )
    return rows
