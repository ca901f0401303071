"""What differences of sums tell of one site (docs/spec/secure-aggregation.md, section 10).

A sum hides a site among the others, but sums over different sets can be combined: all sites minus all but one is that
one. Two tests look at the sets of all sums that a site knows to exist, with the vectors of any c other sites taken as
known. On one and the same model the updates of two rounds differ only by the randomness of training, so that a set
which isolates a site is refused, whoever it is. Over rounds updates differ: there the least-norm combination that
isolates this site says how well the others' changes average out, and an alarm is raised. It is never refused, since one
honest dropout isolates already. Only differential privacy bounds what is learned in this way. A score hides among the
scores of the sites that consent, and among nobody else: it has an alarm of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from lazaret.errors import PolicyViolation
from security.identity.membership import AggregationPolicy
from security.secagg.context import RoundContext
from security.secagg.records import SumSeen
from security.secagg.site.journal import Journal

# The difference of one pair of sums has norm 1.41 and leverage 0.71; the alarm comes before that, at norm 2.
ALARM_LEVERAGE: Final = 0.5
MOST_COMBINATIONS: Final = 2000  # of colluders that are tried; beyond that `leverage` is a lower bound
_EXACT: Final = 1e-6


def leverage(sets: Sequence[Sequence[str]], site: str, *, c: int) -> float:
    """How much of `site` alone a combination of these sums shows: 1 over the norm of the best one, 0 if there is none.

    A combination that isolates the site adds up to 1 at the site and to 0 at all others, except at c sites whose
    vectors an attacker knows. The noise in it, from what changes between rounds, grows with its norm.
    """
    own, groups = _patterns(sets, site)
    if not any(own):
        return 0.0
    best = 0.0
    for known in itertools.islice(_affordable(groups, c), MOST_COMBINATIONS):
        hidden = [pattern for pattern in groups if pattern not in known]
        best = max(best, _isolation(own, hidden))
    return best


def _patterns(sets: Sequence[Sequence[str]], site: str) -> tuple[tuple[bool, ...], dict[tuple[bool, ...], int]]:
    """Which sums a site is in, and how many others are in which."""
    columns = {name: tuple(name in found for found in map(set, sets)) for name in set().union(*sets, {site})}
    own = columns.pop(site)
    groups: dict[tuple[bool, ...], int] = {}
    for pattern in columns.values():
        if any(pattern):
            groups[pattern] = groups.get(pattern, 0) + 1
    return own, groups


def all_tried(sets: Sequence[Sequence[str]], site: str, *, c: int) -> bool:
    """Whether `leverage` looks at every choice of colluders. Always with up to 15 sites, or with up to three sums."""
    _, groups = _patterns(sets, site)
    return next(itertools.islice(_affordable(groups, c), MOST_COMBINATIONS, None), None) is None


def _affordable(groups: dict[tuple[bool, ...], int], c: int) -> Iterator[frozenset[tuple[bool, ...]]]:
    """Every choice of patterns whose sites are at most c in number; sites of one pattern can only be taken together.

    Those with most patterns come first: what a larger choice cannot isolate, a part of it cannot either.
    """
    cheap = sorted((pattern for pattern, count in groups.items() if count <= c), key=lambda pattern: groups[pattern])
    costs = [groups[pattern] for pattern in cheap]
    for size in range(min(c, len(cheap)), -1, -1):
        for chosen in _within(costs, size, c):
            yield frozenset(cheap[place] for place in chosen)


def _within(costs: Sequence[int], size: int, budget: int, first: int = 0) -> Iterator[tuple[int, ...]]:
    """Every choice of `size` places, from `first` on, whose costs are together within the budget; costs ascend.

    It looks into no branch that holds none: whoever chooses cohorts could otherwise keep a site busy for days.
    """
    if size == 0:
        yield ()
        return
    for place in range(first, len(costs) - size + 1):
        if sum(costs[place : place + size]) > budget:
            return  # these are the cheapest that are left
        for rest in _within(costs, size - 1, budget - costs[place], place + 1):
            yield (place, *rest)


def _isolation(own: tuple[bool, ...], hidden: Sequence[tuple[bool, ...]]) -> float:
    if own in hidden:
        return 0.0
    rows = np.array([own, *hidden], dtype=float)
    target = np.zeros(len(rows))
    target[0] = 1.0
    weights = np.linalg.lstsq(rows, target, rcond=None)[0]  # of all solutions, the one of least norm
    if np.abs(rows @ weights - target).max() > _EXACT:
        return 0.0
    return 1.0 / float(np.linalg.norm(weights))


def check_same_state_sums(
    policy: AggregationPolicy, journal: Journal, context: RoundContext, sites: Sequence[str]
) -> None:
    """On one model no two sums whose difference shows the update of one site, with c others known to an attacker."""
    if policy.dp_active:
        return  # the noise that was booked covers every release, whatever it is combined with
    state = context.state_hash
    seen = {(sums.round, sums.sites) for sums in journal.sums if sums.state_hash == state}
    listed = {(sums.round, sums.sites) for sums in context.sums if not journal.set_aside(state, sums.round)}
    # An exact repeat gives the sum of the old attempt again, and nothing else (section 8).
    if not seen | listed or context.repeats:
        return
    # What is only listed may be invented: it counts against the new set, and never as something that is known anyway.
    before = [part for _, found in sorted(seen) for part in policy.parts(found)]
    hidden = [part for _, found in sorted(listed - seen) for part in policy.parts(found)]
    after = [*before, *hidden, *policy.parts(sites)]
    for site in sorted(set(sites).union(*before, *hidden)):
        # Sums that are invented, each of another half of the sites, could keep the right choice from being tried.
        unknown = not all_tried(after, site, c=policy.c)
        if unknown or leverage(after, site, c=policy.c) > leverage(before, site, c=policy.c) + _EXACT:
            raise PolicyViolation(
                "with an earlier sum on the same model this set would show the update of one site",
                where="survivors",
                hint="the round is held again with the same sites, or the operators decide (`site-agent permit`)",
            )


def exposure(policy: AggregationPolicy, sums: Sequence[SumSeen], site: str) -> float:
    """The leverage on a site over the sums of several rounds."""
    return leverage([part for seen in sums for part in policy.parts(seen.sites)], site, c=policy.c)


def score_exposure(policy: AggregationPolicy, sums: Sequence[SumSeen], site: str) -> float:
    """The leverage on a site's score: only sites that consent add to those slots, so only they hide it.

    Of the sums on one model the first has its scores (`journal.score_due`). Nobody scores the initial model.
    """
    if site not in policy.scorers:
        return 0.0
    scored = {seen.state_hash: seen.sites for seen in reversed(sums) if seen.state_hash != policy.initial_state_hash}
    return leverage([sorted(policy.scorers.intersection(sites)) for sites in scored.values()], site, c=policy.c)


def exposures(policy: AggregationPolicy, sums: Sequence[SumSeen], site: str) -> dict[str, float]:
    """Both, by the word for what is shown."""
    return {"update": exposure(policy, sums, site), "score": score_exposure(policy, sums, site)}
