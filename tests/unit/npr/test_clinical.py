"""Every formula by hand, and against scikit-learn where it has the function."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from lazaret.errors import ConfigError
from npr import clinical
from npr.clinical import ClinicalFinding

# Eight images of eight patients; three have the finding.
PROBABILITY = [0.9, 0.8, 0.7, 0.6, 0.4, 0.3, 0.2, 0.1]
TRUTH = [True, False, True, False, True, False, False, False]


def finding(truth: list[bool] = TRUTH, probability: list[float] = PROBABILITY, units: object = None) -> ClinicalFinding:
    numbers = range(len(truth)) if units is None else units
    return ClinicalFinding(np.array(truth), np.array(probability), np.array(numbers, dtype=np.int64))  # type: ignore[arg-type]


def test_one_class_against_all_others() -> None:
    scores = np.array([[0.2, 0.8], [0.7, 0.3], [0.5, 0.5]], dtype=np.float32)
    made = ClinicalFinding.of(np.array([1, 0, 1]), scores, ("b", "a", "b"), 1)
    assert made.truth.tolist() == [True, False, True] and made.units.tolist() == [1, 0, 1]
    assert made.probability == pytest.approx([0.8, 0.3, 0.5])
    part = made.only(np.array([True, False, True]))
    assert part.units.tolist() == [0, 0] and not part.both and made.both
    assert (made.patients(True), made.patients(False)) == (1, 1)


def test_rates_by_hand() -> None:
    """At 0.5: called are 0.9 (right), 0.8 (wrong), 0.7 (right), 0.6 (wrong); missed is 0.4."""
    made = finding()
    assert clinical.counts_at(made, 0.5) == {"tp": 2, "fp": 2, "tn": 3, "fn": 1}
    rates = clinical.rates_at(made, 0.5)
    assert rates["sensitivity"] == pytest.approx(2 / 3) and rates["specificity"] == pytest.approx(3 / 5)
    assert rates["ppv"] == pytest.approx(2 / 4) and rates["npv"] == pytest.approx(3 / 4)
    for name in clinical.RATES:
        low, high = rates[f"{name}_interval"]
        assert 0 <= low <= rates[name] <= high <= 1
    nobody = clinical.rates_at(made, 0.95)
    assert nobody["sensitivity"] == 0 and nobody["ppv"] is None and nobody["ppv_interval"] is None


def test_an_image_at_the_threshold_is_called() -> None:
    assert clinical.counts_at(finding(), 0.9)["tp"] == 1 and clinical.counts_at(finding(), 0.9001)["tp"] == 0


def test_areas_by_hand() -> None:
    """Of the 15 pairs of an image with and one without, 4 + 5 + 3 stand right; average precision is the mean of the
    precision at each image with the finding: (1/1 + 2/3 + 3/5) / 3."""
    areas = clinical.areas_of(finding())
    assert areas["auc"] == pytest.approx(12 / 15)
    assert areas["pr_auc"] == pytest.approx((1 + 2 / 3 + 3 / 5) / 3)
    squares = [(p - t) ** 2 for p, t in zip(PROBABILITY, TRUTH, strict=True)]
    assert areas["brier"] == pytest.approx(sum(squares) / 8)
    for name in ("auc", "pr_auc"):
        low, high = areas[f"{name}_interval"]
        assert low <= areas[name] <= high
    alone = clinical.areas_of(finding([True, True], [0.2, 0.4]))
    assert alone["auc"] is None and alone["pr_auc_interval"] is None and alone["brier"] == pytest.approx(0.5)


def test_areas_of_a_draw_are_those_of_scikit_learn() -> None:
    """With ties, and with images that were drawn several times or not at all."""
    rng = np.random.default_rng(3)
    truth, probability = rng.random(60) < 0.3, rng.integers(0, 12, 60) / 12
    made = ClinicalFinding(truth, probability, np.arange(60))
    weights = rng.integers(0, 4, (25, 60)).astype(np.float64)
    for row, (roc, precision) in zip(weights, clinical.weighted_areas(made)(weights), strict=True):
        assert roc == pytest.approx(roc_auc_score(truth, probability, sample_weight=row))
        assert precision == pytest.approx(average_precision_score(truth, probability, sample_weight=row))
    empty = clinical.weighted_areas(made)(np.where(truth, 0.0, 1.0)[None])
    assert np.isnan(empty).all(), "a draw without the finding has neither area"


def test_patients_are_drawn_and_not_images() -> None:
    """Fifty images of one patient say no more than one: with two patients, one always right and one always wrong, a
    draw has both, or one of them twice. By images the interval would be narrow."""
    truth, probability = [True] * 100, [0.9] * 50 + [0.1] * 50
    by_patient = clinical.rates_at(finding(truth, probability, [0] * 50 + [1] * 50), 0.5)
    by_image = clinical.rates_at(finding(truth, probability), 0.5)
    assert by_patient["sensitivity_interval"] == (0.0, 1.0)
    low, high = by_image["sensitivity_interval"]
    assert 0.3 < low < 0.5 < high < 0.7


def test_many_images_are_drawn_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = clinical.rates_at(finding(), 0.5, draws=50)
    monkeypatch.setattr(clinical, "_CHUNK", 24)
    assert clinical.rates_at(finding(), 0.5, draws=50) == whole


def test_operating_points_by_hand() -> None:
    """Sensitivity and 1 - specificity down the list: (1/3, 0), (1/3, 1/5), (2/3, 1/5), (2/3, 2/5), (1, 2/5), ..."""
    youden = clinical.choose_operating_point(finding())
    assert youden is not None and youden.threshold == pytest.approx((0.4 + 0.3) / 2)
    assert (youden.sensitivity, youden.specificity) == (1.0, pytest.approx(3 / 5))
    sensitive = clinical.choose_operating_point(finding(), "sensitivity=0.5")
    assert sensitive is not None and sensitive.threshold == pytest.approx(0.65)
    assert (sensitive.sensitivity, sensitive.specificity) == (pytest.approx(2 / 3), pytest.approx(4 / 5))
    specific = clinical.choose_operating_point(finding(), "specificity=0.8")
    assert specific is not None and specific.threshold == pytest.approx(0.65)
    strict = clinical.choose_operating_point(finding(), "specificity=0.9")
    assert strict is not None and strict.sensitivity == pytest.approx(1 / 3)
    assert strict.to_json() | {"threshold": 0, "sensitivity": 0} == {
        "rule": "specificity=0.9", "threshold": 0, "sensitivity": 0, "specificity": 1.0, "images": 8,
    }  # fmt: skip


def test_the_figures_at_a_point_are_those_it_was_chosen_for() -> None:
    point = clinical.choose_operating_point(finding())
    assert point is not None
    rates = clinical.rates_at(finding(), point.threshold)
    assert (rates["sensitivity"], rates["specificity"]) == (point.sensitivity, pytest.approx(point.specificity))


def test_where_no_point_is_chosen() -> None:
    few = finding(units=[0, 1, 0, 3, 0, 5, 6, 7])
    assert clinical.choose_operating_point(few) is None, "three images of one patient are one patient"
    worst = finding([False, False, False, True, True, True], [0.9, 0.8, 0.7, 0.3, 0.2, 0.1])
    assert clinical.choose_operating_point(worst, "specificity=0.9") is None
    with pytest.raises(ConfigError, match="unknown"):
        clinical.choose_operating_point(finding(), "best")


def test_calibration_by_hand() -> None:
    made = finding([True, False, True, True], [0.05, 0.08, 0.95, 0.91])
    low, high = clinical.calibration_points(made)
    assert low == {"predicted": pytest.approx(0.065), "observed": 0.5, "images": 2}
    assert high == {"predicted": pytest.approx(0.93), "observed": 1.0, "images": 2}


def test_a_probability_on_an_edge_is_counted_where_scikit_learn_puts_it() -> None:
    made = finding([True, False, True, False], [0.1, 0.2, 0.0, 1.0])
    assert [point["images"] for point in clinical.calibration_points(made)] == [2, 1, 1]


def test_net_benefit_by_hand() -> None:
    """At 20 %: called are the first seven, 3 right and 4 wrong; a wrong one costs 0.25."""
    points = {point["threshold"]: point for point in clinical.decision_points(finding())}
    assert points[0.2]["model"] == pytest.approx((3 - 4 * 0.25) / 8)
    assert points[0.2]["all"] == pytest.approx(3 / 8 - 5 / 8 * 0.25)
    assert points[0.95]["model"] == 0.0, "who is never called has no benefit and no harm"
    assert len(points) == 99


def test_curves_begin_and_end_at_their_corners() -> None:
    roc = clinical.roc_points(finding())
    assert roc[0] == [0.0, 0.0] and roc[-1] == [1.0, 1.0]
    precision = clinical.precision_points(finding())
    assert precision[0] == [0.0, 1.0] and precision[-1] == [1.0, pytest.approx(3 / 8)]
    rng = np.random.default_rng(1)
    many = ClinicalFinding(rng.random(5000) < 0.4, rng.random(5000), np.arange(5000))
    assert len(clinical.roc_points(many)) == clinical.POINTS
