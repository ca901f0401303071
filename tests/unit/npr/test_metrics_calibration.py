"""Temperature scaling: it finds the temperature that was put in, changes no prediction, and knows when to stay away."""

from __future__ import annotations

import numpy as np
import pytest

from npr.metrics import COLDEST, HOTTEST, LEAST_IMAGES, expected_calibration_error, fit_temperature, with_temperature


def drawn(rows: int, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Labels drawn from probabilities, and scores that are those probabilities made too sure by `temperature`."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(rows, 5)) * 1.5
    true = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = np.array([rng.choice(5, p=row) for row in true])
    sure = np.exp(logits * temperature)
    return labels, (sure / sure.sum(1, keepdims=True)).astype(np.float32)


def cross_entropy(labels: np.ndarray, scores: np.ndarray) -> float:
    return float(-np.log(scores[np.arange(len(labels)), labels]).mean())


def test_the_temperature_that_was_put_in_comes_out() -> None:
    labels, scores = drawn(20_000, 3.0)
    assert fit_temperature(labels, scores) == pytest.approx(3.0, rel=0.03)


def test_no_other_temperature_has_less_loss() -> None:
    labels, scores = drawn(300, 2.0)
    found = fit_temperature(labels, scores)
    assert found is not None
    best = cross_entropy(labels, with_temperature(scores, found))
    others = [cross_entropy(labels, with_temperature(scores, t)) for t in np.linspace(0.5, 8, 200)]
    assert best <= min(others) + 1e-6


def test_it_calibrates_and_changes_no_prediction() -> None:
    labels, scores = drawn(4000, 3.0)
    found = fit_temperature(labels[:2000], scores[:2000])
    assert found is not None
    after = with_temperature(scores[2000:], found)
    before = expected_calibration_error(labels[2000:], scores[2000:])
    assert expected_calibration_error(labels[2000:], after) < before / 3
    assert np.array_equal(after.argmax(1), scores[2000:].argmax(1))
    assert after.sum(1) == pytest.approx(np.ones(2000), abs=1e-6)


def test_a_class_that_was_ruled_out_stays_out() -> None:
    scores = np.array([[0.7, 0.3, 0.0]], dtype=np.float32)
    assert with_temperature(scores, 10.0)[0, 2] == 0.0


def test_too_few_images_or_classes_fit_nothing() -> None:
    labels, scores = drawn(LEAST_IMAGES - 1, 2.0)
    assert fit_temperature(labels, scores) is None
    assert fit_temperature(np.zeros(100, dtype=np.int64), np.full((100, 5), 0.2, dtype=np.float32)) is None


def test_perfect_and_hopeless_predictions_stop_at_the_bounds() -> None:
    labels = np.arange(40) % 2
    right = np.where(labels[:, None] == np.arange(2), 0.9, 0.1).astype(np.float32)
    assert fit_temperature(labels, right) == COLDEST
    assert fit_temperature(labels, right[:, ::-1].copy()) == HOTTEST
