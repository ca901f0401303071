"""What a private federation asks of this site, what it will cost, and what has been spent. Reads no image.

The manifest fixes the promise ([privacy]) and the schedule (`dp.*` settings); site.toml may add noise, never take any
away. Costs come from the ledger's own planner (security/dp), so that what is announced is what will be booked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from lazaret import files
from lazaret.errors import BudgetExhausted, ConfigError, LedgerError, ToolkitError
from npr.data.sides import KEY_BYTES, key_digest
from security.clock import Clock
from security.dp.accountant import FIGURES, MechanismEvent, added, merged, pld_epsilon, rdp_epsilon
from security.dp.filter import BudgetFilter, RunTerms, shares_noise
from security.dp.ledger import Ledger, LedgerState, Terms, Unit
from security.dp.ledger_store import FileStore
from security.dp.planner import (
    PrivateSettings,
    Schedule,
    both_figures,
    least_multiplier,
    propose_multiplier,
    rounds_affordable,
    terms_for,
)
from security.identity.manifest import Manifest, Privacy, real
from security.identity.rules import private_schedule
from security.rng import Randomness
from site_agent.config import SiteConfig

LEDGER_HINT = "`site-agent ledger --create` creates one, once for each patient population"
_NEW: Final = "before any data"
_SIDES_HINT: Final = (
    "restore it from a backup, or copy it from the state folder that this ledger was created with; a new key would "
    "change which patients are trained on"
)
VALIDATION_OFF = "local validation and the choice of a best model are off: each would be one more release"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivatePlan:
    """The run as this site will do it, before anything is read.

    :param run: the ledger's name for it; two federations may both have a run-1.
    :param epsilon: the most that this run may cost, by the manifest.
    """

    run: str
    settings: PrivateSettings
    schedule: Schedule
    epsilon: float
    delta: float
    unit: Unit

    @classmethod
    def of(cls, config: SiteConfig, manifest: Manifest) -> PrivatePlan | None:
        """None for a federation without differential privacy.

        :raises ConfigError: where promise and schedule do not go together, or site.toml asks for too little noise.
        """
        settings = PrivateSettings.of(manifest.training.settings)
        if (settings is None) != (manifest.privacy is None):
            raise ConfigError(
                "the manifest has only one of [privacy] and dp. settings",
                where="manifest [privacy]",
                hint="the consortium exports the initial model with `npr-lab model --dp` and publishes again",
            )
        if settings is None or manifest.privacy is None:
            return None
        terms = manifest.privacy
        metrics = None if config.privacy.metrics_noise is None else float(config.privacy.metrics_noise)
        schedule = private_schedule(manifest, multiplier=_noise(config, terms), metrics_sigma=metrics)
        if schedule is None:
            return None
        return cls(
            run=f"{manifest.federation}/{manifest.run}",
            settings=settings,
            schedule=schedule,
            epsilon=real(terms.epsilon),
            delta=real(terms.delta),
            unit=Unit(terms.unit),
        )

    def terms(self, config: SiteConfig) -> Terms:
        """For a new ledger: the order is the one at which this run fits best."""
        cap = float(config.privacy.cap or self.epsilon)
        population = config.privacy.population
        return terms_for(self.schedule, population=population, unit=self.unit, cap=cap, delta=self.delta)

    def run_terms(self, delta: float) -> RunTerms:
        """For the ledger's line before the first booking of this run.

        :param delta: the ledger's, which may be smaller than the manifest's.
        """
        return RunTerms.of(self.run, self.schedule.events(), epsilon=self.epsilon, delta=delta)


def _noise(config: SiteConfig, terms: Privacy) -> float:
    least = real(terms.noise_floor)
    asked = least if config.privacy.noise is None else float(config.privacy.noise)
    if asked < least:
        raise ConfigError(
            f"noise of {asked:g} is below the {least:g} that the consortium demands",
            where=f"{config.path}:privacy.noise",
            hint="a site may add noise, never reduce it",
        )
    return asked


def ledger_files(config: SiteConfig) -> FileStore:
    return FileStore(config.ledger, config.ledger_anchor)


# Sides of patients: under differential privacy by a key that is made once, with the ledger (npr/data/sides.py).


def create_ledger(
    config: SiteConfig, plan: PrivatePlan, *, rng: Randomness, clock: Clock | None = None, first: bool = False
) -> Terms:
    """Begin the ledger of this population, and the key that gives its patients their sides.

    The key is written first: a crash in between leaves a key that the next attempt finds and uses.

    :param first: a person says that these patients never had one, also where this site was restored from a backup.
    """
    terms = plan.terms(config)
    if not first:
        _refuse_restored(config)
    with ledger_files(config) as store:
        if not sides_key_file(config).exists():
            config.sides.mkdir(mode=0o700, parents=True, exist_ok=True)
            files.write_atomically(sides_key_file(config), rng.bytes(KEY_BYTES), mode=0o600, replace=False)
        Ledger.create(store, terms, version=_NEW, sides=key_digest(read_sides_key(config)), clock=clock)
    return terms


def _refuse_restored(config: SiteConfig) -> None:
    """A ledger that was begun after the backup is not known to it. Where it knew one, `restore` left an anchor."""
    earlier = config.state / "earlier"
    lost = sorted(path.name for path in earlier.iterdir()) if earlier.is_dir() else []
    if lost and ledger_files(config).newest() is None:
        raise LedgerError(
            f"this site was restored from a backup of {', '.join(lost)}, which knew no ledger",
            where=str(config.ledger),
            hint="bring the ledger and the anchor that were begun after it; `--create --first` if there never was one",
        )


def sides_key_file(config: SiteConfig) -> Path:
    return config.sides / "key"


def read_sides_key(config: SiteConfig) -> bytes:
    """:raises LedgerError: if it is lost. It is never drawn again: patients would change sides, and the budget of those
    who come into training would have been spent on others."""
    path = sides_key_file(config)
    if not path.exists():
        raise LedgerError("the key that gives patients their sides is missing", where=str(path), hint=_SIDES_HINT)
    key = files.read_private(path)
    if len(key) != KEY_BYTES:
        raise LedgerError("the key that gives patients their sides is damaged", where=str(path), hint=_SIDES_HINT)
    return key


def check_sides_key(config: SiteConfig, state: LedgerState) -> None:
    """:raises LedgerError: if the key is not the one that the ledger's first line names."""
    if key_digest(read_sides_key(config)) != state.sides:
        where = str(sides_key_file(config))
        raise LedgerError("the key that gives patients their sides is not the ledger's", where=where, hint=_SIDES_HINT)


def check_terms(plan: PrivatePlan, terms: Terms) -> None:
    """:raises LedgerError: if what this ledger promises is not what the manifest asks for."""
    if terms.unit is not plan.unit:
        raise LedgerError(
            f"the ledger protects each {terms.unit}, the federation each {plan.unit}",
            where=terms.population,
            hint="a ledger with another unit is needed: name another [privacy] population",
        )
    if terms.delta > plan.delta:
        raise LedgerError(
            f"the ledger's delta of {terms.delta:g} is above the federation's {plan.delta:g}",
            where=terms.population,
            hint="a smaller delta needs its own ledger, which begins with all that was spent in this one",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a further reservation has to stay under: this run by the manifest, all runs by the hospital.

    :param alone: the hospital's limit of the second figure, of all runs if all other sites collude; None without one.
    """

    run: RunTerms
    cap: float
    alone: BudgetFilter | None = None

    @classmethod
    def of(cls, config: SiteConfig, plan: PrivatePlan, state: LedgerState) -> Limits:
        """A run that has begun keeps the terms with which it began."""
        terms = state.terms
        cap = terms.cap if config.privacy.cap is None else min(terms.cap, float(config.privacy.cap))
        most = config.privacy.cap_alone
        # Without a plan: PLD has no proof for discrete noise, so that Renyi divergence decides.
        alone = None if most is None else BudgetFilter(order=terms.order, delta=terms.delta, cap=float(most))
        return cls(run=(state.run_terms(plan.run) or plan.run_terms(terms.delta)), cap=cap, alone=alone)

    def admit(self, state: LedgerState, events: tuple[MechanismEvent, ...]) -> None:
        """:raises BudgetExhausted: with both numbers, before anything is booked."""
        of_run, total = state.of_run(self.run.run), state.total
        limits = [
            (self.run.filter(state.terms.delta), self.run.epsilon, of_run, events, "of this run, by the manifest"),
            (state.terms.filter(), self.cap, total, events, "of all runs on these patients, by this hospital"),
        ]
        if self.alone is not None:
            whose = "of all runs on these patients if all other sites collude, by this hospital (cap_alone)"
            limits.append((self.alone, self.alone.cap, merged(alone(state.history)), alone(events), whose))
        for rule, cap, already, asked, whose in limits:
            after = rule.epsilon(added(already, asked))
            if not after <= cap:
                raise BudgetExhausted(
                    f"the privacy budget {whose}, is spent: epsilon {rule.epsilon(already):.3f} of {cap:g}, and "
                    f"{after:.3f} with one more round",
                    where=state.terms.population,
                    hint="this site no longer contributes; nothing was read and nothing is sent",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCost:
    """What the rounds that are left will cost this site, on top of what its ledger holds.

    :param rounds: rounds of the run that this site has not booked yet.
    :param affordable: how many of them the limits let through.
    :param booked: what the ledger has booked, by its own filter, and `epsilon` what it will have booked after them.
    :param epsilon_pld: `epsilon` by privacy loss distributions, the tighter second opinion.
    :param alone: with shared noise, the same by Renyi divergence if all other sites collude; None otherwise.
    :param proposed_sigma: the least gradient noise, over the clip, with which all of them fit; None if none does, or
        if nobody asked and they fit already.
    """

    unit: str
    delta: float
    rounds: int
    affordable: int
    sigma: float
    booked: float
    epsilon: float
    epsilon_pld: float
    alone: float | None
    cap: float
    proposed_sigma: float | None
    has_ledger: bool
    validation: str

    @property
    def fits(self) -> bool:
        return self.affordable >= self.rounds


def planned_cost(config: SiteConfig, manifest: Manifest, *, epsilon: float | None = None) -> PlannedCost | None:
    """None for a federation without differential privacy. Takes a second or two, unless `kept_figures` has it.

    :param epsilon: propose noise for this; else noise is proposed only where the rounds do not fit, which takes longer.
    :raises ToolkitError: where plan and ledger do not go together, or the ledger is damaged.
    """
    plan = PrivatePlan.of(config, manifest)
    if plan is None:
        return None
    found = ledger_files(config).peek()
    terms = plan.terms(config) if found is None else found.terms
    check_terms(plan, terms)
    state = found or LedgerState(terms=terms, version="planned")
    limits = Limits.of(config, plan, state)
    done = len({booking.round for booking in state.bookings if booking.run == plan.run})
    ahead, left = plan.schedule.events(first=done + 1), max(0, plan.schedule.rounds - done)
    affordable = _affordable(plan, limits, state, done + 1)
    wanted = limits.run.epsilon if epsilon is None and affordable < left else epsilon
    return PlannedCost(
        unit=terms.unit.value,
        delta=terms.delta,
        rounds=left,
        affordable=affordable,
        sigma=plan.schedule.multiplier,
        booked=state.epsilon,
        epsilon=terms.filter().epsilon(added(state.total, ahead)),
        epsilon_pld=pld_epsilon((*state.history, *ahead), terms.delta),
        alone=alone_epsilon((*state.history, *ahead), terms.delta),
        cap=min(limits.cap, limits.run.epsilon),
        proposed_sigma=None if wanted is None else _proposal(plan, state, wanted, limits),
        has_ledger=found is not None,
        validation=validation_line(plan.schedule),
    )


def alone(events: Sequence[MechanismEvent]) -> tuple[MechanismEvent, ...]:
    """The same events if all other sites collude; those with all their noise from this site stay as they are."""
    return tuple(event.alone for event in events)


def alone_epsilon(history: Sequence[MechanismEvent], delta: float) -> float | None:
    """What the same bookings cost if all other sites collude; None if no noise is shared."""
    return rdp_epsilon(alone(history), delta)[0] if shares_noise(history) else None


def run_alone(manifest: Manifest) -> float:
    """What the whole run costs at the manifest's least noise if all other sites collude; zero without privacy.

    Where sites share no noise, that is simply what the run costs.
    """
    if manifest.privacy is None:
        return 0.0
    schedule = private_schedule(manifest, multiplier=real(manifest.privacy.noise_floor))
    return 0.0 if schedule is None else rdp_epsilon(alone(schedule.events()), real(manifest.privacy.delta))[0]


def validation_line(schedule: Schedule) -> str:
    """What becomes of local figures, for people."""
    sigma = schedule.metrics_sigma
    return VALIDATION_OFF if sigma is None else f"local validation is booked in every round, at noise {sigma:g}"


def _affordable(plan: PrivatePlan, limits: Limits, state: LedgerState, first: int) -> int:
    return rounds_affordable(plan.schedule, partial(limits.admit, state), first=first)


def _proposal(plan: PrivatePlan, state: LedgerState, epsilon: float, limits: Limits) -> float | None:
    """For the whole run from its first round, on top of what the ledger holds of other runs."""
    delta, cap = state.terms.delta, limits.cap
    others = [event for booking in state.bookings if booking.run != plan.run for event in booking.events]
    try:
        wanted = propose_multiplier(plan.schedule, epsilon=epsilon if others else min(epsilon, cap), delta=delta)
        if others:
            rule = state.terms.filter()
            beside = least_multiplier(plan.schedule, lambda events: rule.epsilon(merged((*others, *events))) <= cap)
            wanted = max(wanted, beside)
        if (second := limits.alone) is not None:
            enough = least_multiplier(
                plan.schedule, lambda events: second.epsilon(merged(alone((*others, *events)))) <= second.cap
            )
            wanted = max(wanted, enough)
        return wanted
    except ConfigError:
        return None


@contextmanager
def kept_figures(config: SiteConfig) -> Iterator[None]:
    """The accountant takes seconds to load and to compute: what it finds out here is kept beside the ledger for the
    next command. It says nothing of patients, and nothing is booked or admitted by what is kept."""
    kept = config.ledger.with_name(config.ledger.name + ".figures.json")
    known = 0
    with suppress(OSError, ValueError, TypeError, KeyError):
        known = FIGURES.recall(json.loads(kept.read_bytes()))
    yield
    if FIGURES.count > known and config.ledger.exists():
        with suppress(OSError):
            files.write_atomically(kept, json.dumps(FIGURES.to_json()).encode() + b"\n", mode=0o600)


def budget_status(config: SiteConfig, manifest: Manifest) -> dict[str, Any] | None:
    """What the ledger says now, for `site-agent status`; None for a federation without differential privacy."""
    with kept_figures(config):  # reading a ledger computes too
        return _read_budget(config, manifest)


def _read_budget(config: SiteConfig, manifest: Manifest) -> dict[str, Any] | None:
    try:
        plan = PrivatePlan.of(config, manifest)
        if plan is None:
            return None
        state = ledger_files(config).peek()
        if state is None:
            return {"problem": f"there is no privacy ledger yet: {LEDGER_HINT}"}
        check_terms(plan, state.terms)
    except ToolkitError as error:
        return {"problem": str(error)}
    limits = Limits.of(config, plan, state)
    done = len({booking.round for booking in state.bookings if booking.run == plan.run})
    stopped = None
    try:
        if done < plan.schedule.rounds:
            limits.admit(state, plan.schedule.round_events(done + 1))
    except BudgetExhausted as error:
        stopped = error.message
    return {
        "population": state.terms.population,
        "unit": state.terms.unit.value,
        "delta": state.terms.delta,
        "cap": limits.cap,
        "cap_alone": None if limits.alone is None else limits.alone.cap,
        "epsilon": state.epsilon,
        "rdp": rdp_epsilon(state.history, state.terms.delta)[0],
        "alone": alone_epsilon(state.history, state.terms.delta),
        "honest": None if plan.schedule.shared is None else plan.schedule.shared.honest,
        "rounds_booked": done,
        "rounds_left": max(0, plan.schedule.rounds - done),
        "rounds_affordable": _affordable(plan, limits, state, done + 1),
        "stopped": stopped,
    }


def status_line(budget: Mapping[str, Any]) -> str:
    """One line of `budget_status` for people."""
    if budget.get("problem"):
        return f"privacy: {budget['problem']}"
    spent_so_far = (
        f"privacy: epsilon {budget['epsilon']:.2f} of {budget['cap']:g} is booked for each {budget['unit']} at delta "
        f"{budget['delta']:g} (best order {budget['rdp']:.2f})"
    )
    if budget["alone"] is not None:
        figures = both_figures(budget["epsilon"], budget["alone"], budget["honest"])
        spent_so_far += f"; noise is shared: {figures}"
    if budget.get("cap_alone") is not None:
        spent_so_far += f"; this hospital's limit alone is {budget['cap_alone']:g}"
    if budget["stopped"]:
        return f"{spent_so_far}; this site no longer contributes: {budget['stopped']}"
    left, fits = budget["rounds_left"], budget["rounds_affordable"]
    return f"{spent_so_far}; " + (f"{fits} of {left} more rounds fit" if left else "this run is booked to its end")
