"""Small federations for the tests of secure aggregation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from security.clock import ManualClock
from security.prg import Words
from security.rng import CountedRandomness
from security.secagg import fixed_point
from security.secagg import state as states
from security.secagg.layout import Block, Layout
from security.secagg.loopback import LoopbackFederation

CONFIG = bytes(range(32))


def names(count: int) -> list[str]:
    return [f"site-{index:02d}" for index in range(count)]


def small_layout(roster: int, *, words: int = 40, ring_bits: int = 32, weight_cap: int = 64) -> Layout:
    tensors = [
        Block(name="stem", shape=(words,), kind="mean", clip_exponent=0, movement_exponent=20),
        Block(name="bias", shape=(3,), kind="mean", clip_exponent=2, movement_exponent=20),
    ]
    return Layout.of(tensors, roster_size=roster, weight_cap=weight_cap, ring_bits=ring_bits)


def federation(
    count: int, *, seed: bytes = b"tests", layout: Layout | None = None, **options: Any
) -> LoopbackFederation:
    layout = layout or small_layout(count)
    model = states.canonical(np.linspace(-1, 1, layout.state_words))
    options.setdefault("clock", ManualClock())
    return LoopbackFederation(
        layout, names(count), model, config_hash=CONFIG, randomness=CountedRandomness(seed), **options
    )


def random_updates(layout: Layout, sites: Iterable[str], seed: int) -> dict[str, Words]:
    """Encoded updates that differ from site to site and from seed to seed."""
    generator = np.random.default_rng(seed)
    return {
        site: fixed_point.encode(
            layout,
            generator.uniform(-0.5, 0.5, layout.state_words).astype(np.float32),
            weight=int(generator.integers(1, layout.weight_cap + 1)),
        ).words
        for site in sites
    }


def reference_sum(layout: Layout, updates: Mapping[str, Words], survivors: Iterable[str]) -> list[int]:
    """The sum in whole numbers of any size, then into the ring."""
    chosen = [updates[site].tolist() for site in survivors]
    return [sum(column) % 2**layout.ring_bits for column in zip(*chosen, strict=True)]
