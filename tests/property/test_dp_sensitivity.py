"""One patient more or less moves every released quantity by no more than its booked sensitivity.

Noise is off: these are the production queries themselves, on hundreds of random data sets with several images per
patient, rare classes and broken records. The twins run the ordinary, naive pipeline through the same comparison, and
must break the bound: otherwise the comparison would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from npr.config import TrainConfig
from npr.dp.clipping import ClippedGradient
from npr.dp.private_site import PrivateData, PrivateRounds, Regularisation
from npr.dp.releases import (
    PrivateCounts,
    PrivatePrototypes,
    class_sums,
    count_sums,
    hit_sums,
    prototype_sums,
    public_projection,
    unit_features,
)
from npr.losses import ClassPrior
from npr.prototypes import make_prototypes
from security.dp.accountant import LATTICE_ONE, RATE_ONE, counts_event, metrics_event, prototypes_event
from security.dp.noise import Units
from security.dp.planner import Schedule

Query = Callable[["Records"], np.ndarray]

DATA_SETS = 300
WIDTH = 12


@dataclass
class Records:
    """One data set; `without` is its neighbour."""

    features: np.ndarray
    labels: np.ndarray
    predicted: np.ndarray
    owners: np.ndarray
    classes: int

    def without(self, patient: int) -> Records:
        kept = self.owners != patient
        return Records(self.features[kept], self.labels[kept], self.predicted[kept], self.owners[kept], self.classes)

    @property
    def units(self) -> Units:
        return Units(self.owners.tolist())


def random_records(rng: np.random.Generator, *, broken: bool = True) -> Records:
    owners = np.repeat(np.arange(rng.integers(2, 25)), rng.integers(1, 6))
    owners = rng.permutation(owners)
    classes = int(rng.integers(2, 6))
    # Bunched features, as a network gives them, at any scale.
    features = (rng.normal(size=WIDTH) + 0.5 * rng.normal(size=(len(owners), WIDTH))) * 10.0 ** rng.integers(-3, 4)
    if broken:
        features[rng.random(len(owners)) < 0.1] = rng.choice([np.nan, np.inf, 0.0, 1e200])
    return Records(
        features, rng.integers(0, classes, len(owners)), rng.integers(0, classes, len(owners)), owners, classes
    )


def random_state(rng: np.random.Generator, classes: int, width: int = WIDTH) -> PrivatePrototypes:
    """Public state: anything that does not look at the data."""
    dimensions = int(rng.choice([4, width]))
    cells = tuple(int(value) for value in rng.integers(1, 5, classes))
    vectors = rng.normal(size=(classes, max(cells), dimensions))
    return PrivatePrototypes(
        vectors=vectors / np.linalg.norm(vectors, axis=2, keepdims=True),
        potentials=rng.uniform(-0.2, 0.2, vectors.shape[:2]),
        cells=cells,
        projection=public_projection(width, dimensions, "public"),
    )


def furthest(query: Query, records: Records, most: int = 1000) -> float:
    """The largest move of the query's result over the patients that could leave (the first `most` of them)."""
    whole = query(records).astype(np.float64)
    leaving = sorted(set(records.owners))[:most]
    return max(float(np.linalg.norm((query(records.without(patient)) - whole).ravel())) for patient in leaving)


def test_counts_and_metrics() -> None:
    for seed in range(DATA_SETS):
        records = random_records(np.random.default_rng(seed))
        counts = furthest(lambda r: count_sums(r.labels, r.units, r.classes), records)
        hits = furthest(lambda r: hit_sums(r.labels, r.predicted, r.units, r.classes), records)
        assert counts <= counts_event(5.0).sensitivity * LATTICE_ONE
        assert hits <= metrics_event(5.0).sensitivity * LATTICE_ONE


def test_counts_twin() -> None:
    """Counting images instead of patients: a patient with several images moves the counts by more."""
    worst = max(
        furthest(lambda r: np.bincount(r.labels, minlength=r.classes), random_records(np.random.default_rng(seed)))
        for seed in range(20)
    )
    assert worst > 2 * counts_event(5.0).sensitivity


def sums_of_classes(state: PrivatePrototypes) -> Query:
    return lambda r: class_sums(unit_features(r.features, state.projection), r.labels, r.units, r.classes)


def sums_of_cells(state: PrivatePrototypes) -> Query:
    return lambda r: prototype_sums(unit_features(r.features, state.projection), r.labels, r.units, state)


def test_prototype_sums() -> None:
    bound = prototypes_event(10.0).sensitivity * LATTICE_ONE
    reached = 0.0
    for seed in range(DATA_SETS):
        rng = np.random.default_rng(seed)
        records = random_records(rng)
        state = random_state(rng, records.classes)
        assert furthest(sums_of_classes(state), records) <= bound
        moved = furthest(sums_of_cells(state), records)
        assert moved <= bound
        reached = max(reached, moved)
    # The bound is tight: a patient with one image moves the sums by nearly all of it.
    assert reached > 0.999 * bound


def test_prototype_sums_twin() -> None:
    """Sinkhorn balances whole classes: a patient who leaves re-assigns others, and the sums move by more than one."""
    config = TrainConfig(clusters=4, min_per_cluster=1)

    def naive(r: Records) -> np.ndarray:
        features = torch.from_numpy(r.features).float()
        labels = torch.from_numpy(r.labels)
        made = make_prototypes(features, labels, r.classes, config)
        unit = functional.normalize(features, dim=1)
        same = made.owners[None, :] == labels[:, None]
        nearest = (unit @ made.vectors.T).masked_fill(~same, -2.0).argmax(1)
        # Compared by class and rank, since Sinkhorn's own cells come and go with the data.
        rank = nearest - torch.searchsorted(made.owners, labels)
        sums = torch.zeros(r.classes * 4, WIDTH).index_add_(0, labels * 4 + rank, unit)
        return sums.numpy()

    data_sets = (random_records(np.random.default_rng(seed), broken=False) for seed in range(20))
    worst = max(furthest(naive, records, most=4) for records in data_sets)
    assert worst > 2 * prototypes_event(10.0).sensitivity


class Tiny(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, 6)
        self.head = nn.Linear(6, classes)

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))

    def logits(self, h: Tensor) -> Tensor:
        return self.head(h)


CLIP = 0.7


def one_image_each(records: Records, seed: int) -> np.ndarray:
    """A fixed outcome of the sampler's coins: which patients are drawn, and which image of each."""
    chosen = []
    for patient in sorted(set(records.owners)):
        coin = np.random.default_rng([seed, patient])
        images = np.flatnonzero(records.owners == patient)
        if coin.random() < 0.7:
            chosen.append(images[coin.integers(len(images))])
    return np.array(chosen, dtype=np.int64)


def clipped_sum(model: Tiny, losses: Callable[[], Tensor]) -> np.ndarray:
    clipped = ClippedGradient(model, clip=CLIP)
    clipped.add(losses)
    return clipped.sum.numpy()


def production_step(seed: int, classes: int) -> Query:
    """The sum of one DP-SGD step as a site computes it, with random public state."""
    rng = np.random.default_rng([seed, 1])
    torch.manual_seed(seed)
    model = Tiny(classes)
    counts = PrivateCounts(noisy=tuple(rng.normal(20, 10, classes).tolist()), sigma=5.0)
    state = random_state(rng, classes, width=6)
    schedule = Schedule(rounds=1, steps=1, rate=RATE_ONE, multiplier=1.0, clip=CLIP, prototypes_sigma=5.0)

    def query(r: Records) -> np.ndarray:
        images = torch.from_numpy(r.features).float()
        data = PrivateData(
            labels=r.labels,
            units=r.units,
            classes=r.classes,
            training=lambda indices: images[indices],
            reading=lambda indices: images[indices],
        )
        rounds = PrivateRounds(data, schedule, Regularisation(weight=0.5, dimensions=len(state.projection)))
        rounds.counts, rounds.prototypes = counts, state
        drawn = one_image_each(r, seed)
        return clipped_sum(model, lambda: rounds._losses(model, drawn))

    return query


def test_the_clipped_sum_with_private_prior_and_prototypes() -> None:
    reached = 0.0
    for seed in range(DATA_SETS):
        records = random_records(np.random.default_rng(seed))
        moved = furthest(production_step(seed, records.classes), records, most=3)
        assert moved <= CLIP * (1 + 1e-4)
        reached = max(reached, moved)
    assert reached > 0.99 * CLIP


def naive_step(seed: int, classes: int) -> Query:
    """Exact prior and prototypes of the raw data, with the very same clipping."""
    config = TrainConfig(clusters=2, min_per_cluster=1, temperature=0.1)
    torch.manual_seed(seed)
    model = Tiny(classes)

    def query(r: Records) -> np.ndarray:
        images, labels = torch.from_numpy(r.features).float(), torch.from_numpy(r.labels)
        with torch.no_grad():
            prototypes = make_prototypes(model.features(images), labels, r.classes, config)
        prior = ClassPrior(torch.bincount(labels, minlength=r.classes)).log(1e-9)
        drawn = torch.from_numpy(one_image_each(r, seed))

        def losses() -> Tensor:
            features = model.features(images[drawn])
            supervised = functional.cross_entropy(model.logits(features) + prior, labels[drawn], reduction="none")
            targets = torch.searchsorted(prototypes.classes, labels[drawn])
            logits = prototypes.similarity(features) / config.temperature
            return supervised + 0.5 * functional.cross_entropy(logits, targets, reduction="none")

        return clipped_sum(model, losses)

    return query


def test_the_clipped_sum_twin() -> None:
    """One patient who leaves moves everybody's gradient."""
    worst = 0.0
    for seed in range(40):
        records = random_records(np.random.default_rng(seed), broken=False)
        worst = max(worst, furthest(naive_step(seed, records.classes), records, most=3))
    assert worst > 2 * CLIP
