"""What a published result says by itself: its digests, and the masks that its opened secrets leave on the sum.

Both machines compute these, and an auditor does (docs/spec/secure-aggregation.md, sections 4 and 10).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from security.crypto import key_agreement
from security.crypto.key_agreement import HybridPair
from security.crypto.masking import OpenedMasks
from security.secagg import context as hashes
from security.secagg.certificates import Advert
from security.secagg.context import RoundContext
from security.secagg.messages import Result
from security.secrets import Secret


def result_digests(result: Result) -> tuple[bytes, bytes, bytes]:
    """KX, U and R as they follow from the header."""
    kx = hashes.key_transcript(result.context.ctx(), [advert.body() for advert in result.adverts])
    survivors = hashes.survivors_digest(kx, result.deals, [(line.site, line.root) for line in result.uploads])
    result_hash = hashes.result_digest(
        kx=kx,
        survivors=survivors,
        verdict=hashes.SumVerdict(result.verdict),
        sum_root=result.sum_root,
        seeds=result.seeds,
        keys=result.keys,
        pairs=result.pairs,
        state_hash=result.state_hash,
        movements=result.movements,
    )
    return kx, survivors, result_hash


# The header, the download of the sum, and the audit of its chunks. The machine decides when each of them happens.


class OpenedSecrets(Protocol):
    """What opens the masks on a sum: a Result, or what the coordinator makes one of."""

    @property
    def adverts(self) -> tuple[Advert, ...]: ...
    @property
    def seeds(self) -> tuple[bytes, ...]: ...
    @property
    def keys(self) -> tuple[bytes, ...]: ...
    @property
    def pairs(self) -> tuple[bytes, ...]: ...


def opened_masks(
    context: RoundContext,
    kx: bytes,
    survivors: Collection[str],
    opened: OpenedSecrets,
    *,
    group: Collection[str] | None = None,
) -> OpenedMasks:
    """The masks that are left on the sum of the survivors' uploads, from the opened secrets.

    :param group: the members that share masks; everybody without groups.
    """
    inside = set(context.sites if group is None else group)
    adverts, ctx = opened.adverts, context.ctx()
    alive = [advert for advert in adverts if advert.site in survivors]
    dropped = [advert for advert in adverts if advert.site not in survivors]
    own = [
        key_agreement.self_mask_key(Secret(seed), kx=kx, site=advert.site)
        for advert, seed in zip(alive, opened.seeds, strict=True)
        if advert.site in inside
    ]
    received = {
        (dealer.site, gone.site): Secret(pair)
        for (dealer, gone), pair in zip(earlier_survivors(adverts, survivors), opened.pairs, strict=True)
    }
    pairs = {}
    for gone, key in zip(dropped, opened.keys, strict=True):
        if gone.site not in inside:
            continue
        seed = Secret(key)
        keys = HybridPair.from_seed(seed, ctx=ctx, site=gone.site)
        for advert in (found for found in alive if found.site in inside):
            added = received.get((advert.site, gone.site)) or key_agreement.pair_secret(
                seed, ctx=ctx, site=gone.site, peer=advert.site
            )
            pairs[advert.site, gone.site] = key_agreement.mask_key(
                keys, advert.mask_key, added, kx=kx, own_id=gone.site, peer_id=advert.site
            )
    return OpenedMasks.of(own, pairs)


def earlier_survivors(adverts: Sequence[Advert], survivors: Collection[str]) -> list[tuple[Advert, Advert]]:
    """The pairs whose secret does not follow from the seed of the dropout: it came from a survivor before it."""
    return [
        (dealer, gone)
        for at, gone in enumerate(adverts)
        if gone.site not in survivors
        for dealer in adverts[:at]
        if dealer.site in survivors
    ]
