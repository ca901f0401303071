"""Scores of an agent: with consent in manifest and policy, of a model that no sum was made on, and never alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lazaret.errors import PolicyViolation
from security.secagg.fixed_point import decode_scores
from security.secagg.layout import Vector
from security.secagg.relay import Decline
from security.secagg.scores import ScoreSum
from site_agent import session
from tests.support.site_world import MORE, PLAN, SLOT_SECONDS, Counting, SiteWorld, policy_table

SITES = ("bern", "chur", "graz", "linz", "vienna", "wels")
LISTED, SILENT = SITES[:5], "wels"
# Every site is in every sum; one may collude. Five consent: four are unknown to it.
NUMBERS = "\n[aggregation]\nweight_cap = 16\ncolluders = 1\nleast_survivors = 6\n"
SCORES = f'\n[scores]\nsites = [{", ".join(repr(site) for site in LISTED)}]\nfigure = "FIGURE"\n'.replace("'", '"')


@dataclass
class Scoring(Counting):
    """A learner with a validation side, on which each model does a little better."""

    own: float | None = 0.5
    asked: list[int] = field(default_factory=list)

    def evaluate(self, round_number: int, state: Vector) -> dict[str, Any]:
        self.asked.append(round_number)
        figures = super().evaluate(round_number, state)
        if self.own is None:
            return figures
        bacc = self.own + round_number / 64
        return figures | {"validation": {"bacc": bacc, "bauc": bacc + 1 / 64, "loss": 1.0, "images": 9}}


def make(folder: Path, *, figure: str = "bacc", consent: str = "true", scores: str = SCORES) -> SiteWorld:
    policy = policy_table(share_scores=consent)
    plan = PLAN + MORE + NUMBERS + scores.replace("FIGURE", figure)
    world = SiteWorld(folder, sites=SITES, policy=policy, plan=plan)
    words = world.manifest.aggregation.layout.state_words
    world.learners = {site: Scoring(words, own=0.25 + place / 16) for place, site in enumerate(SITES)}
    return world


def sum_of(world: SiteWorld) -> ScoreSum | None:
    """One more round, and what its sum says of scores."""
    world.hub.order(SITES)
    for site in SITES:
        world.work(site)
    world.tick(SLOT_SECONDS * 1000)
    attempt = world.hub.aggregate()
    assert attempt.publication is not None
    for site in SITES:
        world.work(site)
    return decode_scores(world.manifest.aggregation.layout, attempt.publication.total)


def test_scores_of_the_model_before_are_in_the_sum_and_a_site_that_is_not_listed_adds_none(tmp_path: Path) -> None:
    world = make(tmp_path)
    world.start_all()
    assert sum_of(world) is None, "nobody has made the initial model"
    grid = [16 + 4 * place + 1 for place in range(5)]
    assert sum_of(world) == ScoreSum(count=5, total=sum(grid), squares=sum(score**2 for score in grid))
    assert all(world.learners[site].asked == [1, 2] for site in SITES), "no model is evaluated twice"  # type: ignore[attr-defined]


def test_the_manifest_says_which_figure(tmp_path: Path) -> None:
    world = make(tmp_path, figure="loss")
    world.start_all()
    sum_of(world)
    found = sum_of(world)
    assert found is not None and found.total == 5 * 48, "a loss of 1 is three quarters of the way to none"


def test_a_hospital_that_does_not_consent_is_not_in_a_run_that_counts_on_it(tmp_path: Path) -> None:
    world = make(tmp_path, consent="false")
    world.start(SILENT)
    with pytest.raises(PolicyViolation, match="share_scores"):
        world.start("graz")
    agent = world.agents[SILENT]
    agent.policy.check_consent(world.manifest, SILENT)


def test_without_a_manifest_that_lists_it_consent_sends_nothing(tmp_path: Path) -> None:
    world = make(tmp_path, scores="")
    assert world.manifest.scores is None and b'"scores"' not in world.manifest.to_bytes()
    world.start_all()
    assert [sum_of(world), sum_of(world)] == [None, None]


def test_a_site_that_cannot_score_sends_no_update_instead_of_zeros(tmp_path: Path) -> None:
    """Zeros would leave the scores of the others among fewer sites than the manifest promises."""
    world = make(tmp_path)
    world.learners["graz"].own = None  # type: ignore[attr-defined]
    world.start_all()
    assert sum_of(world) is None
    world.hub.order(SITES)
    for site in SITES:
        world.work(site)
    world.tick(SLOT_SECONDS * 1000)
    assert world.hub.ready == set(SITES) - {"graz"}
    assert len(world.hub.sent_by("graz", Decline)) == 1
    assert world.learners["graz"].trained == [1], "it is found out before the work of a round"


def after_a_lost_round(folder: Path) -> SiteWorld:
    world = make(folder)
    world.start_all()
    sum_of(world)
    world.hub.round += 1  # round 2 came to nothing, and its sum may have been opened somewhere
    return world


def test_after_a_lost_round_the_same_model_has_no_scores(tmp_path: Path) -> None:
    """On one model a score is the same number each time."""
    world = after_a_lost_round(tmp_path)
    assert sum_of(world) is None
    assert sum_of(world) is not None, "round 3 has made another model"


def test_after_a_lost_round_the_same_model_has_no_scores_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "score_due", lambda head, number: head.round > 0)
    assert sum_of(after_a_lost_round(tmp_path)) is not None
