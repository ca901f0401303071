"""`open_dataset`: one call from the name of a data set to one fold of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from npr.data.catalogue import Catalogue, assemble
from npr.data.dataset import FederatedDataset
from npr.data.npz import load_npz
from npr.data.store import Storage
from security.errors import ConfigError

DATA_VARIABLE = "LAZARET_DATA"


def data_root() -> Path:
    """The folder with real data sets; it is never guessed."""
    root = os.environ.get(DATA_VARIABLE)
    if not root:
        raise ConfigError(f"{DATA_VARIABLE} is not set", hint=f"export {DATA_VARIABLE}=<folder with the data sets>")
    return Path(root)


def open_catalogue(source: str, *, image_size: int = 224, storage: Storage | None = None) -> Catalogue:
    """Every image of `source` (`kind` or `kind:path`), before a fold is chosen."""
    kind, _, path = source.partition(":")
    where = storage or Storage.from_environment()
    if kind == "ham10000":
        return load_npz(data_root() / "ham10000_fed", image_size=image_size, storage=where)
    if kind in _BY_PATH:
        if not path:
            raise ConfigError(f"source {kind!r} needs a path", hint=f"write {kind}:PATH")
        return _BY_PATH[kind](Path(path), image_size=image_size, storage=where)
    raise ConfigError(
        f"unknown data source {source!r}", hint=f"one of ham10000, {', '.join(f'{k}:PATH' for k in _BY_PATH)}"
    )


_BY_PATH: dict[str, Callable[..., Catalogue]] = {"npz": load_npz}


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
    :param seed: of the folds made here (and of generated data); not of training.
    """
    catalogue = open_catalogue(source, image_size=image_size, storage=storage)
    return assemble(catalogue, fold=fold, folds=folds, seed=seed, validation=validation)
