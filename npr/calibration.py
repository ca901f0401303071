"""Temperature scaling (Guo et al. 2017): one number that makes confidence mean what it says, fitted on held-out images.

It works on probabilities, softmax(log p / T), so that it is the same for heads, prototypes and mixtures of both. The
order of the classes never changes, and a class that was ruled out stays ruled out.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from npr.metrics import Labels, Scores

# Fewer images say more about chance than about the model.
LEAST_IMAGES: Final = 20
# Images that are all predicted right would drive T to zero, and the next mistake would be made with certainty.
COLDEST, HOTTEST = 0.2, 10.0
FLOOR: Final = 1e-30
_STEPS: Final = 50


def fit_temperature(labels: Labels, scores: Scores) -> float | None:
    """The T with the least cross-entropy on these images; None where there are too few of them, or of one class only.

    The loss is convex in 1/T, so its slope has one zero; where that lies outside the bounds, the bound is taken.
    """
    if len(labels) < LEAST_IMAGES or len(np.unique(labels)) < 2:
        return None
    logits = _log(scores)
    if _slope(logits, labels, 1 / COLDEST) <= 0:
        return COLDEST
    if _slope(logits, labels, 1 / HOTTEST) >= 0:
        return HOTTEST
    low, high = 1 / HOTTEST, 1 / COLDEST
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if _slope(logits, labels, middle) > 0 else (middle, high)
    return float(2 / (low + high))


def with_temperature(scores: Scores, temperature: float) -> Scores:
    """softmax(log p / T); zeros stay zeros."""
    if temperature == 1.0:
        return scores
    weights = _softmax(_log(scores) / temperature) * (scores > 0)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True), dtype=np.float32)


def _log(scores: Scores) -> NDArray[np.float64]:
    return np.asarray(np.log(np.maximum(scores.astype(np.float64), FLOOR)))


def _softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _slope(logits: NDArray[np.float64], labels: Labels, inverse: float) -> float:
    """Derivative of the mean cross-entropy by 1/T: the logit expected minus the logit of the true class."""
    expected = (_softmax(logits * inverse) * logits).sum(axis=1)
    return float(np.mean(expected - logits[np.arange(len(labels)), labels]))
