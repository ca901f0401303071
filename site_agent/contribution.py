"""From a local round to the one vector that is masked: weight, metrics, fixed point. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from lazaret.errors import LocalProtocolError
from security.secagg import fixed_point
from security.secagg.layout import HITS, LOSS, Layout, Vector
from security.secagg.site.attempt import PendingUpdate
from security.secrets import Secret

Weights = Literal["samples", "bucketed", "uniform"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalResult:
    """What a local round gives. Only `update`, the weight and, where permitted, two sums go into the vector.

    :param artefacts: what else was made and stays: kind and number of values, for the privacy log.
    """

    update: Vector = field(repr=False)
    samples: int
    loss_sum: float
    hits: int
    steps: int
    wall_ms: int
    artefacts: tuple[tuple[str, int, bytes], ...] = field(default=(), repr=False)


def weight_of(samples: int, mode: Weights, cap: int) -> int:
    """The site's weight. Buckets are powers of two: a site that joins or leaves reveals its size only roughly."""
    if mode == "uniform":
        return 1
    if mode == "bucketed":
        return min(cap, 1 << max(0, (samples - 1).bit_length()))
    return min(cap, samples)


def _metrics(result: LocalResult, cap: int) -> tuple[float, int]:
    """Loss sum and hits, as of `cap` images where a site has more: its slots hold no more, and its weight is the cap
    too, so that sums over weights stay means."""
    if result.samples <= cap:
        return result.loss_sum, result.hits
    return result.loss_sum * cap / result.samples, result.hits * cap // result.samples


def encode(
    layout: Layout,
    result: LocalResult,
    *,
    round_number: int,
    state_hash: bytes,
    config_hash: bytes,
    weights: Weights,
    share_metrics: bool,
    score: int | None = None,
    private: bool = False,
    rounding: Secret | None = None,
) -> tuple[PendingUpdate, int]:
    """Encode once: the same words serve every attempt of the round. Also returns how many values were reduced to their
    clip.

    :param score: of this site, in 64ths, where it consents and the layout has slots for it.
    :param private: reduce values beyond their clip, and send no metrics: refusing or measuring would be a release.
        An update of whole numbers, as shared noise makes it, is placed as it is.
    :param rounding: see `fixed_point.encode`. The words are kept, not the key: a repeat is the same vector.

    :raises DataError: if a value is beyond its clip; it names the tensor and the clip that would hold it.
    """
    share_metrics = share_metrics and not private
    whole = result.update.dtype.kind == "i"
    if whole and not private:
        raise LocalProtocolError("whole numbers are of rounds with shared noise")
    loss, hits = _metrics(result, layout.weight_cap) if share_metrics else (0.0, 0)
    slots: dict[str, Any] = {
        "weight": weight_of(result.samples, weights, layout.weight_cap),
        "loss": loss if layout.has(LOSS) else None,
        "hits": hits if layout.has(HITS) else None,
        "score": score,
        "saturate": private,
    }
    if whole:
        encoded = fixed_point.place(layout, result.update, **slots)
    else:
        encoded = fixed_point.encode(layout, result.update, **slots, rounding=rounding)
    update = PendingUpdate(round=round_number, state_hash=state_hash, config_hash=config_hash, words=encoded.words)
    return update, encoded.saturated
