"""The real data sets, where they are at hand: counts, folds and pixels come out of the loaders as published."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from npr.data.catalogue import sides_of
from npr.data.dicom import ICH_CLASSES, read_rsna_split
from npr.data.fed_isic import read_split
from npr.data.generated import ISIC_CLASSES, ISIC_SITES, ISIC_TEST, ISIC_TRAIN
from npr.data.sources import open_catalogue, open_dataset

ROOT = Path(os.environ.get("LAZARET_DATA", "/nonexistent"))
HAM_SITES = ("rosendahl", "vidir_modern", "vidir_molemax", "vienna_dias")
# Lesion-disjoint fold of the npz file, as its description lists it.
LESION_TRAIN = [
    [274, 642, 237, 87, 392, 24, 2, 149],
    [543, 1466, 169, 17, 380, 41, 66, 10],
    [21, 2976, 2, 0, 99, 24, 43, 0],
    [54, 280, 4, 0, 8, 4, 2, 0],
]
LESION_TEST = [
    [68, 161, 59, 22, 98, 6, 1, 37],
    [137, 366, 42, 4, 95, 10, 16, 1],
    [3, 744, 0, 0, 25, 6, 11, 0],
    [13, 70, 1, 0, 2, 0, 1, 0],
]

# Sites x classes of the FedNPR paper's ten-site partition of RSNA-ICH.
ICH_TRAIN = np.array(
    [
        [0, 0, 1112, 2245, 4033],
        [88, 5522, 0, 1926, 0],
        [89, 1122, 2339, 0, 7627],
        [0, 2430, 0, 3574, 2944],
        [132, 518, 0, 930, 1828],
        [269, 0, 0, 1034, 1834],
        [538, 928, 2662, 0, 0],
        [9, 502, 0, 0, 2869],
        [69, 62, 0, 1635, 957],
        [4, 62, 1017, 429, 1033],
    ]
)
ICH_TEST = np.array(
    [
        [0, 0, 278, 561, 1009],
        [22, 1381, 0, 481, 0],
        [22, 281, 585, 0, 1907],
        [0, 608, 0, 893, 736],
        [33, 129, 0, 233, 457],
        [67, 0, 0, 259, 459],
        [135, 232, 666, 0, 0],
        [2, 125, 0, 0, 718],
        [17, 15, 0, 409, 240],
        [1, 15, 255, 108, 258],
    ]
)

pytestmark = pytest.mark.realdata
ham = pytest.mark.skipif(not (ROOT / "ham10000_fed").is_dir(), reason="LAZARET_DATA has no ham10000_fed")
splits = pytest.mark.skipif(not (ROOT / "paper_splits").is_dir(), reason="LAZARET_DATA has no paper_splits")


def counted(rows, sites, classes, side):
    table = np.zeros((len(sites), len(classes)), dtype=np.int64)
    for row in rows:
        if row.side == side:
            table[sites.index(row.site), classes.index(row.label)] += 1
    return table


@splits
def test_sanity_25_counts_of_fed_isic2019_come_out_of_the_loader():
    rows = read_split(ROOT / "paper_splits" / "fed_isic2019_train_test_split.csv.gz", Path("images"))
    assert len(rows) == len({row.id for row in rows}) == 23_247
    assert np.array_equal(counted(rows, ISIC_SITES, ISIC_CLASSES, "train"), ISIC_TRAIN)
    assert np.array_equal(counted(rows, ISIC_SITES, ISIC_CLASSES, "test"), ISIC_TEST)


@splits
def test_sanity_25_counts_of_rsna_ich_come_out_of_the_loader():
    rows = read_rsna_split(ROOT / "paper_splits" / "rsna_ich_split_10clients.npz", Path("images"))
    sites = tuple(f"client_{number:02d}" for number in range(10))
    assert len(rows) == len({row.id for row in rows}) == 67_969
    assert np.array_equal(counted(rows, sites, ICH_CLASSES, "train"), ICH_TRAIN)
    assert np.array_equal(counted(rows, sites, ICH_CLASSES, "test"), ICH_TEST)


@ham
class TestHam10000:
    # Eight pixels are enough here: the tests are about rows.
    SIZE = 8

    def test_sanity_25_counts_of_the_benchmark_fold(self):
        dataset = open_dataset("ham10000", fold="fold", image_size=self.SIZE)
        rows = [ISIC_SITES.index(name) for name in HAM_SITES]
        assert tuple(site.name for site in dataset.sites) == HAM_SITES and dataset.class_names == ISIC_CLASSES
        assert np.array_equal(dataset.counts(), ISIC_TRAIN[rows])
        assert np.array_equal(dataset.counts("test"), ISIC_TEST[rows])

    def test_sanity_25_counts_of_the_lesion_fold(self):
        dataset = open_dataset("ham10000", fold="fold_lesion", image_size=self.SIZE)
        assert dataset.counts().tolist() == LESION_TRAIN and dataset.counts("test").tolist() == LESION_TEST

    def test_the_benchmark_fold_leaks_lesions_and_ours_do_not(self):
        catalogue = open_catalogue("ham10000", image_size=self.SIZE)

        def leaks(fold):
            sides: dict[str, set[str]] = {}
            for unit, side in zip(catalogue.units, sides_of(catalogue, fold), strict=True):
                sides.setdefault(unit, set()).add(side)
            return sum(len(found) > 1 for found in sides.values())

        assert leaks("fold") == 696
        assert [leaks(fold) for fold in ("fold_lesion", 0, 1, 2, 3, 4)] == [0] * 6

    def test_five_folds_cover_every_image_once_and_keep_the_proportions(self):
        tables = [open_dataset("ham10000", fold=k, image_size=self.SIZE).counts("test") for k in range(5)]
        total = np.sum(tables, axis=0)
        rows = [ISIC_SITES.index(name) for name in HAM_SITES]
        assert np.array_equal(total, (ISIC_TRAIN + ISIC_TEST)[rows])
        for table in tables:
            # A lesion has up to six images, so that a stratum can miss its fifth by a few.
            assert np.abs(table - total / 5).max() <= 6

    def test_pixels_are_those_of_the_file(self):
        import io

        from PIL import Image

        file = next((ROOT / "ham10000_fed").glob("*.npz"))
        with np.load(file, allow_pickle=False) as archive:
            data, offsets = archive["jpeg"], archive["offsets"]
        catalogue = open_catalogue("ham10000", image_size=self.SIZE)
        for row in (0, 5000, 10_014):
            image = Image.open(io.BytesIO(data[offsets[row] : offsets[row + 1]].tobytes())).convert("RGB")
            expected = np.asarray(image.resize((self.SIZE, self.SIZE), Image.Resampling.BILINEAR))
            assert np.array_equal(catalogue.images[row], expected)
