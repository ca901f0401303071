"""What a private run will cost a site, before a single image is read: limits, proposals, and what is said."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from lazaret.errors import BudgetExhausted, ConfigError, LedgerError
from security.dp.accountant import RATE_ONE, merged
from security.dp.ledger import Ledger, LedgerState, Unit
from security.dp.noise import NoiseSource, SharedNoise
from security.dp.planner import PrivateSettings, Schedule
from security.identity.manifest import Privacy
from site_agent import privacy
from site_agent.config import CoordinatorTable, DataTable, PrivacyTable, SiteConfig, SiteTable
from site_agent.privacy import Limits, PrivatePlan, check_terms, ledger_files, planned_cost

SETTINGS = {"dp.steps": 20, "dp.rate": "0.05", "dp.counts_sigma": "5", "dp.prototypes_sigma": "10"}


@dataclass
class Training:
    rounds: int = 10
    settings: dict[str, Any] = field(default_factory=lambda: dict(SETTINGS))


@dataclass
class Signed:
    """The part of a manifest that this is about."""

    federation: str = "lesions"
    run: str = "run-1"
    digest: bytes = bytes(32)
    training: Training = field(default_factory=Training)
    privacy: Privacy | None = field(
        default_factory=lambda: Privacy(
            epsilon="4", delta="0.00001", clip="1", noise_floor="1", unit="patient", least_patients=None
        )
    )


def config(folder: Path, **table: Any) -> SiteConfig:
    return SiteConfig(
        site=SiteTable(initial_model="initial.safetensors"),
        coordinator=CoordinatorTable(address="hub.example:7443"),
        data=DataTable(source="generated"),
        privacy=PrivacyTable(**table),
        path=folder / "site.toml",
    )


def plan_of(told: SiteConfig, manifest: Any) -> PrivatePlan:
    plan = PrivatePlan.of(told, manifest)
    assert plan is not None
    return plan


def begun(told: SiteConfig, manifest: Any, *, rounds: int = 0, run: str | None = None) -> LedgerState:
    """A ledger with some rounds in it."""
    plan = plan_of(told, manifest)
    with ledger_files(told) as files:
        ledger = Ledger.create(files, plan.terms(told), version="v")
        for number in range(1, rounds + 1):
            events = plan.schedule.round_events(number)
            ledger.commit(ledger.reserve(run=run or plan.run, round_number=number, events=events, noise=NoiseSource()))
        return ledger.state


def test_promise_and_schedule_come_together_or_not_at_all(tmp_path: Path) -> None:
    told = config(tmp_path)
    assert PrivatePlan.of(told, Signed(training=Training(settings={}), privacy=None)) is None  # type: ignore[arg-type]
    for half in (Signed(privacy=None), Signed(training=Training(settings={}))):
        with pytest.raises(ConfigError, match="only one of"):
            PrivatePlan.of(told, half)  # type: ignore[arg-type]


def test_a_site_may_add_noise_and_not_take_any_away(tmp_path: Path) -> None:
    assert plan_of(config(tmp_path), Signed()).schedule.multiplier == 1.0
    assert plan_of(config(tmp_path, noise=1.5), Signed()).schedule.multiplier == 1.5
    with pytest.raises(ConfigError, match="below the 1"):
        PrivatePlan.of(config(tmp_path, noise=0.9), Signed())  # type: ignore[arg-type]


def test_a_run_that_does_not_fit_is_told_with_noise_that_does(tmp_path: Path) -> None:
    manifest = Signed()
    cost = planned_cost(config(tmp_path), manifest)  # type: ignore[arg-type]
    assert cost is not None and not cost.fits and 0 < cost.affordable < cost.rounds == 10
    assert cost.epsilon > cost.cap == 4 and cost.booked == 0
    assert cost.epsilon_pld < cost.epsilon and "off" in cost.validation and not cost.has_ledger
    assert cost.proposed_sigma is not None
    enough = config(tmp_path, noise=cost.proposed_sigma)
    state = begun(enough, manifest)
    plan = plan_of(enough, manifest)
    limits = Limits.of(enough, plan, state)
    limits.admit(state, plan.schedule.events())
    less = plan_of(config(tmp_path, noise=cost.proposed_sigma - 0.02), manifest)
    with pytest.raises(BudgetExhausted):
        limits.admit(state, less.schedule.events())


def test_what_rounds_are_said_to_cost_is_what_is_booked_in_the_end(tmp_path: Path) -> None:
    """Said before the ledger is begun, in the middle of the run, and beside rounds of a run before it."""
    told, manifest = config(tmp_path / "one", noise=2), Signed()
    first = planned_cost(told, manifest)  # type: ignore[arg-type]
    state = begun(told, manifest, rounds=4)
    then = planned_cost(told, manifest)  # type: ignore[arg-type]
    assert first is not None and then is not None and (then.rounds, then.booked) == (6, state.epsilon)
    whole = begun(config(tmp_path / "all", noise=2), manifest, rounds=10).epsilon
    assert first.epsilon == pytest.approx(whole) and then.epsilon == pytest.approx(whole)
    other = config(tmp_path / "other", noise=2, cap=20)
    begun(other, manifest, rounds=4, run="lesions/run-0")
    after = planned_cost(other, manifest)  # type: ignore[arg-type]
    assert after is not None and after.rounds == 10 and after.epsilon > 1.1 * whole


def test_the_run_is_bounded_by_the_manifest_and_all_runs_by_the_hospital(tmp_path: Path) -> None:
    told = config(tmp_path, cap=6.0, noise=2.0)
    manifest = Signed()
    state = begun(told, manifest, rounds=8, run="lesions/run-0")
    plan = plan_of(told, manifest)
    one = plan.schedule.round_events(2)
    Limits.of(told, plan, state).admit(state, one)
    with pytest.raises(BudgetExhausted, match="by the manifest"):
        Limits(run=replace(plan.run_terms(1e-5), epsilon=0.5), cap=6.0).admit(state, one)
    with pytest.raises(BudgetExhausted, match="by this hospital"):
        Limits(run=plan.run_terms(1e-5), cap=state.epsilon).admit(state, plan.schedule.events())
    lowered = config(tmp_path, cap=1.0, noise=2.0)
    assert Limits.of(lowered, plan, state).cap == 1.0, "a cap may be lowered later"
    raised = config(tmp_path, cap=60.0, noise=2.0)
    assert Limits.of(raised, plan, state).cap == 6.0, "and never raised"


def test_a_ledger_of_other_terms_is_refused(tmp_path: Path) -> None:
    told = config(tmp_path)
    terms = begun(told, Signed()).terms
    stricter = Privacy(epsilon="4", delta="0.000001", clip="1", noise_floor="1", unit="patient", least_patients=None)
    images = Privacy(epsilon="4", delta="0.00001", clip="1", noise_floor="1", unit="image", least_patients=None)
    for other, word in ((stricter, "delta"), (images, "protects each patient")):
        with pytest.raises(LedgerError, match=word):
            check_terms(plan_of(told, Signed(privacy=other)), terms)


def test_status_tells_what_is_left_and_what_is_wrong(tmp_path: Path) -> None:
    told, manifest = config(tmp_path, noise=1.3), Signed()
    without = privacy.budget_status(told, manifest)  # type: ignore[arg-type]
    assert without is not None and "ledger --create" in privacy.status_line(without)
    begun(told, manifest, rounds=2)
    status = privacy.budget_status(told, manifest)  # type: ignore[arg-type]
    assert status is not None and status["rounds_booked"] == 2 and status["rounds_affordable"] > 0
    assert "more rounds fit" in privacy.status_line(status)
    told.ledger_anchor.unlink()
    broken = privacy.budget_status(told, manifest)  # type: ignore[arg-type]
    assert broken is not None and "missing" in privacy.status_line(broken)


# Two figures, two limits: `cap` is judged inside the sum, `cap_alone` as if all other sites colluded.


def sharing(rounds: int = 12) -> PrivatePlan:
    noise = SharedNoise(sites=6, honest=4, dimensions=100)
    schedule = Schedule(
        rounds=rounds, steps=1, rate=RATE_ONE, multiplier=4.0, clip=1.0, prototypes_sigma=None, shared=noise
    )
    return PrivatePlan(
        run="lesions/run-1", settings=PrivateSettings(), schedule=schedule, epsilon=50.0, delta=1e-5, unit=Unit.PATIENT
    )


def rounds_until_stopped(told: SiteConfig, plan: PrivatePlan) -> tuple[int, LedgerState, str]:
    """Book as an agent does, until a limit stops it."""
    with ledger_files(told) as files:
        ledger = Ledger.create(files, plan.terms(told), version="v")
        limits = Limits.of(told, plan, ledger.state)
        for number in range(1, plan.schedule.rounds + 1):
            events = plan.schedule.round_events(number)
            try:
                limits.admit(ledger.state, events)
            except BudgetExhausted as error:
                return number - 1, ledger.state, error.message
            ledger.commit(ledger.reserve(run=plan.run, round_number=number, events=events, noise=NoiseSource()))
        return plan.schedule.rounds, ledger.state, ""


def test_each_of_the_two_figures_has_its_own_limit(tmp_path: Path) -> None:
    plan = sharing()
    free, state, _ = rounds_until_stopped(config(tmp_path / "free", cap=50), plan)
    assert free == plan.schedule.rounds, "without cap_alone the figure alone is reported, and limits nothing"
    whole = privacy.alone_epsilon(state.history, 1e-5)
    assert whole is not None and whole > 1.5 * state.epsilon

    done, state, why = rounds_until_stopped(config(tmp_path / "alone", cap=50, cap_alone=0.6 * whole), plan)
    assert 0 < done < free and "cap_alone" in why
    within = privacy.alone_epsilon(state.history, 1e-5)
    assert within is not None and within <= 0.6 * whole

    done, state, why = rounds_until_stopped(config(tmp_path / "inside", cap=state.epsilon, cap_alone=1000), plan)
    assert done < free and "cap_alone" not in why


def test_a_round_without_shared_noise_counts_the_same_in_both_figures(tmp_path: Path) -> None:
    told = config(tmp_path, cap=8, cap_alone=8)
    state = begun(told, Signed(), rounds=2)
    limits = Limits.of(told, plan_of(told, Signed()), state)
    assert limits.alone is not None
    assert limits.alone.epsilon(merged(privacy.alone(state.history))) >= state.epsilon
    assert privacy.alone(state.history) == state.history


def test_proposed_noise_keeps_both_limits(tmp_path: Path) -> None:
    plan, told = sharing(), config(tmp_path, cap=50)
    state = LedgerState(terms=plan.terms(told), version="planned")
    free = privacy._proposal(plan, state, 20.0, Limits.of(told, plan, state))
    told = config(tmp_path, cap=50, cap_alone=20)
    limits = Limits.of(told, plan, state)
    bound = privacy._proposal(plan, state, 20.0, limits)
    assert free is not None and bound is not None and limits.alone is not None and bound > 1.5 * free
    for noise, fits in ((bound, True), (bound - 0.01, False)):
        events = replace(plan.schedule, multiplier=noise).events()
        assert (limits.alone.epsilon(merged(privacy.alone(events))) <= 20) is fits
