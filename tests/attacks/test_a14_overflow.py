"""A14: numbers that do not fit: full clips at full weight from everybody, rosters that grew, NaN.

Random layouts and inputs against whole numbers of any size are in tests/property/test_secure_sum.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lazaret.errors import ConfigError, DataError
from security.secagg import fixed_point
from security.secagg.context import SumVerdict
from security.secagg.layout import Layout
from tests.support.evil import EvilCoordinator, evil
from tests.support.secagg_world import reference_sum, small_layout


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_honest_extremes_neither_wrap_nor_void(sign: float) -> None:
    run = evil(5, wide=False, colluders=0)
    layout = run.policy.layout
    update = np.full(layout.state_words, sign, dtype=np.float32)
    update[40:] = sign * 4
    updates = {name: fixed_point.encode(layout, update, weight=layout.weight_cap).words for name in run.sites}
    outcome = run.run_round(updates)
    assert outcome.verdict is SumVerdict.GOOD and outcome.total is not None
    assert outcome.total.tolist() == reference_sum(layout, updates, run.sites)
    assert fixed_point.decode(layout, outcome.total).mean == pytest.approx(update.astype(float))
    run.check_promises()


def test_more_sites_than_the_layout_was_made_for() -> None:
    with pytest.raises(ConfigError, match="smaller roster"):
        evil(5, layout=small_layout(3))


def heavy_round() -> EvilCoordinator:
    """Three honest sites of 2^30 samples each: their count does not fit a signed word."""
    layout = small_layout(3, weight_cap=2**30)
    run = evil(3, colluders=0, layout=layout)
    update = np.full(layout.state_words, 0.5, dtype=np.float32)
    outcome = run.run_round({name: fixed_point.encode(layout, update, weight=2**30).words for name in run.sites})
    assert outcome.verdict is SumVerdict.VOID
    return run


def test_a_weight_cap_that_could_wrap_is_no_layout() -> None:
    with pytest.raises(ConfigError, match="do not fit 24 bits"):
        small_layout(3, weight_cap=2**30)


def test_a_weight_cap_that_could_wrap_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unproven numbers: a round of honest sites is void."""
    monkeypatch.setattr(Layout, "_require_no_overflow", lambda self: None)
    heavy_round()


def test_a_quantum_is_derived_and_never_received() -> None:
    told = small_layout(4).to_dict()
    assert "quantum" not in told
    with pytest.raises(ConfigError):
        Layout.from_dict(told | {"quantum": 2**31 - 1})
    assert replace(small_layout(4), roster_size=8).quantum * 8 <= 2**31 - 1


def diverged(run: EvilCoordinator) -> dict[str, np.ndarray]:
    """One site's training has diverged in one coordinate."""
    layout = run.policy.layout
    updates = run.updates(1)
    broken = np.zeros(layout.state_words, dtype=np.float32)
    broken[7] = np.nan
    return updates | {"site-00": fixed_point.encode(layout, broken, weight=1).words}


def test_nan_never_leaves_a_site() -> None:
    with pytest.raises(DataError, match="nothing was sent"):
        diverged(evil(wide=False))


def test_nan_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """One NaN, cast to a whole number (the least of 32 bits, and 0 in the ring of 24), voids the round of all."""
    monkeypatch.setattr(fixed_point, "_cut", lambda *_args, **_named: 0)
    run = evil(layout=small_layout(4, ring_bits=32))
    with np.errstate(invalid="ignore"):
        assert run.run_round(diverged(run)).verdict is SumVerdict.VOID
