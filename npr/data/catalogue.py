"""A catalogue: every image of a data set with label, unit, site and named splits, before a fold is chosen.

Each source makes one catalogue; `assemble` turns it into a FederatedDataset. So folds, partitions and validation
sides work the same for every format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from npr.data.dataset import IMAGENET_MEAN, IMAGENET_STD, FederatedDataset, ImageRows, Samples, SiteData
from npr.data.splits import check_grouped, grouped_folds, grouped_holdout
from security.errors import DataError

SIDES = ("train", "test", "validation")


def check_class_list(names: Sequence[str], *, where: str) -> None:
    if not names:
        raise DataError("the class list is empty", where=where)
    if not all(names):
        raise DataError("the class list holds an empty name", where=where)
    if len(set(names)) != len(names):
        raise DataError("the class list names a class twice", where=where)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSplit:
    """A split that came with the data.

    :param sides: one of train, test, validation per row.
    :param grouped: whether it promises to keep units together. The benchmark fold of Fed-ISIC2019 does not.
    """

    sides: tuple[str, ...]
    grouped: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """Columns of equal length. Errors call a row by `row_names`, or by its number in `where`."""

    name: str
    class_names: tuple[str, ...]
    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    ids: tuple[str, ...]
    units: tuple[str, ...]
    unit_kind: str
    sites: tuple[str, ...]
    splits: Mapping[str, NamedSplit] = field(default_factory=dict)
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    where: str = ""
    row_names: tuple[str, ...] = ()
    fingerprint: str = ""

    def __post_init__(self) -> None:
        check_class_list(self.class_names, where=self.where or self.name)
        if len(self) == 0:
            raise DataError("there is no image", where=self.where or self.name)
        if not len(self.ids) == len(self.units) == len(self.sites) == len(self.images) == len(self.labels):
            raise DataError("columns of different length", where=self.where or self.name)
        for split in self.splits.values():
            if split.grouped:
                names = self.row_names or tuple(f"{self.where or self.name} row {row}" for row in range(len(self)))
                check_grouped(self.units, split.sides, unit_kind=self.unit_kind, names=names)

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"<Catalogue {self.name}: {len(self)} images, {len(set(self.sites))} sites>"

    @property
    def strata(self) -> tuple[tuple[str, int], ...]:
        return tuple(zip(self.sites, self.labels.tolist(), strict=True))

    def with_sites(self, sites: tuple[str, ...]) -> Catalogue:
        """The same images on other sites: what a partitioner returns."""
        return replace(self, sites=sites)


def sides_of(catalogue: Catalogue, fold: int | str, *, folds: int = 5, seed: int = 0) -> tuple[str, ...]:
    """The side of every row: a named split, or fold `fold` of `folds` deterministic unit-grouped folds."""
    if isinstance(fold, str) and fold in catalogue.splits:
        return catalogue.splits[fold].sides
    number = int(fold) if isinstance(fold, str) and fold.isdecimal() else fold
    if not isinstance(number, int) or not 0 <= number < folds:
        known = ", ".join([*catalogue.splits, f"0 to {folds - 1}"])
        raise DataError(f"no fold {fold!r}", where=catalogue.name, hint=f"one of {known}")
    held = grouped_folds(catalogue.units, catalogue.strata, folds=folds, seed=seed) == number
    return tuple("test" if out else "train" for out in held)


def assemble(
    catalogue: Catalogue, *, fold: int | str, folds: int = 5, seed: int = 0, validation: float = 0.0
) -> FederatedDataset:
    """One fold as sites with a train and a test side, and a validation side cut from train where asked for."""
    sides = np.array(sides_of(catalogue, fold, folds=folds, seed=seed), dtype="U10")
    if validation > 0.0:
        rows = np.flatnonzero(sides == "train")
        strata = catalogue.strata
        held = grouped_holdout(
            [catalogue.units[r] for r in rows], [strata[r] for r in rows], fraction=validation, seed=seed + 1
        )
        sides[rows[held]] = "validation"
    where = np.array(catalogue.sites)

    def pick(site: str, side: str) -> Samples:
        return _samples(catalogue, np.flatnonzero((where == site) & (sides == side)))

    has_validation = bool(np.any(sides == "validation"))
    return FederatedDataset(
        name=catalogue.name,
        class_names=catalogue.class_names,
        sites=tuple(
            SiteData(
                name=site,
                train=pick(site, "train"),
                test=pick(site, "test"),
                validation=pick(site, "validation") if has_validation else None,
            )
            for site in dict.fromkeys(sorted(catalogue.sites))
        ),
        mean=catalogue.mean,
        std=catalogue.std,
        fold=str(fold),
        fingerprint=catalogue.fingerprint,
    )


def _samples(catalogue: Catalogue, rows: NDArray[np.int64]) -> Samples:
    return Samples(
        images=ImageRows(catalogue.images, rows),
        labels=catalogue.labels[rows],
        ids=tuple(catalogue.ids[r] for r in rows),
        units=tuple(catalogue.units[r] for r in rows),
        unit_kind=catalogue.unit_kind,
        num_classes=len(catalogue.class_names),
    )
