"""A catalogue: every image of a data set with label, unit, site and named splits, before a fold is chosen.

Each source makes one catalogue; `assemble` turns it into a FederatedDataset. So folds, partitions and validation
sides work the same for every format. Splits by patient and the partition of a pooled data set into sites are here too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lazaret.errors import ConfigError, DataError
from npr.data.dataset import IMAGENET_MEAN, IMAGENET_STD, FederatedDataset, ImageRows, Samples, SiteData

# Splits that keep a patient (or lesion) on one side, balanced by stratum. The order of the units comes from SHA-256 and
# not from a library's generator: a published fold must be the same on every machine and with every version of numpy.


def _rank(seed: int, unit: str) -> bytes:
    return hashlib.sha256(f"{seed}\x00{unit}".encode()).digest()


def grouped_folds(units: Sequence[str], strata: Sequence[Hashable], *, folds: int, seed: int = 0) -> NDArray[np.int64]:
    """The fold (0 .. folds-1) of every row; all rows of a unit get the same one.

    Stratum by stratum (site x class), larger units first, each unit goes to the fold that has the fewest rows of its
    stratum so far, and among those to the fold with the fewest rows in all: small strata spread over the folds
    instead of piling up in the first.
    """
    if folds < 2:
        raise DataError(f"{folds} folds cannot hold a train and a test side", hint="use 2 or more")
    rows_of: dict[str, list[int]] = {}
    for row, unit in enumerate(units):
        rows_of.setdefault(unit, []).append(row)
    if len(rows_of) < folds:
        raise DataError(f"{len(rows_of)} units cannot be divided into {folds} folds", hint="use fewer folds")
    members: dict[str, list[str]] = {}
    for unit, rows in rows_of.items():
        # A unit seen at two sites is counted in the stratum that most of its rows are in; ties go by name.
        names = sorted(str(strata[row]) for row in rows)
        members.setdefault(max(names, key=names.count), []).append(unit)
    fold_of = np.empty(len(units), dtype=np.int64)
    totals = np.zeros(folds, dtype=np.int64)
    for stratum in sorted(members):
        held = np.zeros(folds, dtype=np.int64)
        for unit in sorted(members[stratum], key=lambda u: (-len(rows_of[u]), _rank(seed, u))):
            fold = int(np.lexsort((totals, held))[0])
            rows = rows_of[unit]
            held[fold] += len(rows)
            totals[fold] += len(rows)
            fold_of[rows] = fold
    return fold_of


def grouped_holdout(
    units: Sequence[str], strata: Sequence[Hashable], *, fraction: float, seed: int = 0
) -> NDArray[np.bool_]:
    """True for the rows held out: about `fraction` of every stratum, whole units."""
    if not 0.0 < fraction < 1.0:
        raise DataError(f"a holdout of {fraction} leaves one side empty", hint="use a fraction between 0 and 1")
    parts = max(2, round(1.0 / min(fraction, 1.0 - fraction)))
    folds = grouped_folds(units, strata, folds=parts, seed=seed)
    return np.asarray((folds == 0) if fraction <= 0.5 else (folds != 0))


def check_grouped(units: Sequence[str], sides: Sequence[str], *, unit_kind: str, names: Sequence[str]) -> None:
    """Raise if a unit has rows on two sides; the error names the two rows and keeps the patient's id out."""
    for _, error in on_two_sides(units, sides, unit_kind=unit_kind, names=names):
        raise error


def on_two_sides(
    units: Sequence[str], sides: Sequence[str], *, unit_kind: str, names: Sequence[str]
) -> Iterator[tuple[int, DataError]]:
    """Every row whose unit began on another side, with what to say about it."""
    first: dict[str, int] = {}
    for row, (unit, side) in enumerate(zip(units, sides, strict=True)):
        seen = first.setdefault(unit, row)
        if sides[seen] != side:
            yield (
                row,
                DataError(
                    f"one {unit_kind} is in {side!r} here and in {sides[seen]!r} in {names[seen]}",
                    where=names[row],
                    hint=f"put all images of a {unit_kind} on one side, or omit the split; it is then made for you",
                ),
            )


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
