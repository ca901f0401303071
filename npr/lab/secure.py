"""Secure aggregation in the lab: every round's sum goes through the real protocol, both sides in this process.

The lab's `Aggregator` takes vectors and gives their weighted sum. Here each vector becomes an update against the
global model, is encoded and masked by a site's machine, summed by the coordinator's machine, and the next model is the
one that all sites compute from the integer sum. It differs from plain aggregation by rounding to fixed point alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Final

import numpy as np

from lazaret.errors import DataError, PolicyViolation
from npr.device import to_host
from npr.dp.federation import PrivateFederation
from npr.federation import Federation
from npr.params import Contribution, ParameterManifest, Sum, Vector
from npr.wire_layout import WireModel, all_shares
from protos.loopback import LoopbackFederation
from security.crypto.ring import DEFAULT_BITS
from security.identity.pinned_files import blocks_of
from security.rng import SystemRandomness
from security.secagg.clips import Clips
from security.secagg.context import SumVerdict
from security.secagg.fixed_point import encode
from security.secagg.layout import HITS, LOSS, Block, Layout, most_weight
from security.secagg.state import CEILINGS_ALONE, MovementRule, canonical
from security.secagg.thresholds import LEAST_SURVIVORS
from security.secrets import Secret

# Beside a model a method may send numbers up to 2^10, which the ring of 64 bits resolves to 3e-8.
EXTRA_CLIP: Final = 10


def require_enough_sites(sites: int) -> None:
    if sites < LEAST_SURVIVORS:
        raise PolicyViolation(
            f"{sites} sites are too few for secure aggregation",
            where="--aggregation secure",
            hint=f"use {LEAST_SURVIVORS} sites or more",
        )


class SecureAggregator:
    """Sums for one federation. A run that continues after a kill starts the protocol again from its newest model.

    :param layout: of a manifest, for the very numbers that a federation over the wire computes; else one is derived.
    :param movement: of the same manifest; else a step is bounded by the layout's ceilings alone.
    :param ring_bits: of the layout that is derived.
    """

    def __init__(
        self,
        federation: Federation,
        *,
        rounds: int,
        layout: Layout | None = None,
        movement: MovementRule = CEILINGS_ALONE,
        ring_bits: int = DEFAULT_BITS,
    ) -> None:
        require_enough_sites(len(federation.sites))
        self._federation = federation
        # Under DP a refusal that depends on the data would be a release of its own, so values are cut to their clips.
        self._private = isinstance(federation, PrivateFederation)
        self._groups = all_shares(federation.method, rounds)
        self.layout = layout or make_layout(federation, self._groups, ring_bits)
        self._wire = WireModel(self.layout, federation.model)
        self._start_canonical()
        self._scratch = copy.deepcopy(federation.model)
        self._movement = movement
        self._rng = SystemRandomness()
        self._protocol: LoopbackFederation | None = None

    def _start_canonical(self) -> None:
        """Everybody starts from the canonical form of the initial model, as on the wire: no subnormals."""
        state = canonical(self._wire.state(self._federation.model))
        for model in (self._federation.model, *(site.model for site in self._federation.sites)):
            self._wire.load(model, state, self._groups)

    @property
    def bytes_sent(self) -> dict[str, int]:
        """What each site has put on the wire so far, in this process."""
        return dict(self._protocol.bytes_up) if self._protocol else {}

    def sum(self, contributions: Sequence[Contribution]) -> tuple[Sum, int]:
        """The weighted sum of the round that the federation is in, by the protocol."""
        federation = self._federation
        manifest = federation.method.manifest(federation.model, federation.round + 1)
        state = canonical(self._wire.state(federation.model))
        # The slots for loss and hits, where a manifest's layout has them, move no model: the lab knows both anyway.
        loss, hits = 0.0 if self.layout.has(LOSS) else None, 0 if self.layout.has(HITS) else None
        words = {
            site.name: encode(
                self.layout,
                self._update(c, manifest, state),
                weight=c.weight,
                loss=loss,
                hits=hits,
                saturate=self._private,
                rounding=Secret(self._rng.bytes(32)) if self.layout.rounds_at_random else None,
            ).words
            for site, c in zip(federation.sites, contributions, strict=True)
        }
        outcome = self._machines(state).run_round(words)
        if outcome.state is None or outcome.verdict is not SumVerdict.GOOD:
            raise DataError("the round's sum was void", hint="lower the learning rate, or use --aggregation plain")
        self._wire.load(self._scratch, outcome.state, self._groups)
        weight = sum(c.weight for c in contributions)
        # The caller divides by the weight again: in double precision every float32 comes back as it was.
        return manifest.flatten(self._scratch).astype(np.float64) * weight, weight

    def sum_extra(self, name: str, vectors: Sequence[Vector]) -> Sum:
        """The sum of vectors beside the model, by a separate aggregation: no layout of a model has a place for them."""
        layout = extra_layout(name, len(vectors[0]), roster_size=len(vectors))
        start = canonical(np.zeros(layout.state_words))
        names = [site.name for site in self._federation.sites]
        words = {
            site: encode(layout, vector, weight=1, saturate=self._private).words
            for site, vector in zip(names, vectors, strict=True)
        }
        total = LoopbackFederation(layout, names, start, dp_active=self._private).run_round(words).total
        if total is None:
            raise DataError(f"the sum of {name} was void", hint="use --aggregation plain")
        return total.view(layout.signed_dtype)[: len(vectors[0])] * (2.0**EXTRA_CLIP / layout.quantum)

    def _update(self, contribution: Contribution, manifest: ParameterManifest, state: Vector) -> Vector:
        manifest.load(self._scratch, contribution.vector)
        return self._wire.update(self._scratch, state, manifest.groups)

    def _machines(self, state: Vector) -> LoopbackFederation:
        if self._protocol is None or not np.array_equal(self._protocol.model, state):
            names = [site.name for site in self._federation.sites]
            self._protocol = LoopbackFederation(
                self.layout, names, state, dp_active=self._private, movement=self._movement
            )
        return self._protocol


def extra_layout(name: str, size: int, *, roster_size: int) -> Layout:
    """One tensor in the widest ring: gradients and counts differ in size, and nobody knows them beforehand."""
    block = Block(name=name, shape=(size,), kind="mean", clip_exponent=EXTRA_CLIP, movement_exponent=EXTRA_CLIP + 16)
    return Layout.of([block], roster_size=roster_size, weight_cap=1, ring_bits=64)


def make_layout(federation: Federation, groups: frozenset[str], ring_bits: int = DEFAULT_BITS) -> Layout:
    """The layout as `consortium publish` derives it: clips from learning rate and steps, units from the statistics. In
    16 bits the weight cap is the largest that is allowed there: sites with more images count alike.
    """
    config = federation.config
    tensors = federation.model.state_dict()
    entries = ParameterManifest.of(federation.model, groups).entries
    largest = max(len(site.train) for site in federation.sites)
    clips = Clips(
        learning_rate=config.learning_rate,
        steps=config.local_epochs * -(-largest // config.batch_size),
        momentum=config.momentum if config.optimizer == "sgd" else 0.0,
    )
    shared = {entry.name: to_host(tensors[entry.name]).numpy() for entry in entries}
    sites, cap = len(federation.sites), 1 << largest.bit_length()
    if ring_bits == 16:
        cap = min(cap, most_weight(sites))
    return Layout.of(blocks_of(shared, clips, "initial model"), roster_size=sites, weight_cap=cap, ring_bits=ring_bits)
