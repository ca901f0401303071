"""Metrics against scikit-learn, against brute force, and against what they must do on made-up cases."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from sklearn.metrics import confusion_matrix as sklearn_confusion

from lazaret.errors import DataError
from npr import metrics
from npr.data.dataset import Samples
from npr.metrics import Predictions


def make(rng, rows=300, classes=5, absent=(), levels=None):
    present = [c for c in range(classes) if c not in absent]
    labels = rng.choice(present, size=rows).astype(np.int64)
    logits = rng.normal(size=(rows, classes)) + 1.2 * np.eye(classes)[labels]
    scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    if levels:
        scores = np.round(scores * levels) / levels
    return labels, scores.astype(np.float32)


def predictions(rng, site="a", fold="0", seed=0, rows=200, classes=4, per_unit=2, **kwargs):
    labels, scores = make(rng, rows, classes, **kwargs)
    units = np.arange(rows) // per_unit + 1000 * int(fold)
    return Predictions(
        site=site,
        labels=labels,
        scores=scores,
        units=units,
        ids=np.arange(rows) + 5000 * int(fold),
        fold=fold,
        seed=seed,
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("levels", [None, 8])
def test_agrees_with_scikit_learn(seed, levels):
    labels, scores = make(np.random.default_rng(seed), absent=(2,), levels=levels)
    predicted = scores.argmax(axis=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn warns of predicted classes that are not in the labels
        assert metrics.balanced_accuracy(labels, scores) == pytest.approx(balanced_accuracy_score(labels, predicted))
    aucs = [roc_auc_score(labels == c, scores[:, c]) for c in (0, 1, 3, 4)]
    assert metrics.balanced_auc(labels, scores) == pytest.approx(np.mean(aucs), abs=1e-12)
    assert np.array_equal(
        metrics.confusion_matrix(labels, predicted, 5), sklearn_confusion(labels, predicted, labels=range(5))
    )


class TestSanity24:
    """The properties that balanced accuracy and balanced AUC must have."""

    def test_sanity_24_perfect_prediction_is_one(self):
        labels = np.array([0, 1, 2, 2, 1], dtype=np.int64)
        scores = np.eye(4, dtype=np.float32)[labels]
        assert metrics.balanced_accuracy(labels, scores) == 1.0
        assert metrics.balanced_auc(labels, scores) == 1.0

    def test_sanity_24_constant_prediction_is_chance(self):
        labels = np.array([0, 0, 0, 1, 2], dtype=np.int64)
        constant = np.tile(np.float32([0.7, 0.1, 0.1, 0.1]), (5, 1))
        assert metrics.balanced_accuracy(labels, constant) == pytest.approx(1 / 3)
        assert metrics.balanced_auc(labels, constant) == 0.5
        absent = np.tile(np.float32([0.1, 0.1, 0.1, 0.7]), (5, 1))
        assert metrics.balanced_accuracy(labels, absent) == 0.0

    def test_sanity_24_absent_class_enters_neither_mean(self):
        labels, scores = make(np.random.default_rng(1), classes=4)
        wider = np.concatenate([scores, np.zeros((len(labels), 1), np.float32)], axis=1)
        assert metrics.balanced_accuracy(labels, wider) == metrics.balanced_accuracy(labels, scores)
        assert metrics.balanced_auc(labels, wider) == metrics.balanced_auc(labels, scores)
        assert np.isnan(metrics.recalls(labels, wider)[4]) and np.isnan(metrics.class_aucs(labels, wider)[4])

    def test_sanity_24_auc_is_invariant_to_monotone_transforms(self):
        labels, scores = make(np.random.default_rng(2))
        bent = scores.astype(np.float64) ** 3 * np.array([1, 2, 3, 4, 5]) - 7
        assert np.allclose(metrics.class_aucs(labels, bent), metrics.class_aucs(labels, scores), atol=1e-12)

    def test_sanity_24_auc_counts_pairs_ties_half(self):
        labels, scores = make(np.random.default_rng(3), rows=80, classes=3, levels=5)
        for c, auc in enumerate(metrics.class_aucs(labels, scores)):
            pairs = [
                1.0 if p > n else 0.5 if p == n else 0.0 for p in scores[labels == c, c] for n in scores[labels != c, c]
            ]
            assert auc == pytest.approx(np.mean(pairs), abs=1e-12)


def test_one_class_and_no_image_have_no_auc():
    labels = np.zeros(3, dtype=np.int64)
    assert np.isnan(metrics.balanced_auc(labels, np.full((3, 2), 0.5, np.float32)))
    none = labels[:0], np.empty((0, 2), np.float32)
    for metric in (metrics.balanced_accuracy, metrics.balanced_auc, metrics.expected_calibration_error):
        assert np.isnan(metric(*none))


def test_calibration_by_hand():
    scores = np.float32([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4], [0.4, 0.6]])
    labels = np.array([0, 1, 0, 1], dtype=np.int64)
    # Ten bins: two at 0.9 with accuracy 0.5, two at 0.6 with accuracy 1.
    assert metrics.expected_calibration_error(labels, scores, bins=10) == pytest.approx(0.5 * 0.4 + 0.5 * 0.4, abs=1e-6)
    sure = np.eye(2, dtype=np.float32)[labels]
    assert metrics.expected_calibration_error(labels, sure) == 0.0


def test_pooled_recall_weighs_images_and_site_mean_weighs_sites():
    good = np.eye(2, dtype=np.float32)
    big = Predictions(
        site="big", labels=np.array([0, 0, 0, 1]), scores=good[[0, 0, 0, 1]], units=np.arange(4), ids=np.arange(4)
    )
    small = Predictions(site="small", labels=np.array([0]), scores=good[[1]], units=np.array([9]), ids=np.array([9]))
    assert metrics.pooled_recall([big, small]) == pytest.approx((3 / 4 + 1) / 2)
    assert metrics.site_mean([big, small], metrics.balanced_accuracy) == pytest.approx(0.5)


def test_summary_means_over_sites_then_repetitions():
    rng = np.random.default_rng(5)
    cells = [predictions(rng, site=s, fold=f) for f in ("0", "1") for s in ("a", "b")]
    summary = metrics.summarise(cells)
    by_fold = [
        metrics.site_mean(cells[:2], metrics.balanced_accuracy),
        metrics.site_mean(cells[2:], metrics.balanced_accuracy),
    ]
    assert summary.mean_bacc == pytest.approx(np.mean(by_fold))
    assert summary.sd_bacc == pytest.approx(np.std(by_fold, ddof=1))
    assert summary.images == 800 and set(summary.sites) == {"a", "b"}
    assert summary.pooled_recall == metrics.pooled_recall(cells)
    assert np.sum(summary.confusion) == 800


def test_summary_is_plain_json_with_null_for_unknown():
    labels = np.zeros(3, dtype=np.int64)
    one = Predictions(site="a", labels=labels, scores=np.full((3, 2), 0.5, np.float32), units=labels, ids=np.arange(3))
    plain = metrics.summarise([one]).as_dict()
    assert plain["mean_bauc"] is None and plain["recall_by_class"] == [1.0, None] and plain["sd_bacc"] is None


def test_predictions_round_trip_without_pickle(tmp_path: Path):
    rng = np.random.default_rng(6)
    cells = [predictions(rng, site="a"), predictions(rng, site="b", fold="3", seed=7)]
    file = tmp_path / "cell.npz"
    metrics.save_predictions(file, cells)
    back = metrics.load_predictions(file)
    assert [(p.site, p.fold, p.seed) for p in back] == [("a", "0", 0), ("b", "3", 7)]
    for before, after in zip(cells, back, strict=True):
        for name in ("labels", "scores", "units", "ids"):
            assert np.array_equal(getattr(before, name), getattr(after, name))
    assert [p.name for p in tmp_path.iterdir()] == ["cell.npz"]


def test_predictions_of_samples_carry_codes_and_no_names():
    samples = Samples(
        images=np.zeros((3, 2, 2, 1), np.uint8),
        labels=np.array([0, 1, 1]),
        ids=("i1", "i2", "i3"),
        units=("p1", "p1", "p2"),
        unit_kind="patient",
        num_classes=2,
    )
    made = Predictions.of("a", samples, np.eye(2)[[0, 1, 0]], fold=3, seed=1)
    assert made.units[0] == made.units[1] != made.units[2] and len(set(made.ids.tolist())) == 3
    assert (made.fold, made.seed, made.scores.dtype, len(made)) == ("3", 1, np.float32, 3)
    assert np.array_equal(made.ids, metrics.codes(["i1", "i2", "i3"])) and (made.ids >= 0).all()


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path, monkeypatch):
    cells = [predictions(np.random.default_rng(0))]
    file = tmp_path / "cell.npz"
    metrics.save_predictions(file, cells)
    before = file.read_bytes()

    def full(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr("numpy.savez_compressed", full)
    with pytest.raises(OSError, match="disk full"):
        metrics.save_predictions(file, cells)
    assert file.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["cell.npz"]


@pytest.mark.parametrize("content", [b"", b"not an archive", b"PK\x03\x04 cut off"])
def test_a_damaged_file_is_one_clear_error(tmp_path, content):
    file = tmp_path / "cell.npz"
    file.write_bytes(content)
    with pytest.raises(DataError, match="not a predictions file"):
        metrics.load_predictions(file)
    with pytest.raises(DataError, match="missing"):
        metrics.load_predictions(tmp_path / "none.npz")


def test_predictions_refuse_what_cannot_be_scored():
    labels = np.array([0, 5], dtype=np.int64)
    with pytest.raises(DataError, match="no score column"):
        Predictions(site="a", labels=labels, scores=np.ones((2, 2), np.float32), units=labels, ids=labels)
    with pytest.raises(DataError, match="do not fit"):
        Predictions(site="a", labels=labels, scores=np.ones((3, 6), np.float32), units=labels, ids=labels)
    with pytest.raises(DataError, match="no predictions"):
        metrics.pooled([])
    bad = np.full((2, 6), np.nan, np.float32)
    with pytest.raises(DataError, match="finite"):
        Predictions(site="a", labels=labels, scores=bad, units=labels, ids=labels)
    rng = np.random.default_rng(0)
    with pytest.raises(DataError, match="different numbers of classes"):
        metrics.pooled([predictions(rng, classes=3), predictions(rng, classes=4)])
