"""Who gets which images when a pooled data set has to be cut into sites: by Dirichlet draws, with classes missing.

A partition is a table of shares, sites x classes, whose columns sum to one. Whole patients are dealt by it, so no
image is lost, no patient is at two sites, and every partition is the same on every machine with the same numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from npr.data.catalogue import Catalogue
from security.errors import ConfigError

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
