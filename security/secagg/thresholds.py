"""How many sites must agree, and how many must abort (docs/spec/secure-aggregation.md, section 2).

`c` is an absolute number of colluders over the whole roster. It does not shrink with the cohort: otherwise a
coordinator could plan a cohort of its colluders and one other site.
"""

from __future__ import annotations

from dataclasses import dataclass

from lazaret.errors import PolicyViolation

LEAST_SURVIVORS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The sizes of one attempt: cohort `n`, quorum `t`, abort quorum `a`, colluders `c`, least survivors `m`."""

    n: int
    t: int
    a: int
    c: int
    m: int


def default_colluders(roster: int, *, two_sites: bool = False) -> int:
    """Fewer than a third of the roster: then `c` sites that stay away do not stop a round. Of three sites one: their
    quorum is three for c = 0 and for c = 1, so that the stronger promise costs nothing.

    With 5, 8, 11, ... sites one more colluder has the same quorum too, but `c` silent sites would then stop every
    attempt, and no dropout would be tolerated while one site is away; the consortium may choose it.

    :param two_sites: whether cohorts of two are allowed, in which nobody may collude.
    """
    if roster == LEAST_SURVIVORS and not two_sites:
        return 1
    return max(0, -(-roster // 3) - 1)


def free_colluders(roster: int) -> int:
    """The largest c with the quorum of the default: what a roster could promise without a larger quorum."""
    c = default_colluders(roster)
    full = quorum(n=roster, c=c, m=LEAST_SURVIVORS)
    while quorum(n=roster, c=c + 1, m=LEAST_SURVIVORS) == full:
        c += 1
    return c


def most_attempts(c: int) -> int:
    """How often a round is tried: `c` stalling sites cost c + 1 attempts, and two more are for failures (section 8)."""
    return c + 3


def quorum(*, n: int, c: int, m: int) -> int:
    """The least t with 2t > n + c: two quorums then share an honest site, which signs once.

    c + 2 leaves two honest terms in every sum.
    """
    return max((n + c) // 2 + 1, c + 2, m)


def abort_quorum(*, n: int, t: int, c: int) -> int:
    """After this many ABORTs fewer than t RELEASEs can exist, even if c of the signers release all the same."""
    return n + c - t + 1


def derive(*, n: int, c: int, m: int) -> Thresholds:
    """The one legal set of thresholds of a cohort.

    :raises PolicyViolation: if the cohort is too small for `c` and `m`.
    """
    t = quorum(n=n, c=c, m=m)
    if t > n:
        raise PolicyViolation(
            f"a cohort of {n} sites is smaller than its quorum of {t}",
            where="thresholds",
            hint=f"with c = {c} and m = {m} a cohort needs at least {least_cohort(c=c, m=m)} sites",
        )
    return Thresholds(n=n, t=t, a=abort_quorum(n=n, t=t, c=c), c=c, m=m)


def least_cohort(*, c: int, m: int, roster: int | None = None, groups: int = 1) -> int:
    """The smallest legal cohort; with `roster`, the smallest that also excludes two histories.

    :param groups: how many there are whose sums are opened apart; each needs two honest sites (section 10).
    """
    least = max(c + 2, m) * groups
    while quorum(n=least, c=c, m=m) > least:
        least += 1
    return least if roster is None else max(least, single_history_cohort(roster=roster, c=c))


def least_honest(*, roster: int, c: int, m: int, single_history: bool = True) -> int:
    """The least number of honest survivors of a sum, over all cohorts that are allowed.

    With c = 0 a curious site still knows its own part, so at least one survivor never counts.
    """
    cohorts = range(least_cohort(c=c, m=m, roster=roster if single_history else None), roster + 1)
    return min((quorum(n=n, c=c, m=m) for n in cohorts), default=0) - max(c, 1)


def single_history_cohort(*, roster: int, c: int) -> int:
    """Two cohorts of this size share an honest site, so that two histories cannot exist in parallel."""
    return (roster + c) // 2 + 1
