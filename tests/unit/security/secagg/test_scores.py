"""Scores on their grid, in the sum, and the best round by them: by hand, by brute force and through a real sum."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest

from lazaret.errors import ConfigError, DataError, LocalProtocolError
from security.crypto.prg import Words
from security.secagg import fixed_point, thresholds
from security.secagg import state as states
from security.secagg.layout import SCORE, SCORED, SQUARES, Block, Layout
from security.secagg.scores import BestRound, ScoreSum, best_of, fault_in, least_scored, on_grid, score_slots
from tests.support.secagg_world import federation

ALL = (SCORED, SCORE, SQUARES)


def layout(sites: int, slots: tuple[str, ...] = ALL, ring_bits: int = 24) -> Layout:
    block = Block(name="stem", shape=(8,), kind="mean", clip_exponent=0, movement_exponent=20)
    return Layout.of([block], roster_size=sites, weight_cap=64, ring_bits=ring_bits, scores=slots)


def encoded(where: Layout, score: int | None, step: float = 0.0) -> Words:
    return fixed_point.encode(where, np.full(8, step, dtype=np.float32), weight=3, score=score).words


def test_a_score_is_a_whole_number_of_64ths() -> None:
    assert [on_grid(value) for value in (0.0, 0.5, 1.0, 0.7, 2 / 3)] == [0, 32, 64, 45, 43]
    # One image more or less in a class of 200 is not seen.
    assert on_grid(150 / 200) == on_grid(151 / 200)
    assert [on_grid(value, "loss") for value in (0.0, 1.0, 4.0, 50.0)] == [64, 48, 0, 0]
    for wrong in (-0.01, 1.01, float("nan"), float("inf")):
        with pytest.raises(DataError, match="out of range"):
            on_grid(wrong, "auc")


@pytest.mark.parametrize(("roster", "c", "m"), [(5, 1, 3), (6, 1, 4), (7, 2, 3), (8, 1, 5)])
def test_the_fewest_consenting_sites_of_a_sum_by_brute_force(roster: int, c: int, m: int) -> None:
    """Over every cohort that is allowed, and every set of survivors that its quorum allows."""
    cohorts = range(thresholds.least_cohort(c=c, m=m, roster=roster), roster + 1)
    for consenting in range(roster + 1):
        yes, least = set(range(consenting)), roster
        for size in cohorts:
            quorum = thresholds.derive(n=size, c=c, m=m).t
            for cohort in itertools.combinations(range(roster), size):
                least = min([least, *(len(yes & set(s)) for s in itertools.combinations(cohort, quorum))])
        assert least_scored(roster=roster, consenting=consenting, c=c, m=m) == least


def test_slots_exist_only_where_enough_sites_consent() -> None:
    """Six sites that must all be in the sum, c = 1: three unknown scores for a mean, four for a spread."""
    rule = {"roster": 6, "c": 1, "m": 6, "single_history": True, "groups": False, "private": False}
    found = [score_slots(consenting=count, **rule) for count in range(7)]
    assert found == [(), (), (), (), (SCORED, SCORE), ALL, ALL]
    for off in ({"private": True}, {"groups": True}, {"single_history": False}):
        assert score_slots(consenting=6, **(rule | off)) == ()
    # A curious site knows its own score although nobody colludes.
    alone = rule | {"roster": 4, "c": 0, "m": 4}
    assert score_slots(consenting=3, **alone) == () and score_slots(consenting=4, **alone) == (SCORED, SCORE)


def test_a_layout_has_these_slots_and_no_others() -> None:
    assert layout(5, ()).has(SCORE) is False and layout(5, (SCORED, SCORE)).has(SQUARES) is False
    good = layout(5)
    assert Layout.from_dict(good.to_dict()) == good and good.block(SQUARES).maximum == 64 * 64
    for blocks in (
        (*layout(5, ()).blocks, Block(name=SCORE, shape=(1,), kind="count", maximum=64)),
        (*layout(5, ()).blocks, *(Block(name=n, shape=(1,), kind="count", maximum=64) for n in (SCORED, SCORE))),
        (*layout(5, ()).blocks, Block(name="score-of-melanoma", shape=(1,), kind="count", maximum=64)),
    ):
        with pytest.raises(ConfigError):
            Layout(blocks=blocks, roster_size=5, weight_cap=64)


def test_a_site_without_consent_adds_zeros_and_is_not_counted() -> None:
    where = layout(3)
    total = encoded(where, 40) + encoded(where, None) + encoded(where, 50)
    assert fixed_point.decode_scores(where, total) == ScoreSum(count=2, total=90, squares=1600 + 2500)
    assert fixed_point.decode_scores(where, encoded(where, None)) is None
    assert fixed_point.decode_scores(layout(3, ()), encoded(layout(3, ()), None)) is None
    for wrong in (-1, 65):
        with pytest.raises(DataError, match=r"not in 0\.\.64"):
            encoded(where, wrong)
    with pytest.raises(LocalProtocolError, match="no slot"):
        encoded(layout(3, ()), 3)


@pytest.mark.parametrize("ring_bits", [24, 32])
def test_mean_and_spread_of_the_masked_sum_are_those_of_the_plain_scores(ring_bits: int) -> None:
    """Bit for bit, over a real aggregation with a site that does not consent and one that drops out; and so is the
    best round."""
    where, rng = layout(7, ring_bits=ring_bits), np.random.default_rng(5)
    run = federation(7, layout=where)
    masked, plain = [], []
    for number in range(1, 5):
        scores = {site: None if site == "site-06" else int(rng.integers(0, 65)) for site in run.sites}
        updates = {site: encoded(where, score, number / 100) for site, score in scores.items()}
        updates.pop("site-05" if number == 2 else "none", None)
        published = run.run_round(updates)
        found = fixed_point.decode_scores(where, published.total)
        given = [scores[site] for site in published.survivors if scores[site] is not None]
        assert len(given) == (5 if number == 2 else 6)
        squares = sum(score * score for score in given)  # type: ignore[operator,misc]
        assert found == ScoreSum(count=len(given), total=sum(given), squares=squares)  # type: ignore[arg-type]
        masked.append((number, found.mean))
        plain.append((number, Fraction(sum(given), 64 * len(given))))  # type: ignore[arg-type]
        assert found.spread == pytest.approx(float(np.std(np.array(given, dtype=float) / 64)))
    assert masked == plain
    assert best_of(masked, least_gain=Fraction(0)) == best_of(plain, least_gain=Fraction(0))


def test_every_sum_of_honest_sites_is_in_range() -> None:
    rng = np.random.default_rng(2)
    for _ in range(300):
        given = rng.integers(0, 65, int(rng.integers(0, 9)))
        total, squares = int(given.sum()), int((given**2).sum())
        assert fault_in(len(given), total, squares, survivors=9) == ""
        assert fault_in(len(given), total, None, survivors=9) == ""


@pytest.mark.parametrize(
    ("count", "total", "squares"),
    [(10, 0, 0), (-1, 0, 0), (3, 193, 10_000), (3, -1, 0), (0, 1, 1), (3, 90, 2699), (3, 90, 64 * 90 + 1)],
)
def test_what_no_honest_sites_add_up_to_makes_a_sum_void(count: int, total: int, squares: int) -> None:
    assert fault_in(count, total, squares, survivors=9) != ""
    where = layout(9)
    words = sum((encoded(where, None) for _ in range(9)), np.zeros(where.words, dtype=where.dtype))
    signed = words.view(where.signed_dtype)
    assert states.judge(where, signed, survivors=9) == ""
    signed[where.slot(SCORED)], signed[where.slot(SCORE)], signed[where.slot(SQUARES)] = count, total, squares
    assert "score" in states.judge(where, signed, survivors=9)


def test_the_best_round_by_hand() -> None:
    series = [(1, Fraction(50, 64)), (2, Fraction(52, 64)), (3, Fraction(53, 64)), (4, Fraction(51, 64))]
    assert best_of([], least_gain=Fraction(0)) is None
    assert best_of(series, least_gain=Fraction(0)) == BestRound(round=3, mean=Fraction(53, 64), since=1)
    # 2/64 more than round 1 is enough, 1/64 more than round 2 is not.
    kept = best_of(series, least_gain=Fraction(2, 64))
    assert kept == BestRound(round=2, mean=Fraction(52, 64), since=2)
    assert kept.ends(2) and not kept.ends(3) and not kept.ends(0)
    same = best_of([(1, Fraction(1, 2)), (2, Fraction(1, 2))], least_gain=Fraction(0))
    assert same == BestRound(round=1, mean=Fraction(1, 2), since=1), "the older of two equal ones"


def test_spread_by_hand() -> None:
    """Scores of 1/4 and 3/4: mean 1/2, spread 1/4."""
    found = ScoreSum(count=2, total=16 + 48, squares=16 * 16 + 48 * 48)
    assert found.mean == Fraction(1, 2) and found.spread == 0.25
    assert ScoreSum(count=2, total=64, squares=None).spread is None
