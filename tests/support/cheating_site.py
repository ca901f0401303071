"""A listed site that cheats on the network: its boxes for one victim do not open, or its vector is as long as the range
tests let through. And coordinators that ask nobody, or choose who is in which round; and a site that compares two sums
only.

`python -m tests.support.cheating_site cheat --config site.toml --without disclosure`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from lazaret.terminal import run_command
from scripts.local_federation.known_updates import SAMPLES
from scripts.local_federation.party import cli
from security.identity.membership import AggregationPolicy
from security.secagg.coordinator.attempt import CoordinatorAttempt
from security.secagg.coordinator.disputes import Disputes
from security.secagg.coordinator.rounds import CoordinatorRound
from security.secagg.layout import WEIGHT, Layout
from security.secagg.messages import DealtShare
from security.secagg.records import SumSeen
from security.secagg.site import differences
from security.secagg.site.aggregation import SiteAggregation
from security.secagg.site.attempt import OpenAttempt, PendingUpdate
from site_agent import contribution

VICTIM: Final = "site0"
HONEST_ROUNDS: Final = 2
AWAY: Final = ((), (VICTIM, "site1"), (VICTIM,), (VICTIM, "site1"))  # no two cohorts in a row differ by one site
CONFIG = click.option("--config", "path", type=click.Path(path_type=Path), required=True)
WITHHELD: Final = {"disclosure": "accusation", "upload": "_upload"}


def run_as(context: click.Context, party: str, **options: Any) -> None:
    """The shipped party, with what was changed in it before."""
    command = cli.get_command(context, party)
    assert command is not None
    context.invoke(command, **options)


def lone_change(policy: AggregationPolicy, sums: Sequence[SumSeen], site: str) -> float:
    """An earlier version of the alarm."""
    return float(len(sums) > 1 and set(sums[-1].sites) ^ set(sums[-2].sites) == {site})


@cli.command()
@CONFIG
@click.option("--without", multiple=True, type=click.Choice(list(WITHHELD)), help="What it does not send.")
@click.pass_context
def cheat(context: click.Context, path: Path, without: tuple[str, ...]) -> None:
    """A site that seals noise for its victim, and signs for good shares."""
    honest = OpenAttempt._deal_one

    def spoil(attempt: OpenAttempt, peer: Any, *rest: Any) -> DealtShare:
        line = honest(attempt, peer, *rest)
        return replace(line, box=bytes(len(line.box))) if peer.site == VICTIM else line

    OpenAttempt._deal_one = spoil  # type: ignore[method-assign]
    for name in without:
        setattr(SiteAggregation, WITHHELD[name], lambda *_: ())
    run_as(context, "site", path=path, numbers=True)


@cli.command()
@CONFIG
@click.pass_context
def steer(context: click.Context, path: Path) -> None:
    """A site that states one sample, and after two honest rounds sends nine tenths of what the range test permits."""
    honest = contribution.encode

    def steered(layout: Layout, *given: Any, round_number: int, **options: Any) -> tuple[PendingUpdate, int]:
        update, cut = honest(layout, *given, round_number=round_number, **options)
        if round_number <= HONEST_ROUNDS:
            return update, cut
        vector = np.zeros(layout.words, dtype=layout.signed_dtype)
        reach = 0.9 * layout.quantum * (3 * SAMPLES + 1) / layout.weight_cap
        vector[: layout.state_words] = np.where(np.arange(layout.state_words) % 2, reach, -reach)
        vector[layout.slot(WEIGHT)] = 1
        return replace(update, words=vector.view(layout.dtype)), cut

    contribution.encode = steered  # type: ignore[assignment]
    run_as(context, "site", path=path, numbers=True)


@cli.command()
@CONFIG
@click.pass_context
def forgetful(context: click.Context, path: Path) -> None:
    """A site that compares the last two sums only: the twin of the alarm about all of them."""
    differences.exposure = lone_change
    run_as(context, "site", path=path, numbers=True)


@cli.command()
@CONFIG
@click.pass_context
def chooser(context: click.Context, path: Path) -> None:
    """A coordinator that leaves out its victim, now together with another site and now alone."""
    honest = CoordinatorRound.next_attempt

    def chosen(planned: CoordinatorRound, ready: Any) -> CoordinatorAttempt:
        away = AWAY[(planned.start.round - 1) % len(AWAY)]
        return honest(planned, [site for site in ready if site not in away])

    CoordinatorRound.next_attempt = chosen  # type: ignore[method-assign]
    run_as(context, "coordinator", path=path)


@cli.command()
@CONFIG
@click.pass_context
def deaf(context: click.Context, path: Path) -> None:
    """A coordinator that passes no accusation on: the twin."""
    Disputes.accusation = lambda *_args, **_named: ()  # type: ignore[method-assign]
    run_as(context, "coordinator", path=path)


if __name__ == "__main__":
    run_command(cli, "party")
