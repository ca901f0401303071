"""The `dp.*` settings of a manifest: one form, nothing unknown, nothing that could not be booked."""

from __future__ import annotations

import pytest

from lazaret.errors import ConfigError
from security.dp.accountant import Mechanism, rate_at_least
from security.dp.planner import PrivateSettings

WHOLE = PrivateSettings(steps=4, rate=0.25, counts_sigma=8.0, prototypes_sigma=4.0, prototypes_every=2, norm="frozen")


def test_a_manifest_gives_back_what_was_exported() -> None:
    as_text = {name: repr(value) if isinstance(value, float) else value for name, value in WHOLE.to_settings().items()}
    assert PrivateSettings.of({"learning_rate": "0.1", **as_text}) == WHOLE
    assert PrivateSettings.of({"learning_rate": "0.1"}) is None


def test_without_prototypes_none_are_booked() -> None:
    settings = PrivateSettings.of({"dp.steps": 3, "dp.rate": "0.5"})
    assert settings is not None and settings.prototypes_sigma is None
    schedule = settings.schedule(rounds=2, multiplier=1.5, clip=0.5, metrics_sigma=6.0)
    kinds = [event.kind for event in schedule.events()]
    assert kinds == [Mechanism.CLASS_COUNTS, Mechanism.DP_SGD, Mechanism.METRICS, Mechanism.DP_SGD, Mechanism.METRICS]
    assert schedule.rate == rate_at_least(0.5) and schedule.round_events(1)[1].sigma == 0.75


@pytest.mark.parametrize(
    "settings",
    [
        {"dp.stepz": 3},
        {"dp.steps": "3"},
        {"dp.steps": True},
        {"dp.rate": "1.5"},
        {"dp.rate": "often"},
        {"dp.counts_sigma": "0.3"},
        {"dp.prototypes_sigma": "0"},
        {"dp.norm": "batch"},
    ],
)
def test_what_could_not_be_kept_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        PrivateSettings.of(settings)


def test_a_late_joiner_books_its_first_releases_then() -> None:
    schedule = WHOLE.schedule(rounds=4, multiplier=1.0, clip=1.0)
    late = [event.kind for event in schedule.round_events(4, first=True)]
    assert late == [Mechanism.CLASS_COUNTS, Mechanism.PROTOTYPES, Mechanism.PROTOTYPES, Mechanism.DP_SGD]
    assert [event.kind for event in schedule.round_events(4)] == [Mechanism.DP_SGD]
    assert [event.kind for event in schedule.round_events(1, first=False)] == [Mechanism.PROTOTYPES, Mechanism.DP_SGD]
