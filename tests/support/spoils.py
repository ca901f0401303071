"""What a lying coordinator and its colluders hold, and the best they can make of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from lazaret.errors import VerificationFailed
from security.crypto import key_agreement, prg, shamir
from security.crypto.key_agreement import HybridPair
from security.crypto.prg import Words
from security.secagg import context as hashes
from security.secagg import messages
from security.secagg.certificates import Advert
from security.secagg.context import RoundContext, share_hash
from security.secagg.fields import Wire
from security.secagg.layout import Layout
from security.secagg.site.attempt import SHARE_BYTES
from security.secrets import Secret


class Spoils:
    """Everything a coordinator and its colluders hold, and what follows from it."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.contexts: dict[bytes, RoundContext] = {}
        self.views: dict[bytes, tuple[bytes, tuple[Advert, ...]]] = {}  # by KX: CTX and adverts as shown to somebody
        self.lists: dict[tuple[bytes, str], list[messages.Shares]] = {}
        self.frames: dict[tuple[bytes, str], dict[int, bytes]] = {}
        self.shares: dict[tuple[bytes, str, str], dict[int, Secret]] = {}
        self.pairs: dict[bytes, HybridPair] = {}  # by public key: those of colluders, and those the attacker made
        self.mask_seeds: dict[bytes, Secret] = {}  # by public mask key
        self.seeds: dict[bytes, Secret] = {}  # by commitment
        self.inputs: dict[tuple[int, str], Words] = {}

    # Gathering.

    def show(self, message: Wire) -> None:
        if isinstance(message, messages.Plan):
            self.contexts[message.context.ctx()] = message.context
        elif isinstance(message, messages.Adverts):
            kx = hashes.key_transcript(message.ctx, [advert.body() for advert in message.adverts])
            self.views[kx] = (message.ctx, message.adverts)

    def hear(self, sender: str, message: Wire) -> None:
        if isinstance(message, messages.Shares):
            self.lists.setdefault((message.kx, sender), []).append(message)
        elif isinstance(message, messages.UploadFrame):
            self.frames.setdefault((message.kx, sender), {})[message.index] = message.data
        elif isinstance(message, messages.Unmask):
            for share in message.shares:
                self._sort_in(message.kx, sender, Secret(share))
        elif isinstance(message, messages.Disclosure):
            for share in (message.b_share, message.s_share):
                self._sort_in(message.kx, message.holder, Secret(share))

    def _sort_in(self, kx: bytes, holder: str, share: Secret) -> None:
        """The dealers' lists say whose share it is, and of which kind."""
        context = self.contexts[self.views[kx][0]]
        at = context.position(holder) - 1
        for (listed, dealer), made in self.lists.items():
            for line in (shares.shares[at] for shares in made if listed == kx):
                for kind, expected in (("b", line.b_hash), ("s", line.s_hash)):
                    if share_hash(share, kx=kx, dealer=dealer, holder=holder, kind=kind) == expected:  # type: ignore[arg-type]
                        self.shares.setdefault((kx, dealer, kind), {})[at + 1] = share

    def _open_boxes(self, kx: bytes) -> None:
        """Boxes for which the attacker has the key: those to colluders, and to keys it slipped in."""
        _, adverts = self.views[kx]
        keys = {advert.site: advert.share_key for advert in adverts}
        for (listed, dealer), made in list(self.lists.items()):
            if listed != kx:
                continue
            for position, advert in enumerate(adverts, start=1):
                pair = self.pairs.get(advert.share_key)
                if pair is None or advert.site == dealer:
                    continue
                for shares in made:
                    box = shares.shares[position - 1].box
                    ends = {"source": dealer, "destination": advert.site}
                    both = key_agreement.open_shares(pair, keys[dealer], box, kx=kx, **ends).reveal()
                    for kind, part in (("b", both[:SHARE_BYTES]), ("s", both[SHARE_BYTES:])):
                        self.shares.setdefault((kx, dealer, kind), {})[position] = Secret(part)

    # Opening.

    def _secret(self, kx: bytes, site: str, kind: str) -> Secret | None:
        held = self.shares.get((kx, site, kind), {})
        t = self.contexts[self.views[kx][0]].t
        if len(held) < t:
            return None
        return shamir.join({at: held[at] for at in sorted(held)[:t]}, threshold=t)

    def _seed(self, kx: bytes, advert: Advert) -> Secret | None:
        known = self.seeds.get(advert.commitment)
        return known if known is not None else self._secret(kx, advert.site, "b")

    def _mask_seed(self, kx: bytes, advert: Advert) -> Secret | None:
        known = self.mask_seeds.get(advert.mask_key)
        return known if known is not None else self._secret(kx, advert.site, "s")

    def _pair(self, kx: bytes, advert: Advert) -> HybridPair | None:
        known = self.pairs.get(advert.mask_key)
        if known is not None:
            return known
        opened = self._mask_seed(kx, advert)
        return None if opened is None else HybridPair.from_seed(opened, ctx=self.views[kx][0], site=advert.site)

    def _added(self, kx: bytes, one: Advert, other: Advert) -> Secret | None:
        """r_ij of two sites: from the seed of the first, or from what it has sealed for the second."""
        first, second = sorted((one, other), key=lambda advert: advert.site.encode())
        ctx, _ = self.views[kx]
        seed = self._mask_seed(kx, first)
        if seed is not None:
            return key_agreement.pair_secret(seed, ctx=ctx, site=first.site, peer=second.site)
        keys = self._pair(kx, second)
        at = self.contexts[ctx].position(second.site) - 1
        for shares in self.lists.get((kx, first.site), []) if keys is not None else []:
            try:
                box, ends = shares.shares[at].pair, {"source": first.site, "destination": second.site}
                return key_agreement.open_pair(keys, box, kx=kx, **ends)  # type: ignore[arg-type]
            except VerificationFailed:
                continue
        return None

    def upload(self, kx: bytes, site: str) -> Words | None:
        frames = self.frames.get((kx, site), {})
        if len(frames) < self.layout.frames:
            return None
        return self.layout.ring.unpack(b"".join(frames[index] for index in sorted(frames))).copy()

    def residual(self, kx: bytes, site: str) -> tuple[Words, set[str]]:
        """An upload with every known mask taken off, and with whom (itself included) unknown masks are left."""
        self._open_boxes(kx)
        words = self.upload(kx, site)
        assert words is not None
        adverts = {advert.site: advert for advert in self.views[kx][1]}
        pairs = {name: self._pair(kx, advert) for name, advert in adverts.items()}
        seed, left = self._seed(kx, adverts[site]), set()
        add, subtract = [], []
        if seed is None:
            left.add(site)
        else:
            subtract.append(key_agreement.self_mask_key(seed, kx=kx, site=site))
        for peer in adverts:
            own, other = pairs[site], pairs[peer]
            if peer == site:
                continue
            added = self._added(kx, adverts[site], adverts[peer])
            if (own is None and other is None) or added is None:
                left.add(peer)
                continue
            ends = (own, adverts[peer].mask_key) if own is not None else (other, adverts[site].mask_key)
            assert ends[0] is not None
            key = key_agreement.mask_key(ends[0], ends[1], added, kx=kx, own_id=site, peer_id=peer)
            (subtract if peer.encode() > site.encode() else add).append(key)
        prg.apply_streams(words, add=add, subtract=subtract)
        self.layout.ring.wrap(words)
        return words, left

    def sums(self, kx: bytes) -> Iterator[tuple[frozenset[str], Words]]:
        """Every sum that can be opened.

        Unknown pair masks cancel only between two sites that enter with equal weight, an unknown self mask never does:
        what can be learned of an attempt are the sums over sets that no unknown mask leaves.
        """
        sites = [advert.site for advert in self.views[kx][1]]
        found = {site: self.residual(kx, site) for site in sites if self.upload(kx, site) is not None}
        todo = set(sites)
        while todo:
            group, frontier = set(), {min(todo)}
            while frontier:
                site = frontier.pop()
                group.add(site)
                left = found[site][1] - {site} if site in found else self._edges(kx, site)
                frontier |= left - group
            todo -= group
            if all(site in found and site not in found[site][1] for site in group):
                total = np.sum([found[site][0] for site in group], axis=0, dtype=self.layout.dtype)
                self.layout.ring.wrap(total)
                yield frozenset(group), total

    def _edges(self, kx: bytes, site: str) -> set[str]:
        pairs = {advert.site: self._pair(kx, advert) for advert in self.views[kx][1]}
        return {peer for peer in pairs if peer != site and pairs[peer] is None and pairs[site] is None}

    def equations(self) -> Iterator[tuple[dict[tuple[int, str], int], Words]]:
        """Sums of unknown updates: what is opened, less what colluders put in."""
        for kx, (ctx, _) in self.views.items():
            number = self.contexts[ctx].round
            for group, total in self.sums(kx):
                known = [site for site in group if (number, site) in self.inputs]
                for site in known:
                    total = total - self.inputs[number, site]
                self.layout.ring.wrap(total)
                yield {(number, site): 1 for site in group if site not in known}, total

    def recover(self, number: int, site: str) -> Any:
        """The best estimate of one site's update, or None if no combination of the sums isolates it."""
        found = [(unknowns, total) for unknowns, total in self.equations() if unknowns]
        columns = sorted({unknown for unknowns, _ in found for unknown in unknowns})
        if (number, site) not in columns:
            return None
        rows = np.array([[unknowns.get(column, 0) for column in columns] for unknowns, _ in found], dtype=float)
        target = np.array([column == (number, site) for column in columns], dtype=float)
        weights = np.linalg.lstsq(rows.T, target, rcond=None)[0]
        if np.abs(rows.T @ weights - target).max() > 1e-9:
            return None
        signed = [total.view(self.layout.signed_dtype).astype(float) for _, total in found]
        return sum(weight * one for weight, one in zip(weights, signed, strict=True))

    def leak(self, number: int, site: str, truth: Words) -> float:
        """The largest correlation with the truth of anything the attacker can make of a site's uploads."""
        uploads = [kx for kx, name in self.frames if name == site and self.upload(kx, site) is not None]
        guesses: list[Any] = [self.residual(kx, site)[0] for kx in uploads if kx in self.views]
        guesses += [one - other for at, one in enumerate(guesses) for other in guesses[:at]]
        estimates = [correlation(self.layout, guess.view(self.layout.signed_dtype), truth) for guess in guesses]
        recovered = self.recover(number, site)
        if recovered is not None:
            estimates.append(correlation(self.layout, recovered, truth))
        return max(map(abs, estimates), default=0.0)


def correlation(layout: Layout, guess: Any, truth: Words) -> float:
    """Over the first tensor, which is as good as all of the vector."""
    place = layout.slot("stem")
    return float(np.corrcoef(guess[place].astype(float), truth.view(layout.signed_dtype)[place].astype(float))[0, 1])
