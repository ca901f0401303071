"""The types: what they refuse, what they show, and that subsets point into one pool."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lazaret.errors import DataError
from npr.data.dataset import FederatedDataset, ImageRows, SiteData


def test_counts_and_subset(make_samples):
    samples = make_samples(rows=20)
    some = samples.subset([3, 1, 7])
    assert some.ids == ("i3", "i1", "i7") and some.units == ("u3", "u1", "u7")
    assert np.array_equal(some.images, samples.images[[3, 1, 7]])
    assert samples.class_counts().sum() == 20 and samples.class_counts().dtype == np.int64
    mask = samples.labels == 1
    assert samples.subset(mask).class_counts().tolist() == [0, int(mask.sum()), 0]


def test_rows_of_a_pool_read_like_an_array(make_samples):
    pool = make_samples(rows=30).images
    rows = ImageRows(pool, np.array([5, 9, 2, 28]))
    assert len(rows) == 4 and rows.shape == (4, 8, 8, 3) and rows.ndim == 4 and rows.dtype == np.uint8
    assert np.array_equal(rows[1], pool[9]) and np.array_equal(rows[2:], pool[[2, 28]])
    assert np.array_equal(rows[np.array([3, 0])], pool[[28, 5]])
    assert np.array_equal(rows[1, 2, 3], pool[9, 2, 3]) and np.array_equal(rows[:, ::2], pool[[5, 9, 2, 28]][:, ::2])
    assert np.array_equal(np.asarray(rows), pool[[5, 9, 2, 28]])
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(rows, copy=False)


def test_a_subset_of_pool_rows_copies_no_image(make_samples):
    samples = make_samples(rows=30)
    pool = samples.images
    view = replace(samples, images=ImageRows(pool, np.arange(30)))
    first = view.subset(np.arange(10)).subset([4])
    pool[4] = 77
    assert (first.images[0] == 77).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": np.array([0, 1], dtype=np.int64)}, "do not belong together"),
        ({"labels": np.full(10, 3, dtype=np.int64)}, "outside the 3 classes"),
        ({"labels": np.full(10, -1, dtype=np.int64)}, "outside the 3 classes"),
        ({"labels": np.zeros(10, dtype=np.int32)}, "int64"),
        ({"labels": np.zeros((10, 2), dtype=np.int64)}, "must be 3 zeros or ones"),
        ({"labels": np.full((10, 3), 2, dtype=np.int64)}, "must be 3 zeros or ones"),
        ({"images": np.zeros((10, 8, 8, 3), dtype=np.float32)}, "uint8"),
        ({"images": np.zeros((10, 8, 8, 2), dtype=np.uint8)}, "1 or 3"),
        ({"ids": ("same",) * 10, "units": ("one",) * 10}, "twice"),
        ({"unit_kind": "ward"}, "unknown unit kind"),
    ],
)
def test_refuses_what_does_not_fit(make_samples, change, message):
    with pytest.raises(DataError, match=message):
        replace(make_samples(), **change)


def test_a_printed_sample_names_no_patient(make_samples):
    samples = make_samples()
    site = SiteData(name="a", train=samples, test=samples)
    assert "u1" not in repr(samples) and "i1" not in repr(site)


def test_a_federation_needs_distinct_sites_with_training_images(make_samples):
    samples = make_samples()
    site = SiteData(name="a", train=samples, test=samples)
    names = ("x", "y", "z")
    dataset = FederatedDataset(name="d", class_names=names, sites=(site, replace(site, name="b")))
    assert dataset.counts().shape == (2, 3) and dataset.image_size == 8 and dataset.channels == 3
    assert dataset.site("b").name == "b"
    with pytest.raises(DataError, match="no site 'c'"):
        dataset.site("c")
    with pytest.raises(DataError, match="validation"):
        dataset.counts("validation")
    with pytest.raises(DataError, match="distinct"):
        FederatedDataset(name="d", class_names=names, sites=(site, site))
    with pytest.raises(DataError, match="no training image"):
        FederatedDataset(name="d", class_names=names, sites=(replace(site, train=samples.subset([])),))
    with pytest.raises(DataError, match="class list is empty"):
        FederatedDataset(name="d", class_names=(), sites=(site,))
