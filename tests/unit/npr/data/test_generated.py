"""Generated lesions: the benchmark's counts, patients, looks of the sites, and just hard enough."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from torch import nn

from lazaret.errors import ConfigError
from npr.data.dataset import Samples
from npr.data.generated import FINDINGS, ISIC_SITES, ISIC_TEST, ISIC_TRAIN, GeneratedSpec, generate
from npr.data.loader import Augmentation, Batches
from npr.data.sources import open_catalogue, open_dataset
from npr.metrics import balanced_accuracy


def by_benchmark_order(dataset, side):
    order = [[site.name for site in dataset.sites].index(name) for name in ISIC_SITES]
    return dataset.counts(side)[order]


@pytest.mark.parametrize("scale", [1 / 16, 0.01])
def test_counts_are_the_scaled_counts_of_the_benchmark(scale):
    dataset = open_dataset(f"generated:scale={scale}", fold="fold", image_size=8)
    for side, counts in (("train", ISIC_TRAIN), ("test", ISIC_TEST)):
        expected = np.where(counts > 0, np.maximum(1, np.rint(counts * scale)), 0)
        assert np.array_equal(by_benchmark_order(dataset, side), expected)


def test_full_scale_has_the_counts_of_the_paper():
    train, test = GeneratedSpec(scale=1.0).counts()
    assert np.array_equal(train, ISIC_TRAIN) and np.array_equal(test, ISIC_TEST)


def test_two_labels_that_overlap():
    """The same sites, patients and sides; images of one patient have the same labels, and every combination occurs."""
    plain = open_catalogue("generated:scale=0.03", image_size=8)
    found = open_catalogue("generated:scale=0.03", image_size=8, labels="many")
    assert found.class_names == FINDINGS and found.labels.shape == (len(plain), 2)
    assert (found.units, found.sites, found.splits) == (plain.units, plain.sites, plain.splits)
    assert found.version() != plain.version() and not np.array_equal(found.images, plain.images)
    assert len({(unit, *row) for unit, row in zip(found.units, found.labels.tolist(), strict=True)}) == len(
        set(found.units)
    )
    counts = np.bincount(found.labels @ [2, 1], minlength=4)
    assert (counts > 20).all()
    again = open_catalogue("generated:scale=0.03", image_size=8, labels="many")
    assert np.array_equal(again.images, found.images) and np.array_equal(again.labels, found.labels)


def test_patients_have_several_images_and_stay_on_one_side():
    catalogue = open_catalogue("generated:scale=0.05", image_size=8)
    sizes = np.unique(np.array(catalogue.units), return_counts=True)[1]
    assert set(sizes) == {1, 2, 3, 4} and 1.4 < sizes.mean() < 1.9
    sides: dict[str, set[str]] = {}
    for unit, side in zip(catalogue.units, catalogue.splits["fold"].sides, strict=True):
        sides.setdefault(unit, set()).add(side)
    assert all(len(found) == 1 for found in sides.values())


def test_pictures_of_one_patient_look_more_alike_than_others():
    catalogue = open_catalogue("generated:balanced=30,sites=1", image_size=16)
    mean = catalogue.images.reshape(len(catalogue), -1, 3).mean(axis=1)
    units = np.array(catalogue.units)
    same = [np.abs(mean[i] - mean[i + 1]).sum() for i in range(len(units) - 1) if units[i] == units[i + 1]]
    other = [np.abs(mean[i] - mean[i + 1]).sum() for i in range(len(units) - 1) if units[i] != units[i + 1]]
    assert np.mean(same) < 0.7 * np.mean(other)


def test_each_site_has_its_own_look():
    catalogue = open_catalogue("generated:balanced=12", image_size=16)
    tint = catalogue.images.reshape(len(catalogue), -1, 3).mean(axis=1)
    tint = tint / tint.sum(axis=1, keepdims=True)
    sites = np.array(catalogue.sites)
    centre = {name: tint[sites == name].mean(axis=0) for name in ISIC_SITES}
    hits = [min(centre, key=lambda n: np.abs(centre[n] - t).sum()) == s for t, s in zip(tint, sites, strict=True)]
    assert np.mean(hits) > 2 / 6  # twice chance by the mean colour alone


def test_deterministic_by_seed_and_independent_of_how_it_is_asked_for():
    first, again = (open_catalogue("generated:scale=0.01", image_size=16, seed=3) for _ in range(2))
    assert np.array_equal(first.images, again.images) and first.fingerprint == again.fingerprint
    other = open_catalogue("generated:scale=0.01,seed=4", image_size=16)
    assert first.images.shape != other.images.shape or not np.array_equal(first.images, other.images)
    assert first.fingerprint != other.fingerprint


def test_settings_are_checked():
    for text, message in [
        ("scale=0", "scale"),
        ("sites=7", "sites = 7"),
        ("scale=x", "not a number"),
        ("size=3", "unknown setting"),
        ("balanced=-1", "negative"),
    ]:
        with pytest.raises(ConfigError, match=message):
            open_catalogue(f"generated:{text}", image_size=8)


def test_generation_is_fast():
    started = time.process_time()
    catalogue = generate(GeneratedSpec(), image_size=64)
    assert len(catalogue) > 1400
    assert time.process_time() - started < 10.0  # about 1.5 s on the machine it was written on


@pytest.fixture(scope="module")
def sides():
    dataset = open_dataset("generated:balanced=32", fold="fold", image_size=32)
    merged = []
    for side in ("train", "test"):
        parts = [getattr(site, side) for site in dataset.sites]
        merged.append(
            Samples(
                images=np.concatenate([np.asarray(p.images) for p in parts]),
                labels=np.concatenate([p.labels for p in parts]),
                ids=tuple(i for p in parts for i in p.ids),
                units=tuple(u for p in parts for u in p.units),
                unit_kind="patient",
                num_classes=8,
            )
        )
    return merged


class TestDifficulty:
    """A linear model on pixels must not solve it, a small network must: 1,536 training images, all looks, 32 px."""

    def test_logistic_regression_on_pixels_is_at_most_one_half(self, sides):
        train, test = sides
        flat, flat_test = (s.images.reshape(len(s), -1).astype(np.float32) / 64 - 2 for s in sides)
        reduce = PCA(300, svd_solver="randomized", random_state=0).fit(flat)
        best = 0.0
        for strength in (1e-4, 1e-3, 1e-2):
            model = LogisticRegression(C=strength, max_iter=500).fit(reduce.transform(flat), train.labels)
            scores = model.predict_proba(reduce.transform(flat_test)).astype(np.float32)
            best = max(best, balanced_accuracy(test.labels, scores))
        assert 0.2 < best <= 0.5

    def test_a_small_network_reaches_seven_tenths(self, sides):
        train, test = sides
        torch.manual_seed(0)
        half = (0.5, 0.5, 0.5)
        net, epochs, size = _network(), 10, 64
        optimizer = torch.optim.Adam(net.parameters())
        steps = epochs * len(Batches(train, batch_size=size, mean=half, std=half))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
        flips = Augmentation(rotation=0.0)
        for epoch in range(epochs):
            for batch in Batches(
                train, batch_size=size, mean=half, std=half, augment=flips, shuffle=True, seed=(epoch,)
            ):
                loss = nn.functional.cross_entropy(net(batch.images), batch.labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
        net.eval()
        with torch.no_grad():
            scores = [net(b.images).softmax(dim=1) for b in Batches(test, batch_size=128, mean=half, std=half)]
        assert balanced_accuracy(test.labels, torch.cat(scores).numpy()) >= 0.7


def _network() -> nn.Sequential:
    layers: list[nn.Module] = []
    for wide, narrow in ((3, 16), (16, 32), (32, 64)):
        layers += [
            nn.Conv2d(wide, narrow, 3, padding=1, bias=False),
            nn.BatchNorm2d(narrow),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    layers += [nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 8)).to(
        memory_format=torch.channels_last
    )
