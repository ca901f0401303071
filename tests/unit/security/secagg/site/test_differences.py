"""Leverage of sums on one site: worked examples, and a second opinion by brute force."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from lazaret.errors import PolicyViolation
from security.secagg.context import EarlierSum
from security.secagg.records import MAX_SUMS, SumSeen
from security.secagg.site import differences
from security.secagg.site.differences import exposure, leverage, score_exposure
from security.secagg.site.journal import Journal
from tests.support.secagg_world import federation, random_updates

ALL = ("a", "b", "c", "d", "e")


def without(*gone: str) -> tuple[str, ...]:
    return tuple(site for site in ALL if site not in gone)


def test_examples() -> None:
    assert leverage([ALL], "a", c=1) == 0
    assert leverage([ALL, ALL], "a", c=2) == 0
    assert leverage([ALL, without("a")], "a", c=0) == pytest.approx(2**-0.5)
    assert leverage([ALL, without("a", "b")], "a", c=0) == 0, "two at once hide each other"
    assert leverage([ALL, without("a", "b")], "a", c=1) == pytest.approx(2**-0.5), "unless one of them is known"
    assert leverage([ALL, without("a", "b"), without("b")], "a", c=0) > 0.7, "not only neighbours are compared"
    toggled = [ALL, without("a")] * 8
    assert leverage(toggled, "a", c=0) == pytest.approx(2.0), "sixteen sums: the norm has shrunk to a half"
    assert leverage([ALL], "a", c=4) == pytest.approx(1.0), "everybody else is known"
    assert leverage([ALL], "nobody", c=1) == 0


def brute_force(sets: list[tuple[str, ...]], site: str, c: int) -> float:
    others = [name for name in ALL if name != site]
    best = 0.0
    for known in itertools.combinations(others, c):
        rows = np.array([[name in found for found in sets] for name in (site, *others) if name not in known], float)
        target = np.eye(len(rows))[0]
        weights = np.linalg.pinv(rows) @ target
        if np.allclose(rows @ weights, target, atol=1e-8):
            best = max(best, 1 / float(np.linalg.norm(weights)))
    return best


@pytest.mark.parametrize("c", [0, 1, 2])
def test_brute_force_agrees(c: int) -> None:
    generator = np.random.default_rng(c)
    for _ in range(60):
        count = int(generator.integers(1, 6))
        sets = [tuple(name for name in ALL if generator.random() < 0.7) for _ in range(count)]
        assert leverage(sets, "a", c=c) == pytest.approx(brute_force(sets, "a", c), abs=1e-6)


def test_the_window_is_bounded_and_survives_compaction() -> None:
    journal = Journal()
    for number in range(MAX_SUMS + 5):
        journal._count_sum(number, bytes(32), ALL)
    journal._count_sum(MAX_SUMS + 4, bytes(32), ALL)
    assert len(journal.sums) == MAX_SUMS
    assert journal.sums[-1] == SumSeen(round=MAX_SUMS + 4, state_hash=bytes(32), sites=ALL)
    assert Journal.replay(journal.compacted(done_round=0)).sums == journal.sums


def test_a_score_hides_only_among_those_who_consent() -> None:
    policy = federation(5, c=1, scorers=["site-00", "site-01", "site-02"]).policy
    everybody = tuple(entry.site for entry in policy.roster)

    def seen(number: int, *gone: str, model: int | None = None) -> SumSeen:
        state = bytes([number if model is None else model] * 32)
        return SumSeen(round=number, state_hash=state, sites=tuple(site for site in everybody if site not in gone))

    two = [seen(1), seen(2, "site-00", "site-03", "site-04")]
    assert exposure(policy, two, "site-00") == 0 < score_exposure(policy, two, "site-00")
    assert score_exposure(policy, two, "site-03") == 0, "it adds no score"
    hidden = [seen(1), seen(2, "site-00", "site-01", "site-02")]
    assert score_exposure(policy, hidden, "site-00") == 0, "one may be known, and two are left"
    same = [seen(1), seen(2, "site-00", "site-03", "site-04", model=1)]
    assert score_exposure(policy, same, "site-00") == 0, "the second sum on a model has no scores"
    assert score_exposure(policy, [*same, seen(3)], "site-00") == 0, "nor does it take the place of the first"
    first = SumSeen(round=1, state_hash=policy.initial_state_hash, sites=everybody)
    assert score_exposure(policy, [first, two[1]], "site-00") == 0, "nobody scores the initial model"


@pytest.mark.parametrize(("c", "away", "shows"), [(0, 1, True), (0, 2, False), (1, 2, True), (1, 3, False)])
def test_on_one_model_no_set_shows_a_site_to_c_others(c: int, away: int, shows: bool) -> None:
    """All eight sites, and all but some of them: whoever knows c of these has the rest of the difference."""
    run = federation(8, c=c)
    run.begin_round(random_updates(run.policy.layout, run.sites, 1))
    context = run.planned.next_attempt(list(run.sites)).context
    journal = Journal(sums=[SumSeen(round=1, state_hash=context.state_hash, sites=context.sites)])
    sites = context.sites[away:]
    if shows:
        with pytest.raises(PolicyViolation, match="show the update of one site"):
            differences.check_same_state_sums(run.policy, journal, context, sites)
    else:
        differences.check_same_state_sums(run.policy, journal, context, sites)
    elsewhere = Journal(sums=[SumSeen(round=1, state_hash=bytes(32), sites=context.sites)])
    differences.check_same_state_sums(run.policy, elsewhere, context, sites)


def test_invented_sums_do_not_keep_the_right_colluders_from_being_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty sites, nine of which collude. The two sets differ by the victim and by all colluders. Each of the sets
    that the coordinator has invented splits the sites in another way: there are more choices than can be tried."""
    run = federation(30, c=9)
    run.begin_round(random_updates(run.policy.layout, run.sites, 1))
    context = run.planned.next_attempt(list(run.sites)).context
    victim, honest, colluders = context.sites[0], context.sites[1:21], context.sites[21:]
    first, second = (victim, *honest, *colluders[:4]), (*honest, *colluders[4:])
    chosen = random.Random(1)
    invented = [tuple(sorted(chosen.sample(context.sites, 15))) for _ in range(5)]
    told = replace(context, sums=tuple(EarlierSum(round=1, sites=sites) for sites in invented))
    journal = Journal(sums=[SumSeen(round=1, state_hash=context.state_hash, sites=first)])
    for known in (context, told):
        with pytest.raises(PolicyViolation, match="show the update of one site"):
            differences.check_same_state_sums(run.policy, journal, known, second)
    # The twin: by those choices that are tried it would pass.
    monkeypatch.setattr(differences, "all_tried", lambda *_, **__: True)
    differences.check_same_state_sums(run.policy, journal, told, second)


def test_with_few_sums_or_sites_every_choice_of_colluders_is_tried() -> None:
    everybody = [f"{number:02d}" for number in range(100)]
    three = [everybody[:67], everybody[20:90], everybody[33:]]
    assert all(differences.all_tried(three, site, c=33) for site in everybody)
    chosen = random.Random(1)
    for sites, c, tried in ((15, 4, True), (16, 5, False)):
        many = [everybody[:sites], *(chosen.sample(everybody[:sites], sites // 2) for _ in range(20))]
        assert differences.all_tried(many, everybody[0], c=c) is tried
