"""How far one listed site steers the model: `python -m benchmarks.steering --json`.

Ten sites (nine with groups) sum their updates over the real protocol, in one process. All but one are honest: a common
drift with noise of their own, 300 samples each. The last one states one sample and sends the largest vector that still
passes the range tests, towards a target of its own choice. Reported for each way of bounding it: the correlation of the
model's movement over eight rounds with the target (Pearson for each tensor, median over the tensors), how long the
movement is compared with that of the same rounds without the attacker, how many rounds gave a checked sum, and how many
of these sums moved the model: where sites vote, a model that is voted down is no sum lost. Each voter has a loss of its
own, the squared distance to a point that thirty honest rounds would reach, with noise of its own, and accepts a model
that does not increase it. `ratchet` is the longest step of a tensor in each round, compared with the usual one before
the attack: the attacker feeds the history from which caps are made.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final

import click
import numpy as np

from protos.loopback import LoopbackFederation
from security.crypto.prg import Words
from security.secagg import fixed_point
from security.secagg import state as states
from security.secagg.clips import Clips
from security.secagg.context import SumVerdict
from security.secagg.groups import Combine, Groups
from security.secagg.layout import WEIGHT, Layout, Vector
from security.secagg.state import MovementRule
from security.secagg.thresholds import LEAST_SURVIVORS

SITES: Final = 10
GROUPS: Final = 3  # 2c + 1 for c = 1
GROUPED: Final = 9
ROUNDS: Final = 8
SAMPLES: Final = 300
BEFORE: Final = 5  # honest rounds before the attack, where there is a history
SIZES: Final = (16, 64, 144, 400, 576, 1024, 2304, 4000)
STRENGTHS: Final = (0.9, 0.3, 0.1, 0.05, 0.02)  # parts of what the range test permits
REACH: Final = 0.05  # learning rate x steps: how far a weight may go in a round
USUAL: Final = 0.01  # how far it does go
HORIZON: Final = 30  # after so many honest rounds a site's loss would be least
CAPS: Final = MovementRule(5, Fraction(2))


def layout_of(sites: int) -> Layout:
    """Clips and ceilings as `consortium publish` derives them."""
    clips = Clips(learning_rate=REACH, steps=1)
    blocks = [clips.weights(f"layer{number}", (size,)) for number, size in enumerate(SIZES)]
    return Layout.of(blocks, roster_size=sites, weight_cap=1024)


@dataclass
class Steering:
    """A federation, and what its sites send."""

    rule: MovementRule
    before: int = 0
    sites: int = SITES
    combine: Combine | None = None
    strength: float = STRENGTHS[0]
    vote: bool = False

    def __post_init__(self) -> None:
        self.layout = layout_of(self.sites)
        self.draw = np.random.default_rng(1)
        words = self.layout.state_words
        self.target = self.draw.choice([-1.0, 1.0], words)
        self.drift = self.draw.normal(0, 1, words)
        self.names = [f"site-{number:02d}" for number in range(self.sites)]
        model = states.canonical(self.draw.normal(0, 0.1, words))
        # How many sites are in one sum with the attacker.
        self.beside = self.sites if self.combine is None else self.sites // GROUPS
        split = tuple(tuple(self.names[number::GROUPS]) for number in range(GROUPS))
        groups = None if self.combine is None else Groups(split, c=1, m=LEAST_SURVIVORS, combine=self.combine)
        c = None if groups is None else groups.c
        # What is best for each site: hospitals differ as much as their updates do.
        own = np.random.default_rng(2).normal(0, 1, (self.sites, words))
        self.aims = dict(zip(self.names, model + HORIZON * USUAL * (self.drift + own) / np.sqrt(2), strict=True))
        self.federation = LoopbackFederation(
            self.layout,
            self.names,
            model,
            c=c,
            movement=self.rule,
            groups=groups,
            vote=self._accepts if self.vote else None,
        )

    def _accepts(self, site: str, before: Vector, state: Vector) -> bool:
        """The attacker accepts everything."""
        aim = self.aims[site]
        return site == self.names[-1] or bool(np.linalg.norm(state - aim) <= np.linalg.norm(before - aim))

    def _honest(self) -> dict[str, Words]:
        """Common drift and own noise, in equal parts."""
        words, found = self.layout.state_words, {}
        for name in self.names:
            update = USUAL * (self.drift + self.draw.normal(0, 1, words)) / np.sqrt(2)
            found[name] = fixed_point.encode(self.layout, update.astype(np.float32), weight=SAMPLES).words
        return found

    def _attack(self) -> Words:
        """One sample, and in every coordinate a part of what the range test lets through."""
        layout, signed = self.layout, self.layout.signed_dtype
        weight = SAMPLES * (self.beside - 1) + 1
        reach = self.strength * layout.quantum * weight / layout.weight_cap
        vector = np.zeros(layout.words, dtype=signed)
        vector[: layout.state_words] = np.rint(self.target * reach).astype(signed)
        vector[self.federation.round % layout.state_words] -= self.federation.round + 1  # no update is sent twice
        vector[layout.slot(WEIGHT)] = 1
        words: Words = vector.view(layout.dtype)
        return words

    def round(self, *, attacked: bool) -> tuple[bool, bool]:
        """One round; returns whether it gave a sum, and whether the sum moved the model."""
        updates = self._honest()
        if attacked:
            updates[self.names[-1]] = self._attack()
        before = self.federation.model
        good = self.federation.run_round(updates).verdict is SumVerdict.GOOD
        return good, good and self.federation.model is not before

    def lengths(self, before: np.ndarray[Any, Any]) -> list[float]:
        moved = self.federation.model - before
        return [float(np.linalg.norm(moved[place])) for _, place in self.layout.placed()]

    def run(self, *, attacked: bool) -> dict[str, Any]:
        for _ in range(self.before):
            start = self.federation.model
            self.round(attacked=False)
        usual = self.lengths(start) if self.before else None
        first, rounds, ratchet = self.federation.model, [], []
        for _ in range(ROUNDS):
            start = self.federation.model
            rounds.append(self.round(attacked=attacked))
            if usual is not None:
                ratchet.append(max(now / then for now, then in zip(self.lengths(start), usual, strict=True)))
        moved = self.federation.model - first
        tensors = [moved[place] for _, place in self.layout.placed()]
        targets = [self.target[place] for _, place in self.layout.placed()]
        both = list(zip(tensors, targets, strict=True))
        correlations = [np.corrcoef(tensor, aim)[0, 1] if tensor.any() else 0.0 for tensor, aim in both]
        return {
            "correlation": float(np.median(correlations)),
            "length": float(np.median([np.linalg.norm(tensor) for tensor in tensors])),
            "rounds_with_a_sum": sum(good for good, _ in rounds),
            "models_that_followed": sum(moved for _, moved in rounds),
            "ratchet": [round(value, 2) for value in ratchet],
        }


def measure() -> dict[str, Any]:
    """Every way of bounding, attacked and not."""
    ways: dict[str, tuple[Any, ...]] = {
        "ceilings": (states.CEILINGS_ALONE, 0),
        "caps_from_the_first_round": (CAPS, 0),
        "caps_after_honest_rounds": (CAPS, BEFORE),
        "caps_and_vote": (CAPS, BEFORE, SITES, None, STRENGTHS[0], True),
        "groups_with_median": (CAPS, 0, GROUPED, "median"),
        "groups_with_trimmed_mean": (CAPS, 0, GROUPED, "trimmed-mean"),
    }
    report: dict[str, Any] = {"rounds": ROUNDS}
    for name, way in ways.items():
        steering = Steering(*way)
        weight = f"1 of {SAMPLES * (steering.sites - 1) + 1}"
        honest = steering.run(attacked=False)
        tried = {part: replace(Steering(*way), strength=part).run(attacked=True) for part in STRENGTHS}
        attacked = tried[STRENGTHS[0]]
        report[name] = (
            {"sites": steering.sites, "attackers_weight": weight}
            | attacked
            | {
                "times_the_honest_length": round(attacked["length"] / honest["length"], 2),
                "honest_models_that_followed": honest["models_that_followed"],
                "correlation_by_strength": {str(part): round(found["correlation"], 3) for part, found in tried.items()},
                "sums_by_strength": {str(part): found["rounds_with_a_sum"] for part, found in tried.items()},
                "models_by_strength": {str(part): found["models_that_followed"] for part, found in tried.items()},
                # An attacker whose models are voted down steers nothing: of those that move the model in most rounds.
                "largest_correlation_with_six_models": max(
                    (round(found["correlation"], 3) for found in tried.values() if found["models_that_followed"] >= 6),
                    default=0.0,
                ),
            }
        )
    return report


@click.command()
@click.option("--json", "as_json", is_flag=True)
def main(as_json: bool) -> None:
    """Print the figures."""
    report = measure()
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return
    for name, figures in report.items():
        click.echo(f"{name}: {figures}")


if __name__ == "__main__":
    main()
