"""Small federations for the tests of secure aggregation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from protos.loopback import LoopbackFederation, sent_message
from security.clock import ManualClock
from security.crypto.prg import Words
from security.crypto.ring import DEFAULT_BITS
from security.identity.membership import AggregationPolicy
from security.rng import CountedRandomness
from security.secagg import fixed_point, messages, records
from security.secagg import state as states
from security.secagg.effects import Effects, Persist
from security.secagg.fields import Wire
from security.secagg.layout import Block, Layout
from security.secagg.site.machine import SiteMachine

CONFIG = bytes(range(32))


def names(count: int) -> list[str]:
    return [f"site-{index:02d}" for index in range(count)]


def small_layout(roster: int, *, words: int = 40, ring_bits: int = DEFAULT_BITS, weight_cap: int = 64) -> Layout:
    tensors = [
        Block(name="stem", shape=(words,), kind="mean", clip_exponent=0, movement_exponent=20),
        Block(name="bias", shape=(3,), kind="mean", clip_exponent=2, movement_exponent=20),
    ]
    return Layout.of(tensors, roster_size=roster, weight_cap=weight_cap, ring_bits=ring_bits)


def take_policy(machine: SiteMachine, policy: AggregationPolicy) -> Effects:
    """Go on under another policy, as a site does that has adopted a manifest."""
    machine.admit(policy)
    machine.core.mandate.policy = policy  # type: ignore[misc]
    return machine.renewed()


Hook = Callable[[str, str, Wire], Iterable[Wire]]


class RecordedFederation(LoopbackFederation):
    """Keeps every record a site ever wrote, also those that compaction has dropped since.

    `hook` stands on the wire: it gets sender, receiver and message, and says what arrives instead.
    """

    hook: Hook | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        self.written: dict[str, list[Wire]] = {}
        super().__init__(*args, **options)

    def _stream(self, sender: str, receiver: str, source: Iterator[Wire]) -> Iterator[tuple[str, str, bytes]]:
        if self.hook is None:
            return super()._stream(sender, receiver, source)
        hook = self.hook
        changed = (arrives for message in source for arrives in hook(sender, receiver, message))
        return super()._stream(sender, receiver, changed)

    def _do_site(self, name: str, effects: Effects) -> None:
        self.written.setdefault(name, []).extend(e.record for e in effects if isinstance(e, Persist))
        super()._do_site(name, effects)

    def check_promises(self) -> None:
        """In each attempt at most one AGREE, and not both RELEASE and ABORT; adverts only ever count up."""
        for name, history in self.written.items():
            agreed = [record.ctx for record in history if isinstance(record, records.Agreed)]
            assert len(set(agreed)) == len(agreed), f"{name} agreed twice"
            ends = [record for record in history if isinstance(record, records.AttemptEnded)]
            assert len({record.ctx for record in ends}) == len(ends), f"{name} ended an attempt twice"
            sequence = [record.advert.sequence for record in history if isinstance(record, records.Joined)]
            assert sequence == sorted(set(sequence)), f"{name} repeated an advert"

    def releases(self) -> dict[tuple[bytes, bytes], set[str]]:
        """Who has sent shares, by keys and set; needs a transcript."""
        found: dict[tuple[bytes, bytes], set[str]] = {}
        for sender, _, data in self.transcript or ():
            message = sent_message(sender, data)
            if isinstance(message, messages.Unmask):
                found.setdefault((message.kx, message.survivors), set()).add(sender)
        return found


def federation(
    count: int, *, seed: bytes = b"tests", layout: Layout | None = None, **options: Any
) -> RecordedFederation:
    layout = layout or small_layout(count)
    model = states.canonical(np.linspace(-1, 1, layout.state_words))
    options.setdefault("clock", ManualClock())
    return RecordedFederation(
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
    """The sum in whole numbers of any size, then into the ring, as its words lie in memory."""
    chosen = [updates[site].tolist() for site in survivors]
    ring, half = 2**layout.ring_bits, 2 ** (layout.ring_bits - 1)
    sums = [(sum(column) + half) % ring - half for column in zip(*chosen, strict=True)]
    return [value % 2 ** (8 * layout.dtype.itemsize) for value in sums]
