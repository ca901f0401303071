"""CT slices from DICOM: Hounsfield units, a window, one channel of bytes; and the layout of RSNA-ICH."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from numpy.typing import NDArray
from PIL import Image
from pydicom.errors import InvalidDicomError
from pydicom.pixels import apply_rescale

from npr.data.catalogue import Catalogue
from npr.data.counts import ICH_CLASSES
from npr.data.decode import squash
from npr.data.manifest import load_csv, load_folders
from npr.data.rows import Decoding, Row, catalogue_of
from npr.data.store import Storage
from security.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The Hounsfield units that are spread over black to white. The default is the usual brain window."""

    level: float = 40.0
    width: float = 80.0

    def apply(self, hounsfield: NDArray[np.floating[Any]]) -> NDArray[np.uint8]:
        low = self.level - self.width / 2
        return np.asarray(np.rint(np.clip((hounsfield - low) / self.width, 0, 1) * 255), dtype=np.uint8)


def hounsfield(path: Path, where: str) -> NDArray[np.float64]:
    """The slice in Hounsfield units; padding outside the scanned circle becomes air."""
    header = _read(path, where)
    if header.get("Modality") != "CT" or "RescaleSlope" not in header or "RescaleIntercept" not in header:
        raise DataError(
            "not a CT slice with rescale slope and intercept", where=where, hint="export original CT slices"
        )
    if header.get("SamplesPerPixel", 1) != 1 or int(header.get("NumberOfFrames", 1) or 1) != 1:
        raise DataError("not a single grey slice", where=where, hint="export one file per slice")
    try:
        stored = header.pixel_array
    except Exception as error:  # pydicom and its decoders raise many types for damaged or compressed pixels
        raise DataError(
            f"pixels cannot be read ({type(error).__name__})",
            where=where,
            hint="export uncompressed, e.g. gdcmconv --raw",
        ) from None
    values = np.asarray(apply_rescale(stored, header), dtype=np.float64)
    if "PixelPaddingValue" in header:
        values[stored == header.PixelPaddingValue] = -1000.0
    return values


def _read(path: Path, where: str, *, pixels: bool = True) -> pydicom.Dataset:
    try:
        return pydicom.dcmread(path, stop_before_pixels=not pixels)
    except FileNotFoundError:
        raise DataError("image file is missing", where=where) from None
    except (InvalidDicomError, OSError, ValueError, KeyError, EOFError, AttributeError) as error:
        raise DataError(f"not a DICOM file ({type(error).__name__})", where=where) from None


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
    storage: Storage,
    class_names: Sequence[str] | None = None,
    window: Window | None = None,
) -> Catalogue:
    """CT slices listed by a CSV manifest, sorted into folders per class, or in the layout of RSNA-ICH."""
    decoding = ct_decoding(image_size, window)
    if path.is_dir() and any(path.glob("*.npz")):
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
    headers = [_read(path, where, pixels=False) for path, where in zip(paths, names, strict=True)]
    for key, kind in (("PatientID", "patient"), ("StudyInstanceUID", "study")):
        values = tuple(str(header.get(key) or "") for header in headers)
        if all(values):
            return values, kind
    return tuple(path.name for path in paths), "image"


def load_rsna(path: Path, *, image_size: int, storage: Storage, window: Window | None = None) -> Catalogue:
    """`ID_*.dcm` files beside (or in a folder beside) one npz of ids, labels, clients and folds.

    The published split is by slice, so one patient's slices are on both sides and at several sites.
    """
    splits = sorted(path.glob("*.npz"))
    if len(splits) != 1:
        raise DataError(f"folder holds {len(splits)} split files, not one", where=str(path))
    images = next((path / name for name in ("stage_2_train", "images") if (path / name).is_dir()), path)
    rows = read_rsna_split(splits[0], images)
    catalogue = catalogue_of(
        rows,
        ICH_CLASSES,
        name="rsna-ich",
        where=splits[0].name,
        unit_kind="image",
        decoding=ct_decoding(image_size, window),
        storage=storage,
        split_name="fold",
        split_grouped=False,
    )
    units, kind = header_units([row.path for row in rows], [row.where for row in rows])
    return replace(catalogue, units=units, unit_kind=kind)


def read_rsna_split(split: Path, images: Path) -> list[Row]:
    """Rows of the split file: arrays image_id, label, client and fold of equal length, no pickles."""
    try:
        with np.load(split, allow_pickle=False) as archive:
            columns = [archive[name].tolist() for name in ("image_id", "label", "client", "fold")]
    except (KeyError, ValueError, OSError, EOFError) as error:
        raise DataError(f"not a split file ({type(error).__name__})", where=split.name) from None
    rows = []
    for number, (image, label, client, fold) in enumerate(zip(*columns, strict=True)):
        where = f"{split.name} row {number}"
        if not 0 <= label < len(ICH_CLASSES):
            raise DataError(f"label {label} is not one of {len(ICH_CLASSES)} classes", where=where)
        rows.append(
            Row(
                id=image.decode(),
                path=images / f"{image.decode()}.dcm",
                label=ICH_CLASSES[label],
                where=where,
                site=f"client_{client:02d}",
                side=fold.decode(),
            )
        )
    return rows
