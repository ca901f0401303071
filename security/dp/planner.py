"""What planned rounds will cost, which noise fits a wanted epsilon, and the `dp.*` settings of a manifest.

docs/spec/differential-privacy.md, sections 2 and 6. Reads no data and no ledger file, so that a plan can be made and
shown before anything is booked. The agent books what `Schedule.round_events` gives: what is announced is what is
booked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any, Final, Literal, Self

from lazaret.errors import BudgetExhausted, ConfigError
from security.dp.accountant import (
    RATE_ONE,
    MechanismEvent,
    Spent,
    added,
    counts_event,
    dp_sgd_event,
    merged,
    metrics_event,
    prototypes_event,
    rate_at_least,
    rdp_epsilon,
    spent,
)
from security.dp.filter import PLAN_SHARE, BudgetFilter, choose_order, pinned, planned_epsilon, shares_noise
from security.dp.ledger import LedgerState, Terms, Unit
from security.dp.noise import SharedNoise
from security.secagg.layout import Layout

_LARGEST_MULTIPLIER = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A whole run, fixed before any data are read.

    :param multiplier: DP-SGD noise over the clip.
    :param counts_sigma: noise of the class counts, released before round 1; None without them.
    :param prototypes_sigma: noise of each prototype release; None without prototypes.
    :param prototypes_every: rounds between two prototype releases.
    :param metrics_sigma: noise of one local validation in each round; None without it.
    """

    rounds: int
    steps: int
    rate: int
    multiplier: float
    clip: float
    counts_sigma: float | None = 5.0
    prototypes_sigma: float | None = 10.0
    prototypes_every: int = 5
    metrics_sigma: float | None = None
    shared: SharedNoise | None = None

    def __post_init__(self) -> None:
        if self.shared is not None and (self.steps, self.rate) != (1, RATE_ONE):
            raise ConfigError(
                "shared noise is for one step a round over all patients",
                hint="steps = 1 and rate = 1: several steps between two sums have no such analysis",
            )
        if self.rounds < 1 or self.prototypes_every < 1:
            raise ConfigError("a schedule needs at least one round, and at least one round between prototype releases")

    def refreshes(self, round_number: int) -> bool:
        """Are prototypes released in this round (counted from 1)?"""
        return self.prototypes_sigma is not None and (round_number - 1) % self.prototypes_every == 0

    def round_events(self, round_number: int, *, first: bool | None = None) -> tuple[MechanismEvent, ...]:
        """What to reserve for one round, in the order of use.

        :param first: whether the site has released nothing yet, as in its first round or after it lost its state; by
            default, whether this is round 1.
        """
        first = round_number == 1 if first is None else first
        events: list[MechanismEvent] = []
        # Counts are released once; a site that has lost them releases, and pays for, them again (section 2).
        if first and self.counts_sigma is not None:
            events.append(counts_event(self.counts_sigma))
        if self.prototypes_sigma is not None and (first or self.refreshes(round_number)):
            # The first prototypes need two releases: one sum per class to split, then the first assignment (section 2).
            events += [prototypes_event(self.prototypes_sigma)] * (2 if first else 1)
        events.append(self._step())
        if self.metrics_sigma is not None:
            events.append(metrics_event(self.metrics_sigma))
        return tuple(events)

    def _step(self) -> MechanismEvent:
        if self.shared is None:
            return dp_sgd_event(multiplier=self.multiplier, clip=self.clip, rate=self.rate, steps=self.steps)
        return self.shared.event(self.multiplier)

    def events(self, first: int = 1) -> tuple[MechanismEvent, ...]:
        return tuple(event for number in range(first, self.rounds + 1) for event in self.round_events(number))


def cost(schedule: Schedule, *, delta: float, history: Sequence[MechanismEvent] = ()) -> Spent:
    """Epsilon after the whole schedule, on top of what was spent before."""
    return spent((*history, *schedule.events()), delta)


def terms_for(schedule: Schedule, *, population: str, unit: Unit, cap: float, delta: float) -> Terms:
    """The first line of a ledger that is begun for this schedule: its order and its plan."""
    events = schedule.events()
    return Terms(
        population=population,
        unit=unit,
        delta=delta,
        cap=cap,
        order=choose_order(events, cap=cap, delta=delta),
        planned=pinned(events, delta=delta),
    )


def rounds_affordable(
    schedule: Schedule, admit: Callable[[tuple[MechanismEvent, ...]], object], *, first: int = 1
) -> int:
    """How many rounds, from `first` on, are within every limit.

    :param admit: raises BudgetExhausted if all these events, on top of what is booked, are not.
    """
    asked: tuple[MechanismEvent, ...] = ()
    for number in range(first, schedule.rounds + 1):
        asked += schedule.round_events(number)
        try:
            admit(asked)
        except BudgetExhausted:
            return number - first
    return max(0, schedule.rounds - first + 1)


def propose_multiplier(schedule: Schedule, *, epsilon: float, delta: float, state: LedgerState | None = None) -> float:
    """The smallest DP-SGD noise multiplier, in hundredths, with which the schedule stays within epsilon.

    With a ledger, its filter decides, including what is already booked; without one, the schedule is fixed in advance
    and judged by PLD, as a ledger that is begun for it will do.
    """
    try:
        if state is None and schedule.shared is not None:
            return least_multiplier(
                schedule, lambda events: begun_epsilon(events, epsilon=epsilon, delta=delta) <= epsilon
            )
        if state is None:
            return _least_planned(schedule, epsilon, delta)
        return least_multiplier(schedule, _within(epsilon, state))
    except ConfigError as error:
        raise ConfigError(
            f"no amount of gradient noise keeps this schedule within epsilon {epsilon:g} at delta {delta:g}",
            hint=error.hint,
        ) from error


def least_multiplier(schedule: Schedule, within: Callable[[Sequence[MechanismEvent]], bool]) -> float:
    """The smallest DP-SGD noise multiplier, in hundredths, with which all events of the schedule are within bounds."""

    def fits(hundredths: int) -> bool:
        return within(replace(schedule, multiplier=hundredths / 100).events())

    low, high = 0, 100
    while not fits(high):
        low, high = high, 2 * high
        if high > 100 * _LARGEST_MULTIPLIER:
            raise ConfigError(
                "no amount of gradient noise is enough",
                hint="fewer prototype releases, or more noise on prototypes, counts and metrics",
            )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high / 100


def begun_epsilon(events: Sequence[MechanismEvent], *, epsilon: float, delta: float) -> float:
    """What a schedule costs under a filter that is begun for it with this limit; infinite if no order fits."""
    if not shares_noise(events):
        return planned_epsilon(events, delta)
    try:
        order = choose_order(events, cap=epsilon, delta=delta)
        return BudgetFilter(order=order, delta=delta, cap=epsilon).epsilon(merged(events))
    except ConfigError:
        return math.inf


def both_figures(inside: float, alone: float, honest: int) -> str:
    """The two figures of shared noise, in the words in which they are always said."""
    return (
        f"epsilon {inside:.2f} inside the sum, which counts on {honest} honest survivors, on the quorum and on one "
        f"release of each sum; {alone:.2f} alone, if all other sites collude"
    )


@lru_cache(maxsize=64)
def _least_planned(schedule: Schedule, epsilon: float, delta: float) -> float:
    """By PLD, which takes a second each time. Renyi never shows less, so its answer is where the search begins."""
    enough = least_multiplier(schedule, lambda events: rdp_epsilon(events, PLAN_SHARE * delta)[0] <= epsilon)

    low, high = 0, round(100 * enough)
    guess = high - 1
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        found = planned_epsilon(replace(schedule, multiplier=guess / 100).events(), delta)
        low, high = (low, guess) if found <= epsilon else (guess, high)
        # Epsilon falls a little faster than the noise grows, so the next guess is near, from either side.
        guess = math.ceil(guess * (found / epsilon) ** 0.85)
    return high / 100


def _within(epsilon: float, state: LedgerState) -> Callable[[Sequence[MechanismEvent]], bool]:
    rule = state.terms.filter()
    return lambda events: rule.epsilon(added(state.total, events)) <= min(epsilon, rule.cap)


# The `dp.*` settings of a manifest. The manifest's table [privacy] sets the guarantee (epsilon, delta, clip, least
# noise, unit); these settings are the schedule that keeps it. They are the same at all sites, and public (section 2).

PREFIX: Final = "dp."
Norm = Literal["frozen", "group"]
NORMS: Final = ("frozen", "group")
Engine = Literal["auto", "fast", "opacus"]
ENGINES: Final = ("auto", "fast", "opacus")
Noise = Literal["site", "shared"]
Trains = Literal["all", "last_blocks", "adapters", "head"]
TRAINS: Final = ("all", "last_blocks", "adapters", "head")
NOISES: Final = ("site", "shared")
_WORDS: Final = frozenset({"norm", "engine", "trainable", "noise"})
_WHOLE: Final = frozenset({"steps", "prototypes_every", "dimensions", "views"})
_MAYBE_ZERO: Final = frozenset({"projection"})


def _number(settings: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A setting of a manifest, where decimals are text."""
    with suppress(TypeError, ValueError):
        found = float(settings.get(name, default))
        if math.isfinite(found):
            return found
    raise ConfigError(f"{name} is not a number", where="manifest [training.settings]")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateSettings:
    """What all sites do in the same way in a private round.

    :param rate: probability of a patient to be sampled in one step.
    :param prototypes_sigma: noise of a prototype release; None for a method without prototypes.
    :param dimensions: width that features are projected to before prototypes are released.
    :param norm: what replaces BatchNorm in the initial model (npr/dp/engine.py).
    :param engine: how gradients of each record are computed (npr/dp/engine.py). `npr-lab model` compares it with
        autograd and writes what `auto` has become, so that a published manifest never has `auto`.
    :param trainable: what learns; the rest is the public network of the initial file, and is not sent.
    :param projection: numbers that features are projected to by a public matrix before the head; 0 for none.
    :param views: images of a patient over which the gradient is averaged before its one clip; with `head` only.
    :param noise: `site`: each site adds all the noise that its patients need; `shared`: its part (section 4).
    """

    steps: int = 10
    rate: float = 0.05
    counts_sigma: float = 5.0
    prototypes_sigma: float | None = 10.0
    prototypes_every: int = 5
    dimensions: int = 64
    norm: Norm = "group"
    engine: Engine = "auto"
    trainable: Trains = "all"
    projection: int = 0
    views: int = 1
    noise: Noise = "site"

    def __post_init__(self) -> None:
        for name in _WHOLE:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{value!r} is not a whole number above zero", where=PREFIX + name)
        if type(self.projection) is not int or self.projection < 0:
            raise ConfigError(f"{self.projection!r} is not a whole number", where=f"{PREFIX}projection")
        if self.views > 1 and self.trainable != "head":
            raise ConfigError("several views of a patient need trainable = head", where=f"{PREFIX}views")
        for name, known in (("norm", NORMS), ("engine", ENGINES), ("trainable", TRAINS), ("noise", NOISES)):
            if getattr(self, name) not in known:
                given = getattr(self, name)
                raise ConfigError(f"{given!r} is not one of {', '.join(known)}", where=f"{PREFIX}{name}")
        if self.noise == "shared" and (self.steps, self.rate, self.prototypes_sigma) != (1, 1.0, None):
            raise ConfigError(
                "shared noise is for one step a round over all patients, without prototypes",
                where=f"{PREFIX}noise",
                hint="dp.steps = 1, dp.rate = 1, a method without NPR such as fedavg",
            )
        rate_at_least(self.rate)
        counts_event(self.counts_sigma)
        if self.prototypes_sigma is not None:
            prototypes_event(self.prototypes_sigma)

    def schedule(
        self,
        *,
        rounds: int,
        multiplier: float,
        clip: float,
        metrics_sigma: float | None = None,
        shared: SharedNoise | None = None,
    ) -> Schedule:
        """The whole run at this much gradient noise."""
        return Schedule(
            rounds=rounds,
            steps=self.steps,
            rate=rate_at_least(self.rate),
            multiplier=multiplier,
            clip=clip,
            counts_sigma=self.counts_sigma,
            prototypes_sigma=self.prototypes_sigma,
            prototypes_every=self.prototypes_every,
            metrics_sigma=metrics_sigma,
            shared=shared,
        )

    def shared_noise(
        self,
        layout: Layout,
        *,
        clip: float,
        settings: Mapping[str, Any],
        weights: str,
        honest: int,
    ) -> SharedNoise:
        """What `noise = shared` means under a manifest.

        :param settings: all of the manifest; what is sent is one step of SGD, whose momentum is public, so that any
            other optimiser has no place.
        :param honest: `security.secagg.thresholds.least_honest`.
        :raises ConfigError: where something of the manifest is not fit for it.
        """
        plain = {"optimizer": "sgd", "weight_decay": 0.0, "head_decay": 0.0, "milestones": ""}
        for name, wanted in plain.items():
            given = settings.get(name, wanted)
            if (_number(settings, name, wanted) if isinstance(wanted, float) else given) != wanted:
                raise ConfigError(
                    f"{name} = {given!r}, but with shared noise a round is one step of SGD",
                    where=f"{PREFIX}noise",
                    hint=f"export the model with {name} = {wanted!r}",
                )
        if weights != "samples":
            raise ConfigError(
                f"weights = {weights!r}, but with shared noise a step is divided by the noisy number of patients",
                where="[training] weights",
                hint='weights = "samples"',
            )
        return SharedNoise.of(
            layout,
            clip=clip,
            learning_rate=_number(settings, "learning_rate"),
            honest=honest,
            momentum=_number(settings, "momentum", 0.0),
        )

    def to_settings(self) -> dict[str, int | float | str]:
        """For a plan's [training.settings]; what is None is left out."""
        return {PREFIX + name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def of(cls, settings: Mapping[str, Any], *, where: str = "manifest [training.settings]") -> Self | None:
        """From all settings of a manifest, where decimals are text; None without a single `dp.` key."""
        found = {name.removeprefix(PREFIX): value for name, value in settings.items() if name.startswith(PREFIX)}
        if not found:
            return None
        known = [field.name for field in fields(cls)]
        for name in found:
            if name not in known:
                raise ConfigError(f"unknown setting {PREFIX}{name}", where=where, hint=f"there are {', '.join(known)}")
        try:
            values: dict[str, Any] = {
                name: value if name in _WHOLE | _WORDS | _MAYBE_ZERO else float(value) for name, value in found.items()
            }
        except (TypeError, ValueError) as error:
            raise ConfigError("a dp. setting is not a number", where=where) from error
        # Absent means no prototypes; the default of the class is for people who type options.
        return cls(**{"prototypes_sigma": None} | values)
