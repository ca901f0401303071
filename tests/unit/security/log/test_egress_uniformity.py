"""The tripwire on masked vectors."""

from __future__ import annotations

import os

import numpy as np
import pytest
from scipy.stats import chisquare

from security.crypto import prg
from security.log import egress
from security.log.egress import LEAST_UNIFORMITY
from security.secagg import fixed_point
from security.secagg.clips import Clips
from security.secagg.layout import Layout
from security.secrets import Secret

WORDS = 50_000


def encoded(scale: float = 0.01) -> np.ndarray:
    layout = Layout.of([Clips(learning_rate=0.01, steps=1).weights("w", (WORDS,))], roster_size=10, weight_cap=128)
    update = np.random.default_rng(1).standard_normal(WORDS).astype(np.float32) * np.float32(scale)
    return fixed_point.encode(layout, update, weight=100).words


def test_agrees_with_a_textbook_chi_square() -> None:
    for count in (4096, 5001, 300_001):
        data = os.urandom(count)
        expected = chisquare(np.bincount(np.frombuffer(data, np.uint8), minlength=256)).pvalue
        assert egress.p_value(data) == pytest.approx(expected, rel=1e-9)


def test_masked_passes_and_unmasked_fails() -> None:
    plain = encoded()
    assert egress.p_value(plain.tobytes()) < LEAST_UNIFORMITY
    masked = plain.copy()
    prg.apply_streams(masked, add=[Secret(os.urandom(32))])
    assert egress.p_value(masked.tobytes()) > LEAST_UNIFORMITY


def test_a_small_leak_in_an_upload_is_seen() -> None:
    """One chunk of eight left without its masks."""
    words = np.concatenate([encoded()[:WORDS]] * 4)
    plain = words.copy()
    prg.apply_streams(words, add=[Secret(os.urandom(32))])
    words[: WORDS // 2] = plain[: WORDS // 2]
    assert egress.p_value(words.tobytes()) < LEAST_UNIFORMITY


@pytest.mark.parametrize("count", [0, 1, 2, 127])
def test_too_few_bytes_cannot_be_judged(count: int) -> None:
    assert egress.p_value(bytes(count)) == 1.0


def test_short_vectors_are_judged_by_half_bytes() -> None:
    assert egress.p_value(bytes(400)) < 1e-9
    assert min(egress.p_value(os.urandom(400)) for _ in range(50)) > 1e-9
