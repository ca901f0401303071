"""Temperature scaling: it finds the temperature that was put in, changes no prediction, and knows when to stay away."""

from __future__ import annotations

import numpy as np
import pytest

from npr import metrics
from npr.metrics import (
    COLDEST,
    HOTTEST,
    LEAST_IMAGES,
    expected_calibration_error,
    fit_temperature,
    helpful_temperature,
    with_temperature,
)


def drawn(rows: int, temperature: float, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Labels drawn from probabilities, and scores that are those probabilities made too sure by `temperature`."""
    rng = np.random.default_rng(seed)
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


def units(rows: int) -> list[str]:
    return [f"patient-{row // 2}" for row in range(rows)]


def test_a_temperature_is_kept_where_it_helps_on_patients_it_was_not_fitted_on() -> None:
    labels, scores = drawn(400, 3.0)
    assert helpful_temperature(labels, scores, units(400)) == fit_temperature(labels, scores)
    assert helpful_temperature(labels, scores, ["one patient"] * 400) is None, "there is no other half"
    assert helpful_temperature(labels[:10], scores[:10], units(10)) is None


@pytest.mark.parametrize("figure", ["cross_entropy", "expected_calibration_error"])
def test_a_temperature_is_not_kept_where_one_of_the_two_figures_does_not_fall(
    figure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels, scores = drawn(400, 3.0)
    monkeypatch.setattr(metrics, figure, lambda *_: 0.5)
    assert helpful_temperature(labels, scores, units(400)) is None


def test_probabilities_that_are_right_are_rarely_made_worse() -> None:
    """Without the held-back images a T is always fitted, and every second one makes new images worse."""
    fresh_labels, fresh = drawn(2000, 1.0, 100)

    def error(temperature: float | None) -> float:
        return expected_calibration_error(fresh_labels, with_temperature(fresh, temperature or 1.0))

    sets = [drawn(60, 1.0, seed) for seed in range(40)]
    fitted = sum(error(fit_temperature(*one)) > error(None) for one in sets)
    kept = sum(error(helpful_temperature(*one, units(60))) > error(None) for one in sets)
    assert fitted >= 20 and kept <= fitted / 3, (fitted, kept)
