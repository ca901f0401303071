"""Figures of several labels by hand: each label is a question with two answers."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from lazaret.errors import DataError
from npr.bootstrap import bootstrap_auc, bootstrap_interval, paired_difference
from npr.clinical import ClinicalFinding, counts_at
from npr.metrics import (
    Predictions,
    answered,
    balanced_accuracy,
    balanced_auc,
    class_aucs,
    cross_entropy,
    expected_calibration_error,
    helpful_temperature,
    load_predictions,
    recalls,
    save_predictions,
    summarise,
)

# Of the first label two of three images with it are found, and the one without it; of the second, none of one with it,
# and two of three without it. Nobody has the third.
LABELS = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 0], [0, 0, 0]])
SCORES = np.array([[0.9, 0.1, 0.2], [0.5, 0.4, 0.1], [0.2, 0.7, 0.3], [0.4, 0.3, 0.6]], dtype=np.float32)


def test_answers_and_recall() -> None:
    truth, predicted, number = answered(LABELS, SCORES)
    assert number == 6 and truth[:3].tolist() == [1, 2, 4] and predicted[:3].tolist() == [1, 2, 4]
    found = recalls(LABELS, SCORES).tolist()
    assert found[:5] == pytest.approx([1.0, 2 / 3, 2 / 3, 0.0, 3 / 4]) and math.isnan(found[5])
    assert balanced_accuracy(LABELS, SCORES) == pytest.approx((1 + 2 / 3 + 2 / 3 + 0 + 3 / 4) / 5)


def test_it_is_the_figure_of_two_classes_for_one_label() -> None:
    one = LABELS[:, :1], SCORES[:, :1]
    two = LABELS[:, 0], np.stack([1 - SCORES[:, 0], SCORES[:, 0]], axis=1)
    two[1][1] = [0.5 - 1e-3, 0.5 + 1e-3]  # a tie counts as found
    for figure in (balanced_accuracy, expected_calibration_error, cross_entropy):
        assert figure(*one) == pytest.approx(figure(*two), abs=2e-3)
    assert balanced_auc(*one) == pytest.approx(balanced_auc(*two))


def test_areas_are_those_of_each_column() -> None:
    found = class_aucs(LABELS, SCORES)
    assert found[:2] == pytest.approx([roc_auc_score(LABELS[:, n], SCORES[:, n]) for n in (0, 1)])
    assert math.isnan(found[2]) and balanced_auc(LABELS, SCORES) == pytest.approx(found[:2].mean())


def test_loss_and_calibration_by_hand() -> None:
    labels, scores = np.array([[1, 0], [0, 1]]), np.array([[0.8, 0.3], [0.4, 0.9]], dtype=np.float32)
    assert cross_entropy(labels, scores) == pytest.approx(-np.log([0.8, 0.7, 0.6, 0.9]).mean(), abs=1e-6)
    # All four answers are right, with confidences of 0.8, 0.7, 0.6 and 0.9.
    assert expected_calibration_error(labels, scores) == pytest.approx((0.2 + 0.3 + 0.4 + 0.1) / 4, abs=1e-6)
    assert helpful_temperature(np.tile(labels, (20, 1)), np.tile(scores, (20, 1)), list("ab") * 20) is None


def predictions(scores: np.ndarray = SCORES) -> Predictions:
    units = np.array([1, 1, 2, 3])
    return Predictions(site="graz", labels=LABELS, scores=scores, units=units, ids=np.arange(4))


def test_intervals_and_the_summary_have_the_same_figure() -> None:
    ours = [predictions()]
    assert bootstrap_interval(ours, draws=50).value == pytest.approx(balanced_accuracy(LABELS, SCORES))
    assert bootstrap_auc(ours, draws=20).value == pytest.approx(balanced_auc(LABELS, SCORES))
    summary = summarise(ours)
    assert summary.pooled_recall == pytest.approx(balanced_accuracy(LABELS, SCORES))
    matrix = np.array(summary.confusion)
    assert matrix.shape == (6, 6) and matrix.sum() == LABELS.size
    assert matrix[2].tolist() == [0, 0, 2, 1, 0, 0], "a label is confused with no other"
    worse = paired_difference(ours, [predictions(1 - SCORES)], draws=20)
    assert worse.value == pytest.approx(balanced_accuracy(LABELS, SCORES) - balanced_accuracy(LABELS, 1 - SCORES))


def test_predictions_are_kept_and_checked(tmp_path: Path) -> None:
    save_predictions(tmp_path / "p.npz", [predictions()])
    (read,) = load_predictions(tmp_path / "p.npz")
    assert np.array_equal(read.labels, LABELS)
    with pytest.raises(DataError, match="do not fit the scores"):
        predictions(SCORES[:, :2])


def test_a_finding_is_one_label() -> None:
    finding = ClinicalFinding.of(LABELS, SCORES, list("aabc"), 0)
    assert counts_at(finding, 0.5) == {"tp": 2, "fp": 0, "tn": 1, "fn": 1}
