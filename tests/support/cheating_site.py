"""A listed site that cheats on the network: its boxes for one victim do not open. And a coordinator that asks nobody.

`python -m tests.support.cheating_site cheat --config site.toml --without disclosure`
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click

from lazaret.terminal import run_command
from scripts.local_federation.party import cli
from security.secagg.coordinator.disputes import Disputes
from security.secagg.messages import DealtShare
from security.secagg.site.aggregation import SiteAggregation
from security.secagg.site.attempt import OpenAttempt

VICTIM: Final = "site0"
CONFIG = click.option("--config", "path", type=click.Path(path_type=Path), required=True)
WITHHELD: Final = {"disclosure": "accusation", "upload": "_upload"}


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
    site = cli.get_command(context, "site")
    assert site is not None
    context.invoke(site, path=path, numbers=True)


@cli.command()
@CONFIG
@click.pass_context
def deaf(context: click.Context, path: Path) -> None:
    """A coordinator that passes no accusation on: the twin."""
    Disputes.accusation = lambda *_args, **_named: ()  # type: ignore[method-assign]
    coordinator = cli.get_command(context, "coordinator")
    assert coordinator is not None
    context.invoke(coordinator, path=path)


if __name__ == "__main__":
    run_command(cli, "party")
