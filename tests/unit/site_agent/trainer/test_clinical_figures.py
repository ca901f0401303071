"""What is told of each finding, and of its subgroups."""

from __future__ import annotations

import numpy as np
import pytest

from lazaret.errors import ConfigError
from npr.clinical import OperatingPoint
from npr.data.dataset import Samples
from site_agent.trainer.clinical_figures import Subgroup, check_findings, clinical_figures, finding_lines

POINT = OperatingPoint(rule="youden", threshold=0.5, sensitivity=1.0, specificity=1.0, images=9)


def case() -> tuple[Samples, np.ndarray]:  # type: ignore[type-arg]
    """Four images of three patients, two classes; the second image is wrong."""
    samples = Samples(
        images=np.zeros((4, 2, 2, 1), dtype=np.uint8),
        labels=np.array([1, 1, 0, 0], dtype=np.int64),
        ids=("1", "2", "3", "4"),
        units=("ann", "ann", "bob", "cid"),
        unit_kind="patient",
        num_classes=2,
    )
    second = np.array([0.9, 0.4, 0.3, 0.2])
    return samples, np.stack([1 - second, second], axis=1).astype(np.float32)


def test_a_finding_by_hand() -> None:
    samples, scores = case()
    group = Subgroup("sex", "f", np.array([True, False, True, False]))
    (told,) = clinical_figures(samples, scores, ("no", "yes"), (None, POINT), [group], ("yes",))
    assert (told["name"], told["images"], told["with_finding"]) == ("yes", 4, 2)
    assert (told["units"], told["units_with_finding"]) == (3, 1)
    assert told["counts"] == {"tp": 1, "fp": 0, "tn": 2, "fn": 1}
    assert (told["sensitivity"], told["specificity"], told["ppv"]) == (0.5, 1.0, 1.0)
    assert told["npv"] == pytest.approx(2 / 3) and told["auc"] == told["pr_auc"] == 1.0
    (part,) = told["subgroups"]
    assert (part["column"], part["group"], part["units"], part["sensitivity"]) == ("sex", "f", 2, 1.0)
    assert "calibration" not in part and len(told["decision"]) == 99


def test_without_a_point_or_without_both_kinds_there_is_none() -> None:
    samples, scores = case()
    alone = Subgroup("sex", "m", np.array([False, False, True, True]))
    first, second = clinical_figures(samples, scores, ("no", "yes"), (None, POINT), [alone])
    assert first["sensitivity"] is None and first["counts"] is None and first["auc"] == 1.0
    (part,) = second["subgroups"]
    assert part["sensitivity"] is None and part["specificity"] == 1.0 and part["auc"] is None
    lines = finding_lines({"clinical_side": "test", "clinical": [first, second]})
    assert "sensitivity" not in lines[1] and "sensitivity 0.500" in lines[2] and "from 0.500 on" in lines[2]
    one = samples.subset([0, 1])
    (_, only) = clinical_figures(one, scores[:2], ("no", "yes"), (None, POINT), [])
    assert only["roc"] is None and only["decision"] is None and only["sensitivity"] == 0.5


def test_a_class_that_does_not_exist_is_refused() -> None:
    check_findings(None, ("no", "yes"))
    with pytest.raises(ConfigError, match="'maybe' is no class"):
        check_findings(("yes", "maybe"), ("no", "yes"))
