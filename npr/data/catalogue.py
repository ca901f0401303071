"""A catalogue: every image of a data set with label, unit, site and named splits, before a fold is chosen.

Each source makes one catalogue; `assemble` turns it into a FederatedDataset. So folds, partitions and validation
sides work the same for every format (npr/data/sides.py). The partition of a pooled data set into sites is here too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lazaret.errors import ConfigError, DataError
from npr.config import LabelsOfImage
from npr.data.dataset import IMAGENET_MEAN, IMAGENET_STD, FederatedDataset, ImageRows, Samples, SiteData
from npr.data.sides import SideRule, check_grouped, check_spelling, fold_of, spelt_twice, stratified_places, unit_key

NO_SITE = "site"


# Between the labels of one image, and in place of them where it has none: an empty field is a mistake, not a finding.
SEPARATOR, NO_LABEL = "|", "-"


def check_class_list(names: Sequence[str], *, where: str, many: bool = False) -> None:
    """:param many: an image may have several labels, and a field lists them."""
    if not names:
        raise DataError("the class list is empty", where=where)
    if not all(names):
        raise DataError("the class list holds an empty name", where=where)
    if len(set(names)) != len(names):
        raise DataError("the class list names a class twice", where=where)
    if many and (bad := [name for name in names if name == NO_LABEL or SEPARATOR in name]):
        raise DataError(
            f"no label can be called {bad[0]!r}",
            where=where,
            hint=f"{SEPARATOR!r} stands between the labels of an image, {NO_LABEL!r} alone says that it has none",
        )


def labels_of(text: str, labels: LabelsOfImage) -> tuple[str, ...]:
    """The names in a field `label`."""
    if labels == "one":
        return (text,)
    return () if text == NO_LABEL else tuple(name.strip() for name in text.split(SEPARATOR))


def targets_of(texts: Sequence[str], class_names: Sequence[str], labels: LabelsOfImage) -> NDArray[np.int64]:
    """(N,) classes as numbers; or (N, classes) zeros and ones, where an image may have several labels."""
    number = {name: index for index, name in enumerate(class_names)}
    if labels == "one":
        return np.array([number[text] for text in texts], dtype=np.int64)
    targets = np.zeros((len(texts), len(class_names)), dtype=np.int64)
    for text, row in zip(texts, targets, strict=True):
        row[[number[name] for name in labels_of(text, labels)]] = 1
    return targets


_MAP_HINT = '[data] class_map = { "name here" = "name in the federation", ... }, with every class that is used here'


def _difference(ours: tuple[str, ...], theirs: tuple[str, ...]) -> str:
    if len(ours) != len(theirs):
        return f"{len(ours)} classes where the federation has {len(theirs)}"
    place = next(place for place, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other)
    return f"class {place + 1} is {ours[place]!r} here and {theirs[place]!r} in the federation"


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
    """Columns of equal length. Errors call a row by `row_names`, or by its number in `where`.

    :param fingerprint: digest of the images; `version` covers the rest of the table too.
    :param per_unit: no refusal and no row depends on other units than its own, as privacy needs it (`PerUnitStorage`).
    :param unusable: rows that are on no side.
    """

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
    per_unit: bool = False
    unusable: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        check_class_list(self.class_names, where=self.where or self.name, many=self.many)
        if len(self) == 0 and not self.per_unit:
            raise DataError("there is no image", where=self.where or self.name)
        if not len(self.ids) == len(self.units) == len(self.sites) == len(self.images) == len(self.labels):
            raise DataError("columns of different length", where=self.where or self.name)
        names = [self.row_name(row) for row in range(len(self))]
        if self.unit_kind != "image" and not self.per_unit:
            check_spelling(self.units, unit_kind=self.unit_kind, names=names)
        for split in self.splits.values():
            if split.grouped and not self.per_unit:
                check_grouped(self.units, split.sides, unit_kind=self.unit_kind, names=names)

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"<Catalogue {self.name}: {len(self)} images, {len(set(self.sites))} sites>"

    def row_name(self, row: int) -> str:
        """What an error calls a row."""
        return self.row_names[row] if self.row_names else f"{self.where or self.name} row {row}"

    @property
    def strata(self) -> tuple[tuple[str, int | tuple[int, ...]], ...]:
        """Site and class; where an image may have several labels, site and the labels together."""
        labels = map(tuple, self.labels.tolist()) if self.many else self.labels.tolist()
        return tuple(zip(self.sites, labels, strict=True))

    @property
    def many(self) -> bool:
        """Whether an image may have several labels: `labels` are then zeros and ones (N, classes)."""
        return self.labels.ndim == 2

    def version(self) -> str:
        """Digest of everything that was read: images, classes, labels, units, sites and splits."""
        digest = hashlib.sha256(self.fingerprint.encode())
        splits = [(name, split.grouped, split.sides) for name, split in sorted(self.splits.items())]
        columns = (self.class_names, self.labels.tolist(), self.ids, self.units, self.unit_kind, self.sites, splits)
        for column in columns:
            digest.update(hashlib.sha256(json.dumps(column).encode()).digest())
        return digest.hexdigest()

    def without_a_side(self) -> frozenset[int]:
        """Rows that cannot be used: those without an image and, of units that are written in two ways, all."""
        twice = {unit_key(self.units[row]) for row, _ in spelt_twice(self.units)} if self.unit_kind != "image" else ()
        return self.unusable | {row for row, unit in enumerate(self.units) if twice and unit_key(unit) in twice}

    def with_classes(self, classes: tuple[str, ...], class_map: Mapping[str, str] | None) -> Catalogue:
        """The same images with the labels of a federation: a label is a place in its list.

        :param class_map: from every name here to the federation's; several may be one class there.
        :raises DataError: where the names or their order differ and no map says which is which.
        """
        where = self.where or self.name
        if class_map is None:
            if self.class_names != classes:
                raise DataError(_difference(self.class_names, classes), where=where, hint=_MAP_HINT)
            return self
        for what, wrong in (
            ("has no entry for", [name for name in self.class_names if name not in class_map]),
            ("has an entry that is no class here:", [name for name in class_map if name not in self.class_names]),
            ("names a class that the federation has not:", [n for n in class_map.values() if n not in classes]),
        ):
            if wrong:
                hint = f"the federation's classes are {', '.join(classes)}"
                raise ConfigError(f"class_map {what} {wrong[0]!r}", where="[data] class_map", hint=hint)
        places = np.array([classes.index(class_map[name]) for name in self.class_names], dtype=np.int64)
        if not self.many:
            return replace(self, class_names=classes, labels=places[self.labels])
        labels = np.zeros((len(self), len(classes)), dtype=np.int64)
        for place, column in zip(places, self.labels.T, strict=True):
            labels[:, place] |= column
        return replace(self, class_names=classes, labels=labels)

    def with_sites(self, sites: tuple[str, ...]) -> Catalogue:
        """The same images on other sites: what a partitioner returns."""
        return replace(self, sites=sites)


def sides_of(
    catalogue: Catalogue, fold: int | str, *, folds: int = 5, seed: int = 0, validation: float = 0.0
) -> tuple[str, ...]:
    """The side of every row: a named split, or fold `fold` of `folds` deterministic unit-grouped folds; `validation` is
    taken from the training side."""
    found = fold_of(catalogue, fold, folds)
    return stratified_places(
        catalogue.units,
        catalogue.strata,
        fold=found if isinstance(found, int) else 0,
        folds=folds,
        seed=seed,
        validation=validation,
        given=catalogue.splits[found].sides if isinstance(found, str) else None,
    )[0]


def assemble(
    catalogue: Catalogue,
    *,
    fold: int | str,
    folds: int = 5,
    seed: int = 0,
    validation: float = 0.0,
    rule: SideRule | None = None,
    site: str | None = None,
) -> FederatedDataset:
    """One fold as sites with a train and a test side, and a validation side cut from train where asked for.

    :param rule: gives the sides instead; what `fold` is called stays for the record.
    :param site: this one alone: rows that name it or no site. It may have no image where the catalogue is `per_unit`.
    """
    made = (
        rule(catalogue) if rule else sides_of(catalogue, fold, folds=folds, seed=seed, validation=validation)
    )
    sides = np.array(made, dtype="U10")
    sides[sorted(catalogue.without_a_side())] = ""
    where = np.array(catalogue.sites)

    def pick(name: str, side: str) -> Samples:
        ours = (where == name) | (where == NO_SITE) if name == site else where == name
        return _samples(catalogue, np.flatnonzero(ours & (sides == side)))

    has_validation = bool(np.any(sides == "validation"))
    return FederatedDataset(
        name=catalogue.name,
        class_names=catalogue.class_names,
        sites=tuple(
            SiteData(
                name=name,
                train=pick(name, "train"),
                test=pick(name, "test"),
                validation=pick(name, "validation") if has_validation else None,
            )
            for name in (sorted(set(catalogue.sites)) if site is None else [site])
        ),
        mean=catalogue.mean,
        std=catalogue.std,
        fold=str(fold),
        fingerprint=catalogue.version(),
        sides=tuple(sides.tolist()),
        may_be_empty=catalogue.per_unit,
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


# Partition of a pooled data set into sites, by Dirichlet draws, with missing classes. A partition is a table of shares,
# sites x classes, whose columns sum to one. Complete patients are assigned by it, so that no image is lost, no patient
# is at two sites, and every partition is the same on every machine with the same numpy.

Shares = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSpec:
    """How to cut.

    :param kind: `natural` keeps the sites of the data, `dirichlet` draws new ones.
    :param alpha: concentration per class, or one for all; small is uneven.
    :param missing: chance that a class is taken from a site and its images dealt to the others.
    """

    kind: str = "natural"
    sites: int = 10
    alpha: tuple[float, ...] = (1.0,)
    missing: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("natural", "dirichlet"):
            raise ConfigError(f"unknown partition {self.kind!r}", hint="natural or dirichlet")
        if self.sites < 1 or not self.alpha or min(self.alpha) <= 0.0:
            raise ConfigError("a partition needs at least one site and positive alphas")
        if not np.isfinite(self.alpha).all() or self.seed < 0:
            raise ConfigError("the alphas of a partition must be finite and its seed not negative")
        if not 0.0 <= self.missing < 1.0:
            raise ConfigError(f"missing = {self.missing} is not a chance below one")

    @classmethod
    def parse(cls, text: str) -> PartitionSpec:
        """From `dirichlet:sites=10,alpha=0.5/5/10/30/50,missing=0.3,seed=1`."""
        kind, _, rest = text.partition(":")
        found: dict[str, str] = {}
        for part in filter(None, rest.split(",")):
            key, _, value = part.partition("=")
            if key not in ("sites", "alpha", "missing", "seed") or key in found:
                raise ConfigError(
                    f"unexpected {part!r}", where="partition", hint="sites, alpha, missing and seed, once"
                )
            found[key] = value
        try:
            return cls(
                kind=kind,
                sites=int(found.get("sites", 10)),
                alpha=tuple(float(value) for value in found.get("alpha", "1").split("/")),
                missing=float(found.get("missing", 0)),
                seed=int(found.get("seed", 0)),
            )
        except ValueError:
            raise ConfigError(f"{text!r} holds something that is not a number", where="partition") from None


def partition(catalogue: Catalogue, spec: PartitionSpec) -> Catalogue:
    """The same images with the sites that `spec` asks for."""
    if spec.kind == "natural" and spec.missing == 0.0:
        return catalogue
    if catalogue.many:
        raise ConfigError(
            "a partition deals images by their one class, and these may have several labels",
            where="partition",
            hint="name the sites in a column `site` of the table",
        )
    rng = np.random.default_rng([spec.seed, 3])
    classes = len(catalogue.class_names)
    if spec.kind == "natural":
        names: Sequence[str] = sorted(set(catalogue.sites))
        shares = natural_shares(catalogue, names)
    else:
        names = [f"site_{number:02d}" for number in range(1, spec.sites + 1)]
        shares = dirichlet_shares(spec.sites, classes, spec.alpha, rng)
    if spec.missing > 0.0:
        shares = drop_classes(shares, spec.missing, rng)
    sites = _deal(catalogue, names, shares, rng)
    empty = sorted(set(names) - set(sites))
    if empty:
        raise ConfigError(f"{empty[0]} would get no image", where="partition", hint="fewer sites, larger alpha or seed")
    return catalogue.with_sites(sites)


def natural_shares(catalogue: Catalogue, names: Sequence[str]) -> Shares:
    """What share of each class each site has; a class without images is shared evenly."""
    place = {name: number for number, name in enumerate(names)}
    counts = np.zeros((len(names), len(catalogue.class_names)))
    np.add.at(counts, (np.array([place[site] for site in catalogue.sites]), catalogue.labels), 1.0)
    return _columns_to_one(counts)


def dirichlet_shares(sites: int, classes: int, alpha: Sequence[float], rng: np.random.Generator) -> Shares:
    """One Dirichlet draw over the sites per class, each class with its own concentration."""
    if len(alpha) not in (1, classes):
        raise ConfigError(f"{len(alpha)} alphas for {classes} classes", hint="give one, or one per class")
    each = np.broadcast_to(np.asarray(alpha, dtype=np.float64), (classes,))
    return np.stack([rng.dirichlet(np.full(sites, a)) for a in each], axis=1)


def drop_classes(shares: Shares, probability: float, rng: np.random.Generator) -> Shares:
    """Take classes from sites by chance; the rest of the column is scaled up, so that every image finds a place.

    The site with the largest share of a class keeps it, and every site keeps its best class, so that neither a class
    nor a site disappears.
    """
    keep = rng.random(shares.shape) >= probability
    keep[shares.argmax(axis=0), np.arange(shares.shape[1])] = True
    keep[np.arange(len(shares)), shares.argmax(axis=1)] = True
    return _columns_to_one(shares * keep)


def _columns_to_one(table: Shares) -> Shares:
    total = table.sum(axis=0, keepdims=True)
    return np.where(total > 0, table / np.where(total > 0, total, 1.0), 1.0 / len(table))


def _deal(catalogue: Catalogue, names: Sequence[str], shares: Shares, rng: np.random.Generator) -> tuple[str, ...]:
    """Shuffled whole units, class by class, each to the site that is furthest below its share."""
    rows_of: dict[str, list[int]] = {}
    for row, unit in enumerate(catalogue.units):
        rows_of.setdefault(unit, []).append(row)
    units_of: list[list[str]] = [[] for _ in catalogue.class_names]
    for unit, rows in rows_of.items():
        # A unit with images of several classes goes with the one most of them have.
        units_of[int(np.bincount(catalogue.labels[rows]).argmax())].append(unit)
    site_of = np.empty(len(catalogue), dtype=np.int64)
    for label, units in enumerate(units_of):
        images = sum(len(rows_of[unit]) for unit in units)
        # A site without a share must not get even the rest that whole units leave.
        wanted = np.where(shares[:, label] > 0, shares[:, label] * images, -np.inf)
        for number in rng.permutation(len(units)):
            rows = rows_of[units[number]]
            site = int(wanted.argmax())
            wanted[site] -= len(rows)
            site_of[rows] = site
    return tuple(names[site] for site in site_of.tolist())
