"""Partitions: shares that sum to one, no image lost, no patient at two sites."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazaret.errors import ConfigError
from npr.data.catalogue import Catalogue, PartitionSpec, dirichlet_shares, drop_classes, natural_shares, partition
from npr.data.sources import open_dataset

# The FedNPR paper's Dirichlet concentration for each class of RSNA-ICH, and its chance of dropping a class.
ICH_ALPHA = (0.5, 5.0, 10.0, 30.0, 50.0)
ICH_MISSING = 0.3


def catalogue(rows=600, classes=5, sites=4, seed=0, per_unit=3) -> Catalogue:
    rng = np.random.default_rng(seed)
    units = np.arange(rows) // per_unit
    return Catalogue(
        name="c",
        class_names=tuple("abcde"[:classes]),
        images=np.zeros((rows, 2, 2, 1), np.uint8),
        labels=(units % classes).astype(np.int64),
        ids=tuple(map(str, range(rows))),
        units=tuple(f"u{u}" for u in units),
        unit_kind="patient",
        sites=tuple(f"s{s}" for s in rng.integers(0, sites, rows // per_unit)[units]),
    )


def counts(result: Catalogue):
    names = sorted(set(result.sites))
    table = np.zeros((len(names), len(result.class_names)), int)
    np.add.at(table, ([names.index(s) for s in result.sites], result.labels), 1)
    return table


@given(seed=st.integers(0, 1000), missing=st.sampled_from([0.0, 0.3, 0.8]), alpha=st.sampled_from([1.0, 5.0, 50.0]))
@settings(max_examples=20, deadline=None)
def test_no_image_is_lost_and_no_patient_is_split(seed, missing, alpha):
    before = catalogue()
    after = partition(before, PartitionSpec(kind="dirichlet", sites=3, alpha=(alpha,), missing=missing, seed=seed))
    assert after.ids == before.ids and counts(after).sum() == 600
    assert counts(after).sum(axis=0).tolist() == counts(before).sum(axis=0).tolist()
    home: dict[str, str] = {}
    assert all(home.setdefault(unit, site) == site for unit, site in zip(after.units, after.sites, strict=True))


def test_dirichlet_follows_its_alpha_class_by_class():
    rng = np.random.default_rng(0)
    draws = np.stack([dirichlet_shares(10, 5, ICH_ALPHA, rng) for _ in range(400)])
    assert np.allclose(draws.sum(axis=1), 1.0)
    spread = draws.std(axis=(0, 1))
    expected = [np.sqrt((1 / 10) * (9 / 10) / (10 * a + 1)) for a in ICH_ALPHA]
    assert np.allclose(spread, expected, rtol=0.1)
    with pytest.raises(ConfigError, match="2 alphas for 5 classes"):
        dirichlet_shares(10, 5, (1.0, 2.0), rng)


def test_dealt_counts_follow_the_shares():
    shares = dirichlet_shares(4, 5, (2.0,), np.random.default_rng([7, 3]))
    after = partition(catalogue(), PartitionSpec(kind="dirichlet", sites=4, alpha=(2.0,), seed=7))
    assert np.abs(counts(after) - shares * 120).max() <= 3


def test_missing_classes_go_missing_as_often_as_asked_and_nothing_disappears():
    rng = np.random.default_rng(1)
    shares = dirichlet_shares(10, 5, (5.0,), rng)
    gone = []
    for _ in range(200):
        left = drop_classes(shares, ICH_MISSING, rng)
        assert np.allclose(left.sum(axis=0), 1.0) and (left.sum(axis=1) > 0).all()
        gone.append(np.mean(left == 0))
    # Each class keeps its largest site and each site its best class: about one cell in four is never dropped.
    assert 0.3 * 0.65 < np.mean(gone) < 0.3
    after = partition(
        catalogue(rows=3000), PartitionSpec(kind="dirichlet", sites=10, alpha=(5.0,), missing=0.3, seed=2)
    )
    assert (counts(after) == 0).any() and counts(after).sum() == 3000


def test_natural_sites_are_kept_or_lose_classes():
    before = catalogue()
    assert partition(before, PartitionSpec()) is before
    after = partition(before, PartitionSpec(missing=0.4, seed=3))
    assert set(after.sites) == set(before.sites) and (counts(after) == 0).any() and not (counts(before) == 0).any()
    assert counts(after).sum(axis=0).tolist() == counts(before).sum(axis=0).tolist()
    shares = natural_shares(before, sorted(set(before.sites)))
    assert np.allclose(shares, counts(before) / counts(before).sum(axis=0))


def test_deterministic_by_seed():
    def run(seed):
        return partition(catalogue(), PartitionSpec(kind="dirichlet", sites=5, seed=seed)).sites

    assert run(1) == run(1) != run(2)


def test_parse_and_refuse():
    spec = PartitionSpec.parse("dirichlet:sites=10,alpha=0.5/5/10/30/50,missing=0.3,seed=4")
    assert spec == PartitionSpec(kind="dirichlet", sites=10, alpha=ICH_ALPHA, missing=ICH_MISSING, seed=4)
    assert PartitionSpec.parse("natural") == PartitionSpec()
    for text, message in [
        ("iid", "unknown partition"),
        ("dirichlet:sites=x", "not a number"),
        ("dirichlet:beta=1", "unexpected 'beta=1'"),
        ("dirichlet:sites=2,sites=3", "unexpected"),
        ("dirichlet:alpha=0", "positive alphas"),
        ("natural:missing=1", "not a chance"),
    ]:
        with pytest.raises(ConfigError, match=message):
            PartitionSpec.parse(text)
    with pytest.raises(ConfigError, match="would get no image"):
        partition(catalogue(rows=6), PartitionSpec(kind="dirichlet", sites=10))


def test_through_open_dataset():
    source = "generated:balanced=6,sites=2?partition=dirichlet:sites=3,alpha=5,missing=0.2"
    dataset = open_dataset(source, image_size=8, folds=3)
    assert [site.name for site in dataset.sites] == ["site_01", "site_02", "site_03"]
    assert dataset.counts().sum() + dataset.counts("test").sum() == 2 * 8 * 7
