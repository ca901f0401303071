"""Groups of sites whose sums are opened apart and combined coordinate by coordinate (spec, section 10, "Groups").

One vector can move a mean as far as it likes. It moves a median of sums only as far as another sum is: with 2c + 1
groups, c dishonest sites spoil at most c of the sums, and every coordinate of the median lies between those of honest
groups. The price: every group's sum is published, so that a site hides among its group only. Sites of two groups share
no mask. The published sum is one group's sum after the other; without groups, there is one group of everybody.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from lazaret.errors import ConfigError, PolicyViolation
from security import labels
from security.crypto import encoding, merkle
from security.crypto.prg import Words
from security.secagg import state as states
from security.secagg.context import SumVerdict, digest
from security.secagg.fixed_point import CHUNK_WORDS
from security.secagg.layout import WEIGHT, Layout
from security.secagg.state import MovementRule, State, SumOutcome

Combine = Literal["median", "trimmed-mean"]
_WIDEST: Final = 32  # bits of a ring whose words, times all weights, fit into 63 bits


def least_sites(*, c: int, m: int) -> int:
    """The fewest sites of a group in a sum: two honest ones at least."""
    return max(m, c + 2)


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of a run.

    :param members: the sites of each group.
    :param c: how many sites of all may be dishonest; `m` is the least number of survivors in a sum.
    """

    members: tuple[tuple[str, ...], ...]
    c: int
    m: int
    combine: Combine = "median"

    def __post_init__(self) -> None:
        everybody = [site for group in self.members for site in group]
        if len(set(everybody)) != len(everybody):
            raise ConfigError("a site is in two groups", where="manifest [aggregation] groups")
        if len(self.members) < 2 * self.c + 1:
            raise ConfigError(
                f"{len(self.members)} groups cannot outvote {self.c} dishonest sites",
                where="manifest [aggregation] groups",
                hint=f"at least {2 * self.c + 1} groups are needed",
            )
        if min(map(len, self.members)) < self.least:
            raise ConfigError(
                f"a group has fewer than {self.least} sites",
                where="manifest [aggregation] groups",
                hint=f"{2 * self.c + 1} groups of {self.least} sites need {(2 * self.c + 1) * self.least} sites",
            )

    @property
    def least(self) -> int:
        """The fewest sites of a group in a sum."""
        return least_sites(c=self.c, m=self.m)

    def check_layout(self, layout: Layout) -> None:
        """Refuse numbers whose products would leave 63 bits: a sum of weights fits into the ring as well."""
        if layout.ring_bits > _WIDEST:
            raise ConfigError("groups need a ring of at most 32 bits", where="manifest [aggregation] groups")

    @property
    def digest(self) -> str:
        """As privacy logs name the groups: SHA-256 over the ids of each group in turn, one to a line, and an empty line
        after each group.
        """
        lines = "".join("".join(f"{site}\n" for site in group) + "\n" for group in self.members)
        return hashlib.sha256(lines.encode()).hexdigest()

    def number(self, site: str) -> int:
        for number, group in enumerate(self.members):
            if site in group:
                return number
        raise PolicyViolation("site is in no group", where=f"site {site}", hint="a new site needs a new run")

    def parts(self, sites: Sequence[str]) -> list[tuple[str, ...]]:
        """These sites by group."""
        chosen = set(sites)
        return [tuple(site for site in group if site in chosen) for group in self.members]

    def check_sites(self, sites: Sequence[str], where: str) -> None:
        """Raise if one group is so small that its sum would show a site to c others (section 2)."""
        for site in sites:
            self.number(site)
        if any(len(part) < self.least for part in self.parts(sites)):
            raise PolicyViolation(f"a group would have fewer than {self.least} sites in the sum", where=where)


# The draw. Every site commits to a secret when it enrols; a manifest shows all commitments; then the secrets are
# opened, and decide together with that manifest. Nobody can choose its group, or who is beside it, as long as one site
# is honest. The secrets alone would not do: those of an earlier run are known to a site that enrols after it.


def draw_commitment(site: str, secret: bytes) -> bytes:
    return digest(labels.DRAW_COMMITMENT, encoding.text(site), encoding.tlv(secret))


def drawn(secrets: Mapping[str, bytes], count: int, shown: bytes) -> tuple[tuple[str, ...], ...]:
    """Groups of equal size, up to one site, from the opened secrets of all sites.

    :param shown: digest of the manifest that showed the commitments: nobody knew it when he committed.
    """
    named = sorted(secrets.items(), key=lambda item: item[0].encode())
    seed = encoding.array(encoding.text(site) + encoding.tlv(secret) for site, secret in named)
    order = sorted(secrets, key=lambda site: digest(labels.DRAW_ORDER, shown, seed, encoding.text(site)))
    return tuple(tuple(sorted(order[number::count], key=str.encode)) for number in range(count))


def sum_frames_of(layout: Layout, total: Words) -> Iterator[tuple[int, bytes]]:
    """The frames of a published sum with their numbers: those of the first group's sum, then of the next."""
    for number, start in enumerate(range(0, len(total), layout.words)):
        for index, data in layout.ring.frames(total[start : start + layout.words]):
            yield number * layout.frames + index, data


def sum_order(layout: Layout, sums: int) -> tuple[int, ...]:
    """The order in which the frames of a published sum travel: of one sum, what the next model needs first."""
    return layout.sum_order if sums == 1 else tuple(range(sums * layout.frames))


def sum_root(layout: Layout, total: Words) -> bytes:
    return merkle.root(merkle.leaf_hash(data) for _, data in sum_frames_of(layout, total))


def frame_place(layout: Layout, frame: int) -> slice:
    """Where the words of a frame of a published sum stand in it."""
    number, index = divmod(frame, layout.frames)
    start = number * layout.words + index * layout.ring.frame_words
    return slice(start, min(start + layout.ring.frame_words, (number + 1) * layout.words))


def everything(layout: Layout, total: Words) -> Words:
    """The sum over all groups: what weights, losses and hits are read from."""
    if len(total) == layout.words:
        return total
    whole: Words = total.reshape(-1, layout.words).sum(axis=0, dtype=layout.dtype)
    layout.ring.wrap(whole)
    return whole


def outcome_of(
    layout: Layout,
    groups: Groups | None,
    state: State,
    total: Words,
    *,
    survivors: Sequence[str],
    rule: MovementRule,
    movements: bytes,
) -> SumOutcome:
    """The verdict on a published sum and the next model; the same at every site."""
    if groups is None:
        return states.next_state(layout, state, total, survivors=len(survivors), rule=rule, movements=movements)
    parts = groups.parts(survivors)
    sums = total.reshape(len(parts), layout.words)
    reasons = [
        states.judge(layout, part.view(layout.signed_dtype), survivors=len(sites))
        for part, sites in zip(sums, parts, strict=True)
    ]
    good = [number for number, reason in enumerate(reasons) if not reason]
    if len(reasons) - len(good) > groups.c:
        # More groups than there are dishonest sites: these are not the numbers of sites.
        reason = f"{len(reasons) - len(good)} groups: {next(filter(None, reasons))}"
        return SumOutcome(SumVerdict.VOID, state, states.state_hash(state), reason, movements)
    alive = sum(len(parts[number]) for number in good)
    combined = combine(layout, sums[good], groups, survivors=alive)
    return states.next_state(layout, state, combined, survivors=alive, rule=rule, movements=movements)


def combine(layout: Layout, sums: Words, groups: Groups, *, survivors: int) -> Words:
    """One sum from those of groups, in whole numbers: as if every site had sent the combined mean.

    In each group a tensor's step is first shortened to the median length over the groups, as to a movement cap: a sum
    that is much longer than the others would else be the largest or smallest in every coordinate, and choose which of
    the others is the median. Each group's sum is then brought to the weight of all, `floor(S * T / w)`. Of these the
    median is taken (of an even number the mean of the middle two, rounded down), or the mean without the c largest and
    the c smallest.
    """
    signed = _equally_long(layout, sums)
    weights = signed[:, layout.slot(WEIGHT)].astype(np.int64)
    whole = int(weights.sum())
    out = everything(layout, np.ascontiguousarray(sums).reshape(-1)).copy()
    # Rounding must not make a sum void that a full clip in every group has reached.
    most = min(layout.half_ring, (layout.quantum * whole + survivors * layout.weight_cap) // layout.weight_cap)
    for start in range(0, layout.state_words, CHUNK_WORDS):
        part = slice(start, min(start + CHUNK_WORDS, layout.state_words))
        scaled = np.sort(signed[:, part].astype(np.int64) * whole // weights, axis=0)
        value = np.clip(_middle(scaled, groups), -most, most)
        out[part] = value.astype(layout.signed_dtype).view(layout.dtype)
    return out


def _equally_long(layout: Layout, sums: Words) -> Words:
    """Signed copies of the sums, in which no tensor's step is longer than the median over the groups."""
    signed: Words = sums.view(layout.signed_dtype).copy()
    lengths = [states.step_lengths(layout, part) for part in signed]
    for at, (_, place) in enumerate(layout.placed()):
        median = sorted(found[at] for found in lengths)[(len(lengths) - 1) // 2]
        for part, found in zip(signed, lengths, strict=True):
            if found[at] > median:
                part[place] = states.shortened(part[place], median, found[at])
    return signed


def _middle(ordered: Words, groups: Groups) -> Words:
    count = len(ordered)
    if groups.combine == "median" or count <= 2 * groups.c:
        middle: Words = (ordered[(count - 1) // 2] + ordered[count // 2]) // 2
        return middle
    kept = ordered[groups.c : count - groups.c]
    trimmed: Words = kept.sum(axis=0) // len(kept)
    return trimmed
