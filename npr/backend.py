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

    def sum_extra(self, name: str, vectors: Sequence[Vector]) -> Sum:
        """Return the sum of what the sites send beside the model, each counting once."""
        ...


class PlainAggregator:
    """Adds in double precision, in the open: for the lab, never for a wire."""

    def sum(self, contributions: Sequence[Contribution]) -> tuple[Sum, int]:
        total = np.zeros(len(contributions[0].vector), dtype=np.float64)
        for contribution in contributions:
            total += contribution.vector * np.float64(contribution.weight)
        return total, sum(contribution.weight for contribution in contributions)

    def sum_extra(self, name: str, vectors: Sequence[Vector]) -> Sum:
        del name
        total: Sum = np.sum(vectors, axis=0, dtype=np.float64)
        return total


def sum_extras(aggregator: Aggregator, contributions: Sequence[Contribution]) -> dict[str, Sum]:
    """Every extra vector summed by the same aggregator and so under the same protection."""
    names = contributions[0].extras
    return {name: aggregator.sum_extra(name, [c.extras[name] for c in contributions]) for name in names}
