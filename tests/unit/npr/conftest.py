"""A federation small enough for tests: three sites, four classes, real convolutions with BatchNorm at 32 pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from npr.config import TrainConfig
from npr.data.dataset import FederatedDataset, Samples, SiteData
from npr.federation import Federation
from npr.model import ModelSpec

CLASSES = 4
# Site a has every class, b lacks two, c lacks one.
COUNTS = ((6, 12, 4, 5), (8, 7, 0, 0), (0, 5, 6, 4))


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_samples(counts: Sequence[int], seed: int, name: str = "x") -> Samples:
    rng = np.random.default_rng([seed, 7])
    labels = rng.permutation(np.repeat(np.arange(len(counts)), counts)).astype(np.int64)
    images = rng.integers(0, 130, (len(labels), 32, 32, 3)).astype(np.uint8)
    images[..., 0] += (labels * 40).astype(np.uint8)[:, None, None]
    ids = tuple(f"{name}-{seed}-{i}" for i in range(len(labels)))
    return Samples(images=images, labels=labels, ids=ids, units=ids, unit_kind="image", num_classes=len(counts))


def make_dataset(counts: Sequence[Sequence[int]] = COUNTS) -> FederatedDataset:
    sites = tuple(
        SiteData(name=chr(97 + i), train=make_samples(row, i, "train"), test=make_samples((3,) * CLASSES, i, "test"))
        for i, row in enumerate(counts)
    )
    return FederatedDataset(name="toy", class_names=("p", "q", "r", "s"), sites=sites)


def several(samples: Samples) -> Samples:
    """An image of class c has the labels c and c + 1; at a site without classes 2 and 3, label 3 never occurs."""
    labels = np.zeros((len(samples), CLASSES), dtype=np.int64)
    rows = np.arange(len(samples))
    labels[rows, samples.labels] = 1
    labels[rows, (samples.labels + 1) % CLASSES] = 1
    return replace(samples, labels=labels)


def with_several(dataset: FederatedDataset) -> FederatedDataset:
    sites = tuple(replace(site, train=several(site.train), test=several(site.test)) for site in dataset.sites)
    return replace(dataset, sites=sites)


SPEC = ModelSpec(num_classes=CLASSES, architecture="test_efficientnet", image_size=32)


@pytest.fixture
def tiny() -> ModelSpec:
    return SPEC


@pytest.fixture
def toy() -> Callable[..., Federation]:
    """Build a federation: toy("fedavg", counts=..., seed=..., any key of TrainConfig, options={...})."""

    def build(
        method: str,
        *,
        counts: Sequence[Sequence[int]] = COUNTS,
        seed: int = 1,
        spec: ModelSpec = SPEC,
        options: dict[str, Any] | None = None,
        **train: Any,
    ) -> Federation:
        values: dict[str, Any] = {"batch_size": 8, "learning_rate": 1e-3} | train
        config = TrainConfig(method=method, method_options=options or {}, **values)
        return Federation(dataset=make_dataset(counts), spec=spec, config=config, seed=seed)

    return build


@pytest.fixture
def same() -> Callable[[Federation, Federation], bool]:
    """Whether two federations hold bitwise the same numbers wherever they have the same tensors."""

    def compare(first: Federation, second: Federation) -> bool:
        models = [(first.model, second.model)]
        models += [(a.model, b.model) for a, b in zip(first.sites, second.sites, strict=True)]
        for one, other in models:
            left, right = one.state_dict(), other.state_dict()
            if not all(torch.equal(left[name], right[name]) for name in left.keys() & right.keys()):
                return False
        return True

    return compare
