"""Who adds up what the sites send. The learning code only ever sees a sum of vectors and a sum of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from npr.params import Vector
from security.errors import LocalProtocolError

Sum = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What one site puts into the round: a vector, the weight it counts with, and vectors that count once per site."""

    vector: Vector
    weight: int
    extras: Mapping[str, Vector] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.weight < 1:
            raise LocalProtocolError(f"a contribution must weigh 1 or more, not {self.weight}")
        if not np.isfinite(self.vector).all():
            raise LocalProtocolError("a contribution holds values that are not finite")


class Aggregator(Protocol):
    def sum(self, contributions: Sequence[Contribution]) -> tuple[Sum, int]:
        """Return the sum of weight x vector, and the sum of weights."""
        ...


class PlainAggregator:
    """Adds in double precision, in the open: for the lab, never for a wire."""

    def sum(self, contributions: Sequence[Contribution]) -> tuple[Sum, int]:
        total = np.zeros(len(contributions[0].vector), dtype=np.float64)
        for contribution in contributions:
            total += contribution.vector * np.float64(contribution.weight)
        return total, sum(contribution.weight for contribution in contributions)


def sum_extras(aggregator: Aggregator, contributions: Sequence[Contribution]) -> dict[str, Sum]:
    """Every extra vector summed with weight 1, by the same aggregator and so under the same protection."""
    return {
        name: aggregator.sum([Contribution(vector=c.extras[name], weight=1) for c in contributions])[0]
        for name in contributions[0].extras
    }
