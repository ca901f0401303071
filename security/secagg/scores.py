"""Scores of sites on their own validation sides: as slots of the secure sum, and which round is best by them.

A score is a whole number of 64ths, so that fine fractions do not tell how many images a site has of a class. Sites that
consent, by a list in the manifest, add their score, its square and a one; all others add zeros. Nobody sees a score
alone: the slots exist only where every sum that can be opened holds enough consenting sites (`score_slots`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from lazaret.errors import DataError
from security.secagg import thresholds
from security.secagg.layout import SCORE, SCORE_GRID, SCORED, SQUARES

WORST_LOSS: Final = 4
"""A mean cross-entropy from here on has the score 0; a loss of 0 has the score 1."""
# Unknown sites in the sum of scores, and where squares travel beside it: with two of them, both sums solve exactly.
LEAST_UNKNOWN: Final = 3
LEAST_UNKNOWN_SPREAD: Final = 4


def on_grid(figure: float, kind: str = "bacc") -> int:
    """A figure of a validation side in 64ths; a loss as the share of `WORST_LOSS` that is not lost.

    :raises DataError: if it is out of range.
    """
    if not math.isfinite(figure) or figure < 0 or (kind != "loss" and figure > 1):
        raise DataError(f"a score of {figure:.6g} is out of range; nothing was sent", where="slot score")
    share = 1 - min(Fraction(figure), Fraction(WORST_LOSS)) / WORST_LOSS if kind == "loss" else Fraction(figure)
    return round(share * SCORE_GRID)


def least_scored(*, roster: int, consenting: int, c: int, m: int) -> int:
    """Consenting sites that every sum holds: over all cohorts that are allowed, less all dropouts that are.

    A coordinator may choose a cohort without some of them, and as many may drop out as the quorum lets.
    """
    cohorts = range(thresholds.least_cohort(c=c, m=m, roster=roster), roster + 1)
    least = min((thresholds.quorum(n=n, c=c, m=m) for n in cohorts), default=0)
    return max(0, least - (roster - consenting))


def score_slots(
    *, roster: int, consenting: int, c: int, m: int, single_history: bool, groups: bool, private: bool
) -> tuple[str, ...]:
    """The slots that may exist. None under differential privacy, where each score would be a release; nor where sums
    of groups are opened apart, nor where two histories could be compared."""
    if private or groups or not single_history:
        return ()
    # With c = 0 a curious site still knows its own part.
    unknown = least_scored(roster=roster, consenting=consenting, c=c, m=m) - max(c, 1)
    if unknown < LEAST_UNKNOWN:
        return ()
    return (SCORED, SCORE, SQUARES) if unknown >= LEAST_UNKNOWN_SPREAD else (SCORED, SCORE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreSum:
    """What a sum tells of its consenting sites, in 64ths; `squares` is None where there are too few for a spread."""

    count: int
    total: int
    squares: int | None

    @property
    def mean(self) -> Fraction:
        return Fraction(self.total, self.count * SCORE_GRID)

    @property
    def spread(self) -> float | None:
        """The standard deviation over the sites."""
        if self.squares is None:
            return None
        return math.sqrt(Fraction(self.squares, self.count * SCORE_GRID**2) - self.mean**2)


def fault_in(count: int, total: int, squares: int | None, *, survivors: int) -> str:
    """Why the sums are not those of honest sites, or an empty string. Exact, the same at every site."""
    if not 0 <= count <= survivors:
        return "the number of scores is out of range"
    if not 0 <= total <= count * SCORE_GRID:
        return "the sum of scores is out of range"
    # Each square is at most 64 times its score; and by Cauchy and Schwarz.
    if squares is not None and not (total * total <= count * squares and squares <= SCORE_GRID * total):
        return "the sum of squared scores does not fit the sum of scores"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestRound:
    """The best model so far by the rule of the manifest.

    :ivar since: scored models after it that were not better.
    """

    round: int
    mean: Fraction
    since: int

    def ends(self, patience: int) -> bool:
        """Whether the run ends early; 0 never ends it."""
        return 0 < patience <= self.since


def best_of(scored: Iterable[tuple[int, Fraction]], *, least_gain: Fraction) -> BestRound | None:
    """The newest model that was better than the best before it, by at least `least_gain`.

    :param scored: rounds that gave a model, with its mean score, in order.
    """
    best: BestRound | None = None
    for number, mean in scored:
        if best is None or (mean > best.mean and mean >= best.mean + least_gain):
            best = BestRound(round=number, mean=mean, since=0)
        else:
            best = BestRound(round=best.round, mean=best.mean, since=best.since + 1)
    return best
