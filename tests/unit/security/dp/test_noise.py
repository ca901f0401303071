"""The secret generator: the right distribution, never repeated, never saved."""

from __future__ import annotations

import copy
import math
import os
import pickle

import numpy as np
import pytest
from scipy import stats

from lazaret.errors import LocalProtocolError
from security.dp.noise import NoiseSource, _BoxMuller, grid_step
from security.rng import CountedRandomness


def test_gaussian_values_are_standard_normal() -> None:
    values = NoiseSource().gaussian(np.empty(400_001))
    assert stats.kstest(values, "norm").pvalue > 1e-6
    assert abs((values**4).mean() - 3) < 0.1
    # Both halves of a Box-Muller pair are used; a shared radius must not show as correlation, nor in the squares.
    for power in (1, 2):
        assert abs(np.corrcoef(values[:-1:2] ** power, values[1::2] ** power)[0, 1]) < 0.015


def test_fast_values_are_those_of_the_formula() -> None:
    """Of Box and Muller, on random words and on those at the edges of length and angle."""
    edges = np.array([0, 1, 2, 2**49 - 1, 2**49, 2**63 - 1, 2**63, 2**64 - 1], dtype=np.uint64)
    lengths, angles = (np.concatenate([NoiseSource().words(50_000), part]) for part in (edges, edges[::-1]))
    work = _BoxMuller(lengths.size)
    work.memory[:-15] = np.concatenate([lengths, angles]).tobytes()
    radius = np.sqrt(-2 * np.log(((lengths // 2).astype(np.float64) + 1) / 2**63))
    angle = angles.astype(np.float64) * (2 * math.pi / 2**64)
    values = work.normal()
    np.testing.assert_allclose(values[0::2], radius * np.cos(angle), atol=3e-14)
    np.testing.assert_allclose(values[1::2], radius * np.sin(angle), atol=3e-14)
    assert np.isfinite(values).all() and np.abs(values).max() > 9.3


@pytest.mark.parametrize("size", [0, 1, 2, 3, 2**15 - 1, 2**15 + 1])
def test_any_size_is_filled(size: int) -> None:
    out = np.full(size, np.nan)
    assert NoiseSource().gaussian(out) is out
    assert np.isfinite(out).all()


def test_below_is_exactly_uniform_also_where_a_plain_remainder_is_not() -> None:
    bound = np.full(30_000, np.uint64(3 << 61))
    drawn = NoiseSource().below(bound)
    assert (drawn < bound).all()
    # A plain remainder would fall into the first third with chance 3/8 instead of 1/3.
    third = (drawn < np.uint64(1 << 61)).mean()
    assert abs(third - 1 / 3) < 0.016
    plain = (NoiseSource().words(30_000) % bound < np.uint64(1 << 61)).mean()
    assert plain > 0.36


def test_two_sources_and_a_fork_never_repeat_each_other() -> None:
    one, other = NoiseSource(), NoiseSource()
    child = one.fork()
    assert len({one.bytes(32), other.bytes(32), child.bytes(32)}) == 3


def test_a_seeded_source_repeats_and_says_so() -> None:
    one, other = (NoiseSource(CountedRandomness(b"seed")) for _ in range(2))
    assert one.bytes(64) == other.bytes(64)
    assert not one.secret
    assert not one.fork().secret
    assert NoiseSource().secret
    assert "not private" in repr(one)


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_source_cannot_be_saved_or_copied(copier: object) -> None:
    with pytest.raises(TypeError, match="never saved"):
        copier(NoiseSource())  # type: ignore[operator]


def test_a_forked_process_cannot_go_on_with_the_parents_stream() -> None:
    source = NoiseSource()
    child = os.fork()
    if child == 0:
        try:
            source.bytes(8)
            os._exit(1)
        except LocalProtocolError:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_process_number_is_what_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    source = NoiseSource()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(LocalProtocolError, match="forked"):
        source.bytes(1)


@pytest.mark.parametrize("sigma", [0.001, 0.3, 1.0, 2.0, 37.5])
def test_the_grid_is_a_power_of_two_below_a_thousandth_of_sigma(sigma: float) -> None:
    step = grid_step(sigma)
    assert math.frexp(step)[0] == 0.5
    assert sigma / 2048 < step <= sigma / 1024


def resumed(source: NoiseSource) -> NoiseSource:
    """The source as it is in a second copy of the same memory."""
    copied = NoiseSource.__new__(NoiseSource)
    copied.__dict__.update(source.__dict__)
    return copied


def test_a_memory_that_is_resumed_twice_does_not_draw_the_same_noise_twice() -> None:
    source = NoiseSource()
    source.bytes(16)
    other = resumed(source)
    assert source.bytes(64) != other.bytes(64)
    assert not np.array_equal(source.gaussian(np.empty(8)), other.gaussian(np.empty(8)))


def test_a_memory_that_is_resumed_twice_twin() -> None:
    """Without fresh bytes, as in a seeded source, both copies draw the same, and the noise cancels."""
    source = NoiseSource(CountedRandomness(b"seed"))
    other = resumed(source)
    assert source.bytes(64) == other.bytes(64)
    assert np.array_equal(source.gaussian(np.empty(8)), other.gaussian(np.empty(8)))
    assert source.bytes(64) != source.bytes(64), "and yet a source does not repeat itself"
