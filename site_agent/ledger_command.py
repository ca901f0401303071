"""`site-agent ledger`: begin the privacy ledger of this hospital's patients, once, or look at it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from security.clock import SystemClock
from security.consortium.enrolment import Identity
from security.consortium.manifest import Manifest
from security.dp.ledger import Ledger
from security.errors import ConfigError
from security.terminal import emit, say
from site_agent.assembly import read_membership
from site_agent.config import SiteConfig
from site_agent.options import also_config, json_option
from site_agent.privacy import PrivatePlan, budget_status, ledger_files, planned_cost, status_line

_NEW = "before any data"


@click.command()
@click.option("--create", is_flag=True, help="Begin one; the budget of a population is never begun twice.")
@click.option("--epsilon", type=click.FloatRange(0, min_open=True), help="Propose the noise for this epsilon.")
@also_config
@json_option
@click.pass_obj
def ledger(config_path: Path, own_config: Path | None, create: bool, epsilon: float | None, as_json: bool) -> None:
    """Show what was booked of this population's privacy budget, and what is left; the agent may be running."""
    config = SiteConfig.read(own_config or config_path)
    _, manifest = read_membership(Identity(folder=config.identity), SystemClock())
    plan = PrivatePlan.of(config, manifest)
    if plan is None:
        raise ConfigError("this federation trains without differential privacy", where="manifest [privacy]")
    if create:
        terms = plan.terms(config)
        with ledger_files(config) as files:
            Ledger.create(files, terms, version=_NEW)
        say(f"ledger {config.ledger} begun: epsilon {terms.cap:g} at delta {terms.delta:g} for each {terms.unit}")
        say(f"its newest head is kept in {config.ledger_anchor}: back both up, best in two places")
    if epsilon is not None:
        _propose(config, manifest, epsilon, as_json=as_json)
        return
    told = budget_status(config, manifest) or {}
    if as_json:
        emit(told | {"ledger": str(config.ledger), "anchor": str(config.ledger_anchor)})
    else:
        click.echo(status_line(told))


def _propose(config: SiteConfig, manifest: Manifest, epsilon: float, *, as_json: bool) -> None:
    cost = planned_cost(config, manifest, epsilon=epsilon)
    if cost is None:
        return
    if as_json:
        emit({**asdict(cost), "fits": cost.fits, "wanted": epsilon})
        return
    click.echo(
        f"{cost.rounds} rounds at noise {cost.sigma:g} bring epsilon to {cost.epsilon_rdp:.2f} (RDP), "
        f"{cost.epsilon_pld:.2f} (PLD) at delta {cost.delta:g}"
    )
    if cost.proposed_sigma is None:
        why = "no gradient noise is enough, given the other releases and the ledger's order"
        click.echo(f"for epsilon {epsilon:g}: {why}")
    else:
        click.echo(f"for epsilon {epsilon:g}: noise = {cost.proposed_sigma:g}")
