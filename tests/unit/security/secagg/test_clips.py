"""Clips and movement caps follow from the training schedule."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lazaret.errors import ConfigError
from security.secagg.clips import Clips, power_of_two_above

CLIPS = Clips(learning_rate=0.01, steps=10)


@pytest.mark.parametrize(("value", "exponent"), [(1.0, 0), (1.01, 1), (0.5, -1), (0.26, -1), (1e-30, -99), (3.0, 2)])
def test_power_of_two_above(value: float, exponent: int) -> None:
    assert power_of_two_above(value) == exponent
    assert 2.0**exponent >= value > 2.0 ** (exponent - 1)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_clips_need_a_positive_number(value: float) -> None:
    with pytest.raises(ConfigError):
        power_of_two_above(value)


def test_clips_follow_from_the_schedule() -> None:
    block = Clips(learning_rate=1e-3, steps=100).weights("w", (100,))
    assert block.clip_exponent == 0  # 8 * 0.1, rounded up
    assert block.movement_exponent == 1  # 2 * 0.1 * sqrt(100)
    pushed = Clips(learning_rate=1e-3, steps=100, momentum=0.75).weights("w", (100,))
    assert (pushed.clip_exponent, pushed.movement_exponent) == (2, 3)
    mean = CLIPS.running_mean("m", [4.0, 0.25], epsilon=0.0)
    assert mean.units == (1, -1) and not mean.nonnegative
    variance = CLIPS.running_variance("v", [4.0, 0.25], epsilon=0.0)
    assert variance.units == (2, -2) and variance.nonnegative


def test_another_clip_moves_its_cap_along() -> None:
    block = Clips(learning_rate=1e-3, steps=100).weights("w", (100,))
    wider = block.with_clip(block.clip_exponent + 3)
    assert wider.movement_exponent == block.movement_exponent + 3
    assert wider.with_clip(block.clip_exponent) == block


def test_a_dead_channel_gets_a_unit_near_the_others() -> None:
    units = CLIPS.running_variance("v", np.array([1.0] * 9 + [1e-12]), epsilon=1e-9).units
    assert units[-1] == -3 and set(units[:-1]) == {1}
