"""`open_dataset`: one call from the name of a data set to one fold of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from npr.data.catalogue import Catalogue, assemble
from npr.data.dataset import FederatedDataset
from npr.data.generated import GeneratedSpec, generate
from npr.data.npz import load_npz
from npr.data.store import Storage
from security.errors import ConfigError

DATA_VARIABLE = "LAZARET_DATA"

_BY_PATH: dict[str, Callable[..., Catalogue]] = {"npz": load_npz}


def data_root() -> Path:
    """The folder with real data sets; it is never guessed."""
    root = os.environ.get(DATA_VARIABLE)
    if not root:
        raise ConfigError(f"{DATA_VARIABLE} is not set", hint=f"export {DATA_VARIABLE}=<folder with the data sets>")
    return Path(root)


def open_catalogue(source: str, *, image_size: int = 224, seed: int = 0, storage: Storage | None = None) -> Catalogue:
    """Every image of `source` (`kind` or `kind:path`), before a fold is chosen."""
    kind, _, rest = source.partition(":")
    if kind == "generated":
        return generate(GeneratedSpec.parse(rest, seed=seed), image_size=image_size)
    where = storage or Storage.from_environment()
    if source == "ham10000":
        return replace(load_npz(data_root() / "ham10000_fed", image_size=image_size, storage=where), name=source)
    if kind in _BY_PATH and rest:
        return _BY_PATH[kind](Path(rest), image_size=image_size, storage=where)
    known = ", ".join(["generated", "ham10000", *(f"{name}:PATH" for name in _BY_PATH)])
    raise ConfigError(f"unknown data source {source!r}", hint=f"one of {known}")


def open_dataset(
    source: str,
    *,
    fold: int | str = 0,
    folds: int = 5,
    seed: int = 0,
    image_size: int = 224,
    validation: float = 0.0,
    storage: Storage | None = None,
) -> FederatedDataset:
    """One fold of `source`.

    :param fold: the name of a split that came with the data, or a number below `folds`.
    :param seed: of the folds made here and of generated images; not of training.
    :param validation: share of the training patients to hold out as a validation side.
    """
    catalogue = open_catalogue(source, image_size=image_size, seed=seed, storage=storage)
    return assemble(catalogue, fold=fold, folds=folds, seed=seed, validation=validation)
