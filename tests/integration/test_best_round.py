"""The best round by the masked sums of scores, in a whole federation: told, kept on disk, and the end of the run."""

from __future__ import annotations

import hashlib
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from coordinator.export import _best_round, _model
from coordinator.run_queue import StopFile
from coordinator.status import lines, overview
from lazaret.errors import DataError
from security.secagg.layout import Vector
from security.secagg.scores import BestRound, best_of, on_grid
from security.secagg.state import state_hash
from tests.support.site_world import Counting, policy_table
from tests.support.whole_federation import SITES, WholeFederation, whole_federation

LISTED = ", ".join(f'"{site}"' for site in SITES)
# All four sites are in every sum. Nobody colludes, but a site knows its own score: three are unknown to it.
PLAN = f"""
[aggregation]
colluders = 0
least_survivors = 4
weight_cap = 16
[scores]
sites = [{LISTED}]
patience = 2
least_gain = 0.03
"""
# The mean of each model, by its round: the third is better than the second, but by too little.
MEANS = {1: 0.5, 2: 0.7, 3: 0.71, 4: 0.4, 5: 0.9}
PLAIN: dict[int, list[int]] = {}
PLACES: dict[int, int] = {}  # of learners, in the order in which they are first asked


class Rated(Counting):
    """A learner whose model does better in some rounds, and at each site a little differently."""

    def evaluate(self, round_number: int, state: Vector) -> dict[str, Any]:
        place = PLACES.setdefault(id(self), len(PLACES))
        own = MEANS[round_number] + hashlib.sha256(f"{place} {round_number}".encode()).digest()[0] / 255 / 50
        if round_number not in self.evaluated:
            PLAIN.setdefault(round_number, []).append(on_grid(own))
        figures = {"bacc": own, "bauc": own, "loss": 1.0, "images": 9}
        return super().evaluate(round_number, state) | {"validation": figures}


def told(federation: WholeFederation) -> tuple[dict[str, Any], str]:
    model = f'initial_model = "{federation.model_path}"'
    path = federation.folder / "coordinator.toml"
    path.write_text(f'identity = "hub"\nstate = "hub-state"\nlisten = "127.0.0.1:1"\n{model}\n')
    found = overview(path, federation.clock)
    return found, "\n".join(lines(found, federation.clock.now_ms()))


def test_the_best_round_is_found_kept_and_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PLAIN.clear()
    PLACES.clear()
    monkeypatch.setattr(WholeFederation, "learner_type", Rated)
    with whole_federation(tmp_path, rounds=20, policy=policy_table(share_scores="true"), more=PLAN) as federation:
        federation.start_all()
        state = tmp_path / "hub-state"
        federation.run_rounds(1)
        with pytest.raises(DataError, match="no model has been scored"):
            _best_round(state, federation.manifest)
        assert "no model has been scored yet" in told(federation)[1]
        federation.run(lambda: StopFile(state).reason("run-1") is not None)
        federation.run(lambda: federation.engine.phase.value == "done")
        # Two models after the second were no better, by the rule: the sum of round 5 has told of the fourth.
        assert federation.published == 5
        assert federation.shell is not None
        history = federation.shell.storage.history
        plain = {number: Fraction(sum(found), 64 * len(found)) for number, found in PLAIN.items() if number < 5}
        assert {number: found.mean for number, found in history.scores().items()} == plain
        best = best_of(plain.items(), least_gain=Fraction("0.03"))
        assert history.best(federation.manifest) == best == BestRound(round=2, mean=plain[2], since=2)
        assert all(found.squares is None and found.count == 4 for found in history.scores().values())
        found, text = told(federation)
        assert found["scores"]["best"] == 2 and "best round so far: 2, mean bacc score 0." in text
        assert "2 models were no better than that of round 2" in text and not found["complete"]
        place, digest, vector = _model(state, _best_round(state, federation.manifest))
        assert place == 2 and state_hash(vector).hex() == digest
        assert bytes.fromhex(digest) in history.states_in_use(1), "it is kept, however old it grows"


def test_without_a_rule_in_the_manifest_nothing_is_compared(tmp_path: Path) -> None:
    with whole_federation(tmp_path, rounds=1) as federation:
        federation.start_all()
        federation.run_rounds(1)
        found, text = told(federation)
        assert found["scores"] is None and "score" not in text
