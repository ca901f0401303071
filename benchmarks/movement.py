"""Whether movement caps shorten honest steps: `python -m benchmarks.movement --data ham10000 --json`.

Sites train on real or generated images without caps, and every sum goes through the protocol. For each round: how many
tensors made a step longer than a factor times the median of their newest five, which is what a cap would have cut, and
the largest such ratio. With `--caps` the caps are in force, with the default values of `federation.toml`: each round
also has its verdict and the number of tensors whose step was shortened.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, Final

import click
import numpy as np

from npr.config import TrainConfig
from npr.data.sources import open_dataset
from npr.federation import Federation
from npr.lab.secure import SecureAggregator
from npr.model import ModelSpec
from security.secagg import groups
from security.secagg import state as states
from security.secagg.layout import Layout
from security.secagg.state import MovementRule

WINDOW: Final = 5
FACTORS: Final = (1.5, 2, 3, 4)


class Lengths(SecureAggregator):
    """Keeps the length of every tensor's step."""

    def __init__(self, federation: Federation, *, rounds: int, movement: MovementRule) -> None:
        super().__init__(federation, rounds=rounds, movement=movement)
        self.rounds: list[list[int]] = []
        self.outcomes: list[states.SumOutcome] = []

    def _machines(self, state: Any) -> Any:
        protocol, kept, outcomes = super()._machines(state), self.rounds, self.outcomes
        policy = protocol.policy

        class Recorded:
            @staticmethod
            def run_round(words: Any) -> Any:
                model, known = protocol.model, protocol.core.movements
                outcome = protocol.run_round(words)
                kept.append(states.step_lengths(policy.layout, outcome.total.view(policy.layout.signed_dtype)))
                # What every site computes from the sum; it says which steps were shortened.
                again = groups.outcome_of(
                    policy.layout,
                    policy.groups,
                    model,
                    outcome.total,
                    survivors=outcome.survivors,
                    rule=policy.movement,
                    movements=known,
                )
                outcomes.append(again)
                return outcome

        return Recorded


def ratios(rounds: Sequence[Sequence[int]]) -> dict[int, float]:
    """The last round's steps, each compared with the lower median of the tensor's newest ones before."""
    found = {}
    for at, length in enumerate(rounds[-1]):
        before = sorted([row[at] for row in rounds[:-1] if row[at]][-WINDOW:])
        if before:
            found[at] = length / before[(len(before) - 1) // 2]
    return found


def report(layout: Layout, rounds: Sequence[Sequence[int]]) -> dict[str, Any]:
    found = ratios(rounds)
    worst = max(found, key=found.__getitem__, default=None)
    return {
        "round": len(rounds),
        "tensors": len(rounds[-1]),
        "longer_than": {str(factor): sum(ratio > factor for ratio in found.values()) for factor in FACTORS},
        "largest_ratio": round(max(found.values(), default=0.0), 2),
        "largest_at": layout.state_blocks[worst].kind if worst is not None else "",
    }


@click.command(help=__doc__)
@click.option("--data", default="generated:scale=0.02,sites=3", show_default=True)
@click.option("--fold", default="0", show_default=True)
@click.option("--image-size", default=48, show_default=True)
@click.option("--architecture", default="tf_efficientnet_lite0", show_default=True)
@click.option("--weights", default="package", show_default=True)
@click.option("--method", default="fednpr-per", show_default=True)
@click.option("--rounds", default=9, show_default=True)
@click.option("--every", default=1, show_default=True, help="Take every so many-th training image only.")
@click.option("--caps", is_flag=True, help="With movement caps in force.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object at the end, instead of a line for each round.")
def main(
    data: str,
    fold: str,
    image_size: int,
    architecture: str,
    weights: str,
    method: str,
    rounds: int,
    every: int,
    caps: bool,
    as_json: bool,
) -> None:
    side = int(fold) if fold.isdigit() else fold
    dataset = open_dataset(data, fold=side, image_size=image_size, validation=0.2)
    thinned = (replace(s, train=s.train.subset(np.arange(0, len(s.train), every))) for s in dataset.sites)
    dataset = replace(dataset, sites=tuple(thinned))
    spec = ModelSpec(
        num_classes=dataset.num_classes, architecture=architecture, image_size=image_size, weights=weights
    )
    federation = Federation(dataset=dataset, spec=spec, config=TrainConfig(method=method))
    rule = MovementRule(WINDOW, Fraction(2)) if caps else states.CEILINGS_ALONE
    federation.aggregator = kept = Lengths(federation, rounds=rounds, movement=rule)
    found = []
    for _ in range(rounds):
        federation.run_round()
        found.append(report(kept.layout, kept.rounds))
        if caps:
            outcome = kept.outcomes[-1]
            found[-1] |= {"verdict": outcome.verdict.name.lower(), "shortened": len(outcome.capped)}
        click.echo(json.dumps(found[-1]), err=as_json)
    if as_json:
        words = " ".join(word for word in sys.argv[1:] if word != "--json")
        click.echo(json.dumps({"command": f"python -m benchmarks.movement {words}".strip(), "rounds": found}, indent=1))


if __name__ == "__main__":
    main()
