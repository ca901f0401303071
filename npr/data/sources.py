"""`open_dataset`: one call from the name of a data set to one fold of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from npr.data.catalogue import Catalogue, assemble
from npr.data.dataset import FederatedDataset
from npr.data.dicom import load_dicom
from npr.data.fed_isic import load_fed_isic
from npr.data.generated import GeneratedSpec, generate
from npr.data.manifest import load_csv, load_folders
from npr.data.npz import load_npz
from npr.data.partition import PartitionSpec, partition
from npr.data.store import Storage
from security.errors import ConfigError

DATA_VARIABLE = "LAZARET_DATA"

_BY_PATH: dict[str, Callable[..., Catalogue]] = {
    "csv": load_csv,
    "folders": load_folders,
    "dicom": load_dicom,
    "fed-isic": load_fed_isic,
    "npz": load_npz,
}
# These learn their classes from the data; a federation fixes them, so that all hospitals mean the same by a number.
_NAMED_CLASSES = ("csv", "folders", "dicom")


def data_root() -> Path:
    """The folder with real data sets; it is never guessed."""
    root = os.environ.get(DATA_VARIABLE)
    if not root:
        raise ConfigError(f"{DATA_VARIABLE} is not set", hint=f"export {DATA_VARIABLE}=<folder with the data sets>")
    return Path(root)


def open_catalogue(
    source: str,
    *,
    image_size: int = 224,
    seed: int = 0,
    class_names: Sequence[str] | None = None,
    storage: Storage | None = None,
) -> Catalogue:
    """Every image of `source` (`kind` or `kind:path`), before a fold is chosen."""
    if image_size < 8:
        raise ConfigError(f"image_size = {image_size} shows nothing", hint="use 8 or more")
    kind, _, rest = source.partition(":")
    if kind == "generated":
        return generate(GeneratedSpec.parse(rest, seed=seed), image_size=image_size)
    where = storage or Storage.from_environment()
    if source == "ham10000":
        return replace(load_npz(data_root() / "ham10000_fed", image_size=image_size, storage=where), name=source)
    if kind not in _BY_PATH or not rest:
        known = ", ".join(["generated", "ham10000", *(f"{name}:PATH" for name in _BY_PATH)])
        raise ConfigError(f"unknown data source {source!r}", hint=f"one of {known}")
    options = {"class_names": class_names} if kind in _NAMED_CLASSES else {}
    return _BY_PATH[kind](Path(rest), image_size=image_size, storage=where, **options)


def open_dataset(
    source: str,
    *,
    fold: int | str = 0,
    folds: int = 5,
    seed: int = 0,
    image_size: int = 224,
    validation: float = 0.0,
    partitioned: PartitionSpec | str | None = None,
    class_names: Sequence[str] | None = None,
    storage: Storage | None = None,
) -> FederatedDataset:
    """One fold of `source`.

    :param fold: the name of a split that came with the data, or a number below `folds`.
    :param seed: of the folds made here and of generated images; not of training.
    :param validation: share of the training patients to hold out as a validation side.
    :param partitioned: cut the images into other sites, e.g. `dirichlet:sites=10,alpha=0.5,missing=0.3`.
    :param class_names: the federation's classes in its order, for sources that would take them from the labels.
    """
    catalogue = open_catalogue(source, image_size=image_size, seed=seed, class_names=class_names, storage=storage)
    if partitioned is not None:
        spec = PartitionSpec.parse(partitioned) if isinstance(partitioned, str) else partitioned
        catalogue = partition(catalogue, spec)
    return assemble(catalogue, fold=fold, folds=folds, seed=seed, validation=validation)
