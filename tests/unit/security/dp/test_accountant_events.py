"""Events refuse what cannot be booked, and read back to themselves."""

from __future__ import annotations

import math

import pytest

from lazaret.errors import ConfigError
from security.dp.accountant import (
    RATE_ONE,
    Mechanism,
    MechanismEvent,
    counts_event,
    dp_sgd_event,
    metrics_event,
    prototypes_event,
)

GOOD = {"kind": Mechanism.DP_SGD, "sigma": 1.0, "sensitivity": 1.0, "rate": 100, "steps": 3}


@pytest.mark.parametrize(
    "change",
    [
        {"sigma": 0.0},
        {"sigma": -1.0},
        {"sigma": math.nan},
        {"sigma": math.inf},
        {"sensitivity": 0.0},
        {"sensitivity": math.nan},
        {"rate": 0},
        {"rate": RATE_ONE + 1},
        {"steps": 0},
        {"steps": 2**40},
        {"kind": Mechanism.PROTOTYPES},
        {"kind": Mechanism.CLASS_COUNTS, "rate": RATE_ONE, "sigma": 0.1},
        {"kind": Mechanism.CLASS_COUNTS, "rate": RATE_ONE, "sigma": 2048.0},
    ],
)
def test_impossible_events_are_refused(change: dict[str, object]) -> None:
    MechanismEvent(**GOOD)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        MechanismEvent(**{**GOOD, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "event",
    [
        dp_sgd_event(multiplier=1.1, clip=0.3, rate=12345, steps=42),
        counts_event(5),
        prototypes_event(10.5, releases=3),
        metrics_event(8),
    ],
)
def test_an_event_reads_back_to_itself(event: MechanismEvent) -> None:
    assert MechanismEvent.from_json(event.to_json()) == event


@pytest.mark.parametrize(
    "change",
    [
        {"extra": 1},
        {"sigma": "1.00"},
        {"sigma": 1.0},
        {"rate": "100"},
        {"rate": True},
        {"steps": 1.0},
        {"kind": "laplace"},
        {"sigma": "-1.0"},
    ],
)
def test_other_spellings_are_refused(change: dict[str, object]) -> None:
    value = {**MechanismEvent(**GOOD).to_json(), **change}  # type: ignore[arg-type]
    with pytest.raises((ValueError, TypeError)):
        MechanismEvent.from_json(value)
    with pytest.raises(ValueError):
        MechanismEvent.from_json([value])


def test_multiplier_is_noise_over_sensitivity() -> None:
    assert dp_sgd_event(multiplier=2.0, clip=0.25, rate=1, steps=1).sigma == 0.5
    assert metrics_event(8.0).multiplier == pytest.approx(8 / math.sqrt(2))
