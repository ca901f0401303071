"""Figures of an evaluation, made by the functions that make them in earnest, from drawn probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np

from npr.clinical import ClinicalFinding, choose_operating_point
from npr.data.dataset import Samples
from site_agent.trainer.clinical_figures import Subgroup, clinical_figures
from site_agent.trainer.evaluation import side_figures

HOSTILE = "<img src=x onerror='window.ran=1'><script>window.ran=1</script>"
NAMES = ("melanoma", HOSTILE, "nevus")


def drawn_samples(count: int, seed: int) -> tuple[Samples, np.ndarray[Any, np.dtype[np.float32]]]:
    """Images of one grey value, two of each patient, and probabilities that are right more often than not."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, len(NAMES), count)
    logits = rng.normal(size=(count, len(NAMES))) + 1.6 * np.eye(len(NAMES))[labels]
    scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    samples = Samples(
        images=np.zeros((count, 4, 4, 1), dtype=np.uint8),
        labels=labels.astype(np.int64),
        ids=tuple(f"{number}.png" for number in range(count)),
        units=tuple(f"patient {number // 2}" for number in range(count)),
        unit_kind="patient",
        num_classes=len(NAMES),
    )
    return samples, scores.astype(np.float32)


def drawn_figures(*, private: bool = False, count: int = 160) -> dict[str, Any]:
    """As `site-agent evaluate` gives them, with two subgroups, one of them small."""
    held, held_scores = drawn_samples(120, 1)
    samples, scores = drawn_samples(count, 2)
    points = [
        choose_operating_point(ClinicalFinding.of(held.labels, held_scores, held.units, place))
        for place in range(len(NAMES))
    ]
    few = np.arange(count) < 8
    groups = [Subgroup("sex", HOSTILE, ~few), Subgroup("sex", "not recorded", few)]
    return {
        "site": "graz",
        "model": "best",
        "round": 3,
        "kind": "personal",
        "model_sha256": "ab" * 32,
        "class_names": list(NAMES),
        "labels": "one",
        "temperature": None,
        "temperature_images": 120,
        "private": private,
        "training_images": 400,
        "alone": None,
        "validation": side_figures("graz", held, held_scores, None),
        "test": side_figures("graz", samples, scores, None),
        "operating_rule": "youden",
        "clinical_side": "test",
        "clinical": clinical_figures(samples, scores, NAMES, points, groups),
    }
