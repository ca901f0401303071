"""Commands on what this site keeps: the ledger, the privacy log, finished runs, pauses, permits and handovers."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import click

from lazaret import archive, software
from lazaret.control import pause_commands, runs_command
from lazaret.errors import ConfigError
from lazaret.terminal import emit, say
from security.clock import Clock, SystemClock
from security.dp.accountant import spent
from security.dp.ledger import Ledger
from security.identity.enrolment import Identity
from security.identity.manifest import Manifest
from security.identity.membership import aggregation_policy
from security.log.events import OperatorAction
from security.log.log_commands import log_commands
from security.log.opening import continue_own_log
from security.log.roster import audit_roster
from security.log.writer import AuditLog
from security.rng import SystemRandomness
from security.secagg import certificate_checks
from security.secagg.handover import Handover
from security.secagg.records import ResultAccepted, ResultCertified, UpdatesPermitted, VotesTaken
from security.secagg.site.journal import Journal, most_updates
from site_agent import next_run
from site_agent.assembly import read_membership
from site_agent.config import SiteConfig
from site_agent.options import json_option, with_config
from site_agent.privacy import (
    PrivatePlan,
    budget_status,
    create_ledger,
    kept_figures,
    ledger_files,
    planned_cost,
    sides_key_file,
    status_line,
)
from site_agent.state_dir import StateDir
from site_agent.state_writer import WriteAheadLog

# `ledger`: create the privacy ledger of this hospital's patients, once, or show it.


@click.command()
@click.option("--create", is_flag=True, help="Create it; a population has one budget only.")
@click.option("--first", is_flag=True, help="With --create, at a restored site: confirm that it never had a ledger.")
@click.option("--undo", is_flag=True, help="Remove one that was created by mistake, before its first booking.")
@click.option("--resume", is_flag=True, help="Permit new bookings after rounds that were booked, but not trained.")
@click.option("--epsilon", type=click.FloatRange(0, min_open=True), help="Propose the noise for this epsilon.")
@click.option("--check", "second", is_flag=True, help="Compute the booked epsilon again, with Opacus too.")
@with_config
@json_option
def ledger(
    config_path: Path,
    create: bool,
    first: bool,
    undo: bool,
    resume: bool,
    epsilon: float | None,
    second: bool,
    as_json: bool,
) -> None:
    """Show what was booked of this population's privacy budget, and what is left; the agent may be running."""
    config = SiteConfig.read(config_path)
    if undo:
        with ledger_files(config) as store:
            store.undo()
        say(f"ledger {config.ledger} is removed: nothing was booked in it; `--create` begins another one")
        return
    _, manifest = read_membership(Identity(folder=config.identity), SystemClock(), dated=False)
    plan = PrivatePlan.of(config, manifest)
    if plan is None:
        raise ConfigError("this federation trains without differential privacy", where="manifest [privacy]")
    if create:
        terms = create_ledger(config, plan, rng=SystemRandomness(), first=first)
        say(f"ledger {config.ledger} begun: epsilon {terms.cap:g} at delta {terms.delta:g} for each {terms.unit}")
        say(f"its anchor is kept in {config.ledger_anchor}: back up both, on two disks if possible")
        say(f"the key that gives patients their sides is {sides_key_file(config)}: back it up too, there is no other")
    if resume:
        with ledger_files(config) as files:
            Ledger.open(files, population=config.privacy.population).resume(plan.run)
        say(f"run {plan.run} may be booked again; what was booked before stays booked")
    if epsilon is not None:
        _propose(config, manifest, epsilon, as_json=as_json)
        return
    budget = budget_status(config, manifest) or {}
    if second:
        budget["opinions"] = _opinions(config)
    if as_json:
        emit(budget | {"ledger": str(config.ledger), "anchor": str(config.ledger_anchor)})
    else:
        click.echo(status_line(budget))
        for name, value in budget.get("opinions", {}).items():
            click.echo(f"  {name:<24} {value:.4f}")


def _opinions(config: SiteConfig) -> dict[str, float]:
    """What was booked, by every accountant there is. Each is a bound; only the first is enforced."""
    from npr.dp.engine import opacus_epsilons

    state = ledger_files(config).peek()
    if state is None:
        return {}
    both, delta = spent(state.history, state.terms.delta), state.terms.delta
    found = {"booked": state.epsilon, "dp_accounting_rdp": both.rdp, "dp_accounting_pld": both.pld}
    return found | opacus_epsilons(state.history, delta)


def _propose(config: SiteConfig, manifest: Manifest, epsilon: float, *, as_json: bool) -> None:
    with kept_figures(config):
        cost = planned_cost(config, manifest, epsilon=epsilon)
    if cost is None:
        return
    if as_json:
        emit({**asdict(cost), "fits": cost.fits, "wanted": epsilon})
        return
    click.echo(
        f"{cost.rounds} rounds at noise {cost.sigma:g} bring the booked epsilon to {cost.epsilon:.2f} "
        f"(tighter bound {cost.epsilon_pld:.2f}) at delta {cost.delta:g}"
    )
    if cost.alone is not None:
        click.echo(f"noise is shared: that is inside the sum; {cost.alone:.2f} alone, if all other sites collude")
    if cost.proposed_sigma is None:
        why = "no gradient noise is enough, given the other releases and the ledger's order"
        click.echo(f"for epsilon {epsilon:g}: {why}")
    else:
        click.echo(f"for epsilon {epsilon:g}: noise = {cost.proposed_sigma:g}")


# `log-export`, `log-note`, `log-erase`, `log-archive`: what people do with the privacy log. The log records it.


def open_for_people(config_path: Path) -> AuditLog:
    """This site's log, if no agent holds it. The keys in it are those of the manifest it was last used with."""
    config, clock = SiteConfig.read(config_path), SystemClock()
    archive.refuse_moved(config.state)
    identity = Identity(folder=config.identity)
    site, manifest = read_membership(identity, clock)
    roster = audit_roster(manifest)
    return continue_own_log(config.state / "log", identity, site, roster=roster, clock=clock, rng=SystemRandomness())


log_export, log_note, log_erase, log_archive = log_commands(open_for_people, with_config)


def _state(path: Path) -> Path:
    return SiteConfig.read(path).state


pause, resume = pause_commands(_state, with_config, "this site's training")
runs = runs_command(_state, with_config)


# `handover`: the shared model and what the sites have signed of it, for a replacement of a lost coordinator.


@click.command()
@click.argument("target", type=click.Path(path_type=Path, dir_okay=False))
@with_config
@json_option
def handover(config_path: Path, target: Path, as_json: bool) -> None:
    """Write the newest verified shared model, and the sites' signatures on it, to TARGET; nothing of this site."""
    state_dir, manifest = _held(SiteConfig.read(config_path), SystemClock(), dated=False)
    written = write_handover(state_dir, manifest, target)
    if as_json:
        emit({"file": str(target), "round": written.round, "state_hash": written.covered.result.state_hash.hex()})
        return
    say(f"the model after round {written.round} and the signatures on it are in {target}: send it to the operator")


def _held(config: SiteConfig, clock: Clock, *, dated: bool = True) -> tuple[StateDir, Manifest]:
    """This site's state directory and the manifest in force, for a command that is not the agent."""
    archive.refuse_moved(config.state)
    identity = Identity(folder=config.identity)
    site, manifest = read_membership(identity, clock, dated=dated)
    key = identity.sealing_key()
    return StateDir(config.state, site=site, sealing_key=key, randomness=SystemRandomness()), manifest


def write_handover(state_dir: StateDir, manifest: Manifest, target: Path) -> Handover:
    covered = state_dir.read_covered()
    if covered is None:
        raise ConfigError("this site has no verified result yet", where=str(state_dir.covered))
    layout = manifest.aggregation.layout
    state = state_dir.state(layout, covered.result.state_hash)
    # Which rounds were lost is not known here: the operator can correct the count.
    found = Handover.of(covered, state, covered.result.context.round)
    found.write(target, layout)
    return found


# `step-back`: a result that was never verified is given up, after the coordinator that published it was lost.


@click.command("step-back")
@click.option("--reason", required=True, help="Why; goes to the privacy log.")
@with_config
def step_back(config_path: Path, reason: str) -> None:
    """Give up the newest result, which was never verified, after the coordinator was lost; the agent must not run."""
    clock = SystemClock()
    state_dir, manifest = _held(SiteConfig.read(config_path), clock)
    with closing(open_for_people(config_path)) as log:
        given_up, kept = give_up_unverified(state_dir, manifest, log, reason, now_ms=clock.now_ms())
    say(f"the result of round {given_up} is given up, this site is back at round {kept}; start the agent")


def give_up_unverified(
    state_dir: StateDir, manifest: Manifest, log: AuditLog, reason: str, *, now_ms: int
) -> tuple[int, int]:
    """Go back to the newest verified result, from which the one given up was made. Returns both rounds.

    Nothing was sent on what is given up: no aggregation begins before a sum is verified. What was sent on the model
    that this site goes back to stays counted (section 8), so that a coordinator gains no further update by it; and a
    cohort needs more than half of the sites, so that sites which hold the certificate cannot be left on another branch.

    :raises ConfigError: if the newest result is verified, or there is none before it. Nothing is changed then.
    """
    policy = aggregation_policy(manifest, now_ms=now_ms)
    wal = WriteAheadLog(state_dir.wal)
    try:
        head, covered = Journal.replay(wal.records).head(policy), state_dir.read_covered()
        if head.certified:
            raise ConfigError("the newest result of this site is verified: it is not given up", where="step-back")
        if covered is None or covered.result.state_hash != head.trained_on:
            raise ConfigError(
                "no verified result is kept from which the newest one was made",
                where=str(state_dir.covered),
                hint="the consortium starts the next run",
            )
        found = Handover.of(covered, state_dir.state(policy.layout, head.trained_on), covered.result.context.round)
        found.check(policy, where=str(state_dir.covered))
        context, result = covered.result.context, covered.result
        certified = ResultCertified(result=found.result_hash)
        log.append(OperatorAction(command=f"step back: {reason}", role="operator"), actor=software.account())
        log.checkpoint()
        wal.append(
            ResultAccepted(
                round=context.round,
                result=found.result_hash,
                prev_result=context.prev_result,
                trained_on=context.state_hash,
                state_hash=result.state_hash,
                quorum=context.t,
                verdict=result.verdict,
                survivors=tuple(line.site for line in result.uploads),
                movements=result.movements,
            )
        )
        link = certificate_checks.link_after(policy, found.result_hash, covered.check)
        wal.append(VotesTaken(result=found.result_hash, link=link, accepted=1) if policy.vote else certified)
        return head.round, context.round
    finally:
        wal.close()


# `accept`: an operator's word for a run that was offered. The agent keeps running; it looks for the word itself.


@click.command()
@click.argument("run")
@with_config
@json_option
def accept(config_path: Path, run: str, as_json: bool) -> None:
    """Begin RUN, which was offered and waits for your decision. The agent needs no restart."""
    config = SiteConfig.read(config_path)
    offered = next_run.accept(config, Identity(folder=config.identity), run, now_ms=SystemClock().now_ms())
    if as_json:
        emit({"run": run, "manifest_version": offered.version, "model": offered.model.initial_file})
        return
    for line in next_run.about(offered):
        say(line)
    say(f"run {run} is accepted; the agent fetches its model and begins")


# `permit`: after rounds that left the model as it was, the operator permits further ones. The log records it.


@click.command()
@click.option("--reason", required=True, help="Why rounds failed, and what was done about it; goes to the privacy log.")
@with_config
def permit(config_path: Path, reason: str) -> None:
    """Permit this site further updates on a model that did not change. Stop the agent first."""
    clock = SystemClock()
    state_dir, manifest = _held(SiteConfig.read(config_path), clock)
    wal = WriteAheadLog(state_dir.wal)
    try:
        journal = Journal.replay(wal.records)
        policy = aggregation_policy(manifest, now_ms=clock.now_ms())
        state, most = journal.head(policy).state_hash, most_updates(vote=policy.vote)
        # Either it has no update left on this model, or there is a sum on it that a further one could be compared with,
        # or an attempt of which nobody has shown what became of it.
        summed = any(seen.state_hash == state for seen in journal.sums)
        out = journal.uploaded_on == state and (summed or not journal.updates_left(vote=policy.vote))
        if not out and not journal.unsettled(state):
            raise ConfigError(
                "this site does not wait for its operator",
                where=str(state_dir.wal),
                hint=f"it stops after {most} different updates on one model, or when a further "
                "sum on the same model would show one site's update",
            )
        with closing(open_for_people(config_path)) as log:
            log.append(OperatorAction(command=f"permit: {reason}", role="operator"), actor=software.account())
            log.checkpoint()
        wal.append(UpdatesPermitted(state_hash=state))
    finally:
        wal.close()
    say(f"this site sends up to {most} more updates on model {state.hex()[:16]}; start the agent")
