"""From a local round to the vector: what a site beyond the weight cap adds to the slots."""

from __future__ import annotations

import numpy as np
import pytest

from lazaret.errors import DataError
from security.secagg.fixed_point import decode, encode
from security.secagg.layout import Block, Layout, most_weight
from security.secrets import Secret
from site_agent import contribution
from site_agent.contribution import LocalResult

CAP = most_weight(10)
LAYOUT = Layout.of(
    [Block(name="w", shape=(4,), kind="mean")],
    roster_size=10,
    weight_cap=CAP,
    ring_bits=16,
    loss_exponent=CAP.bit_length() + 4,
    hits_maximum=CAP,
)
KEY = Secret(bytes(32))


def local(samples: int, loss_sum: float, hits: int) -> LocalResult:
    update = np.zeros(4, dtype=np.float32)
    return LocalResult(update=update, samples=samples, loss_sum=loss_sum, hits=hits, steps=1, wall_ms=1)


def sent(result: LocalResult) -> tuple[int, float | None, int | None]:
    update, _ = contribution.encode(
        LAYOUT,
        result,
        round_number=1,
        state_hash=bytes(32),
        config_hash=bytes(32),
        weights="samples",
        share_metrics=True,
        rounding=KEY,
    )
    found = decode(LAYOUT, update.words)
    return found.weight, found.loss, found.hits


def test_a_site_of_more_images_than_the_cap_reports_the_metrics_of_as_many_as_it_counts_for() -> None:
    """In 16 bits the cap is small, and most hospitals are beyond it."""
    weight, loss, hits = sent(local(samples=6_000, loss_sum=9_000.0, hits=4_500))
    assert weight == CAP and hits == CAP * 3 // 4
    assert loss == pytest.approx(1.5 * CAP, rel=0.01)


def test_a_site_below_the_cap_reports_its_metrics_as_they_are() -> None:
    weight, loss, hits = sent(local(samples=60, loss_sum=90.0, hits=45))
    assert (weight, hits) == (60, 45) and loss == pytest.approx(90.0, rel=0.01)


def test_unscaled_metrics_of_a_large_site_would_be_refused_twin() -> None:
    with pytest.raises(DataError, match="hit count"):
        encode(LAYOUT, np.zeros(4, dtype=np.float32), weight=CAP, loss=0.0, hits=4_500, rounding=KEY)
    with pytest.raises(DataError, match="loss sum"):
        encode(LAYOUT, np.zeros(4, dtype=np.float32), weight=CAP, loss=9_000.0, hits=0, rounding=KEY)
