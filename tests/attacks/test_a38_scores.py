"""A38: a colluding site and the coordinator want another hospital's validation score, out of the sums of scores.

With few consenting sites the sum and what the attackers know leave one solution; on one model, two sums over other
sites leave the difference. Each rule has its twin: with it off, the score is solved exactly. Over rounds nothing but
differential privacy bounds it, and a site warns of cohorts that change by one consenting site among others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from lazaret.errors import PolicyViolation
from security.crypto.prg import Words
from security.identity import acceptance, rules
from security.identity.manifest import Manifest
from security.secagg import fixed_point
from security.secagg.effects import Isolated
from security.secagg.layout import HITS, LOSS, SCORE, SCORED, SQUARES, Layout
from security.secagg.site import differences
from security.secagg.site.journal import NewestResult, score_due
from tests.support import evil
from tests.support.consortium_world import PLAN, World
from tests.support.secagg_world import federation, small_layout

SITES = ("bern", "graz", "linz", "vienna", "zug")
VICTIM, OTHER, ATTACKER = "graz", "linz", "zug"
SCORES = {VICTIM: 41, OTHER: 57, ATTACKER: 20}
# All five sites are in every sum; one of them may collude.
STRICT = PLAN + "\n[aggregation]\ncolluders = 1\nleast_survivors = 5\n"


def published(folder: Path, *sites: str, more: str = "") -> tuple[World, Manifest]:
    world = World.make(folder, SITES)
    listed = ", ".join(f'"{site}"' for site in sites)
    world.write_plan(f"{STRICT}{more}\n[scores]\nsites = [{listed}]\n")
    return world, world.publish()


def with_slots(layout: Layout) -> Layout:
    """What a consortium that does not know the rule would publish."""
    plain = [block for block in layout.blocks if block.kind in ("mean", "statistic")]
    sizes = {"roster_size": layout.roster_size, "weight_cap": layout.weight_cap}
    return Layout.of(plain, **sizes, scores=(SCORED, SCORE, SQUARES))


def forged(manifest: Manifest) -> Manifest:
    numbers = manifest.aggregation.model_copy(update={"layout": with_slots(manifest.aggregation.layout)})
    return manifest.model_copy(update={"aggregation": numbers})


@pytest.mark.parametrize("sites", [(VICTIM, ATTACKER), (VICTIM, OTHER, ATTACKER)])
def test_with_too_few_consenting_sites_there_are_no_slots(tmp_path: Path, sites: tuple[str, ...]) -> None:
    world, manifest = published(tmp_path, *sites)
    assert not any(manifest.aggregation.layout.has(name) for name in (SCORED, SCORE, SQUARES))
    assert not any(manifest.scored(site) for site in SITES)
    with pytest.raises(PolicyViolation, match="slots for scores"):
        acceptance.open_manifest(world.signed(forged(manifest)), world.authority.root, now_ms=world.now)


def summed(layout: Layout, scores: Mapping[str, int], *, silent: Sequence[str] = (), out: Sequence[str] = ()) -> Words:
    """A real aggregation; only the sum is seen by the coordinator.

    :param silent: sites that do not consent.
    :param out: sites that are not there.
    """
    sites = sorted([*scores, *silent])
    run = federation(len(sites), layout=layout)
    slots = {name: 0 for name in (LOSS, HITS) if layout.has(name)}
    empty = np.zeros(layout.state_words, dtype=np.float32)
    updates = {
        name: fixed_point.encode(layout, empty, weight=1, score=scores.get(site), **slots).words
        for site, name in zip(sites, run.sites, strict=True)
        if site not in out
    }
    return run.run_round(updates).total


def test_a_score_is_solved_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twin: the same manifest is believed, and sum, squares and the attacker's own score leave one solution."""
    others = tuple(rule for rule in rules.CONSISTENCY if rule is not rules.check_scores)
    monkeypatch.setattr(rules, "CONSISTENCY", others)
    for sites in ((VICTIM, ATTACKER), (VICTIM, OTHER, ATTACKER)):
        world, manifest = published(tmp_path / str(len(sites)), *sites)
        believed = acceptance.open_manifest(world.signed(forged(manifest)), world.authority.root, now_ms=world.now)
        layout, silent = believed.aggregation.layout, sorted(set(SITES) - set(sites))
        found = fixed_point.decode_scores(layout, summed(layout, {site: SCORES[site] for site in sites}, silent=silent))
        assert found is not None and found.squares is not None and found.count == len(sites)
        left, squares = found.total - SCORES[ATTACKER], found.squares - SCORES[ATTACKER] ** 2
        if len(sites) == 2:
            assert left == SCORES[VICTIM]
        else:
            # x + y and x^2 + y^2 of two unknown sites: a quadratic equation.
            root = math.isqrt(2 * squares - left * left)
            assert {(left - root) // 2, (left + root) // 2} == {SCORES[VICTIM], SCORES[OTHER]}


def test_with_enough_of_them_many_scores_fit(tmp_path: Path) -> None:
    """All five consent, four are unknown. On the grid few numbers are left, but not one: the victim's score may be any
    of ten, which are up to 27/64 apart. Where all sites score alike the spread is zero and tells them all: that is
    said in the threat model."""
    _, manifest = published(tmp_path, *SITES)
    layout = manifest.aggregation.layout
    assert layout.has(SQUARES)
    scores = SCORES | {"bern": 33, "vienna": 50}
    found = fixed_point.decode_scores(layout, summed(layout, scores))
    assert found is not None and found.squares is not None
    left, squares = found.total - SCORES[ATTACKER], found.squares - SCORES[ATTACKER] ** 2
    fitting = {
        first
        for first in range(65)
        for second in range(65)
        for third in range(65)
        if 0 <= (last := left - first - second - third) <= 64
        and first**2 + second**2 + third**2 + last**2 == squares
    }
    assert SCORES[VICTIM] in fitting and len(fitting) == 10 and max(fitting) - min(fitting) == 27


def head(**changes: object) -> NewestResult:
    values = {"round": 4, "result": b"r" * 32, "state_hash": b"n" * 32, "trained_on": b"o" * 32, "certified": True}
    return NewestResult(**(values | changes))  # type: ignore[arg-type]


def test_scores_of_a_model_are_in_one_sum_at_most() -> None:
    """Only in the round after the one that made it: not after a lost round, a void sum or a vote against it."""
    assert score_due(head(), 5)
    assert not score_due(head(), 6), "round 5 was lost, and its sum may have been opened"
    assert not score_due(head(state_hash=b"o" * 32), 5), "round 4 was void, or its model voted down"
    first = NewestResult(round=0, result=bytes(32), state_hash=b"n" * 32, certified=True)
    assert not score_due(first, 1), "nobody has made the initial model"


def test_the_difference_of_two_sums_on_one_model_is_a_score_twin() -> None:
    """Twin: sites add their scores whenever they train. The victim and one that does not consent leave together, so
    that the sums of updates differ by two sites and are not refused; the sums of scores differ by one."""
    scores, silent = SCORES | {"bern": 33, "chur": 60, "vienna": 50}, ["wels"]
    layout = with_slots(small_layout(7))
    left = (VICTIM, "wels")
    first, second = (
        fixed_point.decode_scores(layout, summed(layout, scores, silent=silent, out=out)) for out in ((), left)
    )
    assert first is not None and second is not None and first.count == second.count + 1
    assert first.total - second.total == SCORES[VICTIM]
    # With the rule no site adds a score in the second round on this model.
    assert not score_due(head(), 6)
    assert fixed_point.decode_scores(layout, summed(layout, {}, silent=[*scores, *silent], out=left)) is None


def chosen_cohorts() -> tuple[evil.EvilCoordinator, float]:
    """The victim comes and goes together with three sites that do not consent: one may collude, and the other two hide
    the victim's update. Returns what the attackers take for its score."""
    run = evil.evil(10, c=1, layout=with_slots(small_layout(10, weight_cap=1)), scorers=evil.names(10)[:7])
    generator, found = np.random.default_rng(7), list[tuple[bool, int]]()
    empty = np.zeros(run.policy.layout.state_words, dtype=np.float32)
    for away in (False, False, True, False, True):
        updates = {}
        for number, name in enumerate(run.sites):
            if away and (name == evil.VICTIM or number in (7, 8, 9)):
                continue
            score = 40 + number + int(generator.integers(-1, 2)) if name in run.policy.scorers else None
            moved = empty + np.float32(0.01 * len(found))
            updates[name] = fixed_point.encode(run.policy.layout, moved, weight=1, score=score).words
        scores = fixed_point.decode_scores(run.policy.layout, run.run_round(updates).total)
        assert scores is not None
        found.append((away, scores.total))
    means = [np.mean([total for gone, total in found[1:] if gone is away]) for away in (False, True)]
    return run, float(means[0] - means[1])


def score_alarms(run: evil.EvilCoordinator, name: str) -> list[str]:
    return [effect.what for effect in run.noted.get(name, []) if isinstance(effect, Isolated)]


def test_a_site_warns_of_cohorts_that_show_its_score() -> None:
    run, found = chosen_cohorts()
    assert abs(found - 40) <= 4, "only differential privacy bounds this"
    assert "score" in score_alarms(run, evil.VICTIM) and "update" not in score_alarms(run, evil.VICTIM)
    assert not score_alarms(run, "site-03"), "those that are in every sum hide each other"
    assert not score_alarms(run, "site-08"), "it adds no score"


def test_a_site_warns_of_cohorts_that_show_its_score_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twin: all sites of a sum are counted, also those whose scores are zeros."""
    monkeypatch.setattr(differences, "score_exposure", differences.exposure)
    run, found = chosen_cohorts()
    assert abs(found - 40) <= 4 and not score_alarms(run, evil.VICTIM)
