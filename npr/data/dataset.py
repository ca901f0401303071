"""What a method learns from: images of one site, its sides (train, test, validation), and the federation of sites.

Nothing here knows files or the network; the sources (npr/data/sources.py) fill these types, the loader reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from lazaret.errors import DataError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

UNIT_KINDS = ("patient", "lesion", "study", "image")


class ImageRows:
    """Some rows of a shared pool of decoded images, indexed like an array but copied only when read.

    Train, test and every fold of one data set point into one pool, which may be larger than memory (np.memmap).
    """

    __slots__ = ("_pool", "_rows")

    def __init__(self, pool: NDArray[np.uint8], rows: NDArray[np.int64]) -> None:
        self._pool = pool
        self._rows = np.ascontiguousarray(rows, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self._rows), *self._pool.shape[1:])

    @property
    def ndim(self) -> int:
        return self._pool.ndim

    @property
    def dtype(self) -> np.dtype[np.uint8]:
        return self._pool.dtype

    def __getitem__(self, index: Any) -> NDArray[np.uint8]:
        first, *rest = index if isinstance(index, tuple) else (index,)
        return np.asarray(self._pool[(self._rows[first], *rest)])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("rows of a pool cannot be seen as one array without a copy")
        return np.asarray(self._pool[self._rows], dtype=dtype)

    def take(self, indices: NDArray[np.int64]) -> ImageRows:
        """The same pool, fewer rows: no image is touched."""
        return ImageRows(self._pool, self._rows[indices])

    def joined(self, others: Sequence[ImageRows]) -> ImageRows | None:
        """These rows and those of `others`, or None where they point into another pool."""
        if any(other._pool is not self._pool for other in others):
            return None
        return ImageRows(self._pool, np.concatenate([self._rows, *(other._rows for other in others)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """One side of one site's data. `ids` and `units` identify patients: they stay on the site.

    :param images: uint8 (N, H, W, C) with one or three channels.
    :param labels: the class of each image (N,); or zeros and ones (N, classes), where an image may have several labels.
    :param units: the patient, lesion, study or image each row belongs to: what splits keep together and privacy counts.
    """

    images: NDArray[np.uint8] | ImageRows
    labels: NDArray[np.int64]
    ids: tuple[str, ...]
    units: tuple[str, ...]
    unit_kind: str
    num_classes: int

    def __post_init__(self) -> None:
        shape = self.images.shape
        if len(shape) != 4 or shape[3] not in (1, 3) or self.images.dtype != np.uint8:
            raise DataError(f"images must be uint8 (N, H, W, 1 or 3), not {self.images.dtype} {tuple(shape)}")
        if not len(self.labels) == len(self.ids) == len(self.units) == shape[0]:
            raise DataError(
                f"{shape[0]} images, {len(self.labels)} labels, {len(self.ids)} ids and {len(self.units)} units "
                "do not belong together"
            )
        if self.unit_kind not in UNIT_KINDS:
            raise DataError(f"unknown unit kind {self.unit_kind!r}", hint=f"one of {', '.join(UNIT_KINDS)}")
        if self.labels.dtype != np.int64:
            raise DataError(f"labels must be int64, not {self.labels.dtype}")
        if self.many:
            if self.labels.shape[1] != self.num_classes or not np.isin(self.labels, (0, 1)).all():
                raise DataError(f"several labels of an image must be {self.num_classes} zeros or ones for each")
        elif len(self.labels) and not (self.labels.min() >= 0 and self.labels.max() < self.num_classes):
            row = int(np.argmax((self.labels < 0) | (self.labels >= self.num_classes)))
            raise DataError(f"label {self.labels[row]} is outside the {self.num_classes} classes", where=f"row {row}")
        # Two patients may have the same image: under differential privacy neither is left out because of the other.
        if len(set(zip(self.units, self.ids, strict=True))) != len(self.ids):
            raise DataError("an image id occurs twice")

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        # The generated one would print ids of patients into a log.
        return f"<Samples {len(self)} images {self.images.shape[1:]}, counts {self.class_counts().tolist()}>"

    @property
    def many(self) -> bool:
        """Whether an image may have several labels."""
        return self.labels.ndim == 2

    def class_counts(self) -> NDArray[np.int64]:
        """Images of each class; an image with several labels counts for each of them."""
        if self.many:
            return np.asarray(self.labels.sum(axis=0))
        return np.bincount(self.labels, minlength=self.num_classes).astype(np.int64)

    def subset(self, indices: Sequence[int] | NDArray[Any]) -> Self:
        rows = np.asarray(indices)
        rows = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows.astype(np.int64)
        images = self.images.take(rows) if isinstance(self.images, ImageRows) else self.images[rows]
        return replace(
            self,
            images=images,
            labels=self.labels[rows],
            ids=tuple(self.ids[i] for i in rows),
            units=tuple(self.units[i] for i in rows),
        )


def joined(parts: Sequence[Samples]) -> Samples:
    """All rows of all parts, in order; images of one pool are not copied."""
    rows = [part.images for part in parts if isinstance(part.images, ImageRows)]
    images = rows[0].joined(rows[1:]) if len(rows) == len(parts) else None
    return replace(
        parts[0],
        images=np.concatenate([np.asarray(part.images) for part in parts]) if images is None else images,
        labels=np.concatenate([part.labels for part in parts]),
        ids=tuple(name for part in parts for name in part.ids),
        units=tuple(name for part in parts for name in part.units),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteData:
    """What one hospital holds in one fold."""

    name: str
    train: Samples
    test: Samples
    validation: Samples | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FederatedDataset:
    """One fold of a data set over its sites, in a fixed order.

    :param mean: per channel, on the 0..1 scale; what the source suggests, a pretrained model may want its own.
    :param fold: what the fold was called, for the record.
    :param fingerprint: digest of what the source read, so that results name their data.
    :param sides: the side of each row of the source, in its order, for processes that must divide it in the same way.
    :param may_be_empty: a training side without an image is no error: under differential privacy it would tell.
    """

    name: str
    class_names: tuple[str, ...]
    sites: tuple[SiteData, ...]
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    fold: str = ""
    fingerprint: str = ""
    sides: tuple[str, ...] = ()
    may_be_empty: bool = False

    def __post_init__(self) -> None:
        if not self.class_names:
            raise DataError("the class list is empty", where=self.name)
        names = [site.name for site in self.sites]
        if not names or len(set(names)) != len(names):
            raise DataError(f"sites must have distinct names, not {names}", where=self.name)
        for site in self.sites:
            if len(site.train) == 0 and not self.may_be_empty:
                raise DataError(
                    f"site {site.name} has no training image", where=self.name, hint="leave it out, or use fewer sites"
                )

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def channels(self) -> int:
        return int(self.sites[0].train.images.shape[3])

    @property
    def image_size(self) -> int:
        return int(self.sites[0].train.images.shape[1])

    def site(self, name: str) -> SiteData:
        for site in self.sites:
            if site.name == name:
                return site
        raise DataError(f"no site {name!r}", where=self.name, hint=f"one of {', '.join(s.name for s in self.sites)}")

    def counts(self, side: str = "train") -> NDArray[np.int64]:
        """Sites x classes, for tables and checks; a site never sends its row."""
        sides = [getattr(site, side) for site in self.sites]
        if any(samples is None for samples in sides):
            raise DataError(f"not every site has a {side} side", where=self.name)
        return np.stack([samples.class_counts() for samples in sides])
