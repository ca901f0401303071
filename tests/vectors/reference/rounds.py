"""Whole attempts: from the context to the hash of the result, every value on the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from . import curve, lattice, numbers, symmetric, transcript
from . import field as gf
from .arithmetic import layout, pack, update
from .drawn import Drawn

Case = dict[str, Any]


@dataclass
class Party:
    """A site's secrets and everything it makes in the attempt."""

    site: str
    mask_seed: bytes
    share_scalar: bytes
    share_kem_seed: bytes
    seed: bytes
    weight: int
    update: list[float]
    mask_scalar: bytes = b""
    mask_kem: bytes = b""
    share_kem: bytes = b""
    pairs: dict[str, bytes] = field(default_factory=dict)
    body: bytes = b""
    advert: dict[str, Any] = field(default_factory=dict)
    pair_keys: dict[str, bytes] = field(default_factory=dict)
    self_key: bytes = b""
    upload: bytes = b""


def _parties(ids: list[str], drawn: Drawn, told: dict[str, Any]) -> list[Party]:
    return [
        Party(
            site=site,
            mask_seed=drawn.take(32),
            share_scalar=curve.clamp(drawn.take(32)),
            share_kem_seed=drawn.take(64),
            seed=drawn.take(32),
            weight=1 + drawn.number(900),
            update=update(drawn, told),
        )
        for site in sorted(ids, key=str.encode)
    ]


def _context(parties: list[Party], drawn: Drawn, told: dict[str, Any], c: int, state: bytes, repeat: bool) -> Case:
    n = len(parties)
    t = max((n + c) // 2 + 1, c + 2, 3)
    return {
        "version": 1,
        "federation": "vectors",
        "manifest_hash": drawn.take(32).hex(),
        "run": "run-1",
        "round": 7,
        "attempt": 2,
        "n": n,
        "t": t,
        "a": n + c - t + 1,
        "c": c,
        "m": 3,
        "members": [{"site": party.site, "cert": drawn.take(32).hex()} for party in parties],
        "coordinator_cert": drawn.take(32).hex(),
        "suite": transcript.SUITE,
        "repeats": [{"ctx": drawn.take(32).hex(), "survivors": drawn.take(32).hex()}] if repeat else [],
        "sums": [{"round": 6, "sites": [party.site for party in parties]}] if repeat else [],
        "state_hash": state.hex(),
        "config_hash": drawn.take(32).hex(),
        "layout_hash": numbers.layout_hash(told).hex(),
        "prev_result": drawn.take(32).hex(),
    }


def _advertise(party: Party, later: list[Party], ctx: bytes, drawn: Drawn) -> None:
    party.mask_scalar = curve.clamp(transcript.seed_scalar(party.mask_seed, ctx, party.site))
    party.mask_kem, _ = lattice.keys(transcript.seed_kem(party.mask_seed, ctx, party.site))
    party.share_kem, _ = lattice.keys(party.share_kem_seed)
    party.pairs = {
        peer.site: transcript.pair_secret(party.mask_seed, ctx, party.site, peer.site) for peer in later
    }
    party.advert = {
        "site": party.site,
        "ctx": ctx.hex(),
        "mask_key": curve.x25519_public(party.mask_scalar).hex(),
        "mask_kem": party.mask_kem.hex(),
        "share_key": curve.x25519_public(party.share_scalar).hex(),
        "share_kem": party.share_kem.hex(),
        "pair_hashes": [
            transcript.pair_hash(ctx, party.site, peer, pair).hex() for peer, pair in party.pairs.items()
        ],
        "commitment": transcript.commitment(ctx, party.site, party.seed).hex(),
        "sequence": 1 + drawn.number(1000),
        "log_size": drawn.number(10**6),
        "log_root": drawn.take(32).hex(),
        "ledger_head": drawn.take(32).hex(),
    }
    party.body = transcript.advert_body(party.advert)


def _deal(party: Party, parties: list[Party], kx: bytes, t: int, drawn: Drawn) -> tuple[bytes, dict[str, Any]]:
    """Return the dealer's Merkle root and what it drew and sealed."""
    coefficients = {kind: [drawn.take(32) for _ in range(t - 1)] for kind in "bs"}
    secrets = {"b": party.seed, "s": party.mask_seed}
    leaves, boxes, paired = [], {}, {}
    for position, holder in enumerate(parties, start=1):
        pieces = {kind: gf.share(secrets[kind], coefficients[kind], position) for kind in "bs"}
        box, pair = b"", b""
        associated = kx + transcript.tlv(party.site) + transcript.tlv(holder.site)
        if holder is not party:
            shared = curve.x25519(party.share_scalar, curve.x25519_public(holder.share_scalar))
            fresh, ciphertext = lattice.encapsulate(holder.share_kem, drawn.take(32))
            key = transcript.share_key(shared, fresh, kx, party.site, holder.site)
            nonce = drawn.take(12)
            box = ciphertext + nonce + symmetric.gcm_seal(key, nonce, pieces["b"] + pieces["s"], associated)
        if holder.site in party.pairs:
            fresh, ciphertext = lattice.encapsulate(holder.mask_kem, drawn.take(32))
            key = transcript.pair_box_key(fresh, kx, party.site, holder.site)
            nonce = drawn.take(12)
            pair = ciphertext + nonce + symmetric.gcm_seal(key, nonce, party.pairs[holder.site], associated)
        hashes = [transcript.share_hash(kx, party.site, holder.site, kind, pieces[kind]) for kind in "bs"]
        leaves.append(transcript.share_leaf(kx, party.site, holder.site, hashes, box, pair, holder.mask_kem))
        boxes[holder.site], paired[holder.site] = box.hex(), pair.hex()
    return transcript.merkle_root(leaves), {
        "coefficients": {kind: [value.hex() for value in coefficients[kind]] for kind in "bs"},
        "boxes": boxes,
        "pairs": paired,
    }


def _stream(told: dict[str, Any], key: bytes, vector: bytes) -> bytes:
    count = 8 * len(vector) // told["ring_bits"]
    return numbers.stream_words(told, symmetric.ctr(key, 0, count * numbers.stream_word(told)))


def _mask(party: Party, parties: list[Party], kx: bytes, told: dict[str, Any]) -> None:
    plain = numbers.encode(told, party.update, party.weight, 3.5, 7)
    words = numbers.to_words(told, plain)
    party.self_key = transcript.self_mask_key(party.seed, kx, party.site)
    words = numbers.combine(told, words, _stream(told, party.self_key, words), 1)
    for peer in parties:
        if peer is not party:
            shared = curve.x25519(party.mask_scalar, curve.x25519_public(peer.mask_scalar))
            pair = party.pairs.get(peer.site) or peer.pairs[party.site]
            key = party.pair_keys[peer.site] = transcript.mask_key(shared, pair, kx, party.site, peer.site)
            sign = 1 if peer.site.encode() > party.site.encode() else -1
            words = numbers.combine(told, words, _stream(told, key, words), sign)
    party.upload = words


def _unmask(parties: list[Party], dropped: list[str], told: dict[str, Any]) -> bytes:
    total = bytes(len(parties[0].upload))
    for party in parties:
        if party.site in dropped:
            continue
        total = numbers.combine(told, total, party.upload, 1)
        total = numbers.combine(told, total, _stream(told, party.self_key, total), -1)
        for gone in dropped:
            sign = -1 if gone.encode() > party.site.encode() else 1
            total = numbers.combine(told, total, _stream(told, party.pair_keys[gone], total), sign)
    return total


def attempt(name: str, ids: list[str], *, c: int, dropped: list[str], bits: int = 32, repeat: bool = False) -> Case:
    drawn = Drawn(name)
    told = layout(ring_bits=bits, roster=max(len(ids), 5))
    parties = _parties(ids, drawn, told)
    state = [numbers.to_f32(drawn.number(2**24) / 2**23) for _ in numbers.clips(told)]
    context = _context(parties, drawn, told, c, numbers.state_hash(state), repeat)
    ctx = transcript.ctx(context)
    for at, party in enumerate(parties, start=1):
        _advertise(party, parties[at:], ctx, drawn)
    kx = transcript.kx(ctx, [party.body for party in parties])
    dealt = {party.site: _deal(party, parties, kx, context["t"], drawn) for party in parties}
    deals = transcript.deals(kx, [(site, root) for site, (root, _) in dealt.items()])
    for party in parties:
        _mask(party, parties, kx, told)
    alive = [party for party in parties if party.site not in dropped]
    roots = [(party.site, transcript.vector_root(party.upload)) for party in alive]
    u = transcript.survivors(kx, deals, roots)
    total = _unmask(parties, dropped, told)
    plain = [numbers.encode(told, party.update, party.weight, 3.5, 7) for party in alive]
    assert numbers.from_words(told, total) == [sum(column) for column in zip(*plain, strict=True)]
    verdict, moved, _ = numbers.next_state(told, state, numbers.from_words(told, total), len(alive))
    opened = [party.mask_seed for party in parties if party.site in dropped]
    sealed = [
        party.pairs[gone.site]
        for gone in parties
        if gone.site in dropped
        for party in alive
        if gone.site in party.pairs
    ]
    sum_root, next_hash = transcript.vector_root(total), numbers.state_hash(moved)
    seeds = [party.seed for party in alive]
    return {
        "comment": f"{len(ids)} sites, {len(dropped)} of them lost after they uploaded or before",
        "expect": "ok",
        "layout": told,
        "context": context,
        "ctx": ctx.hex(),
        "state": pack(state),
        "dropped": dropped,
        "parties": [
            {
                "site": party.site,
                "mask_seed": party.mask_seed.hex(),
                "share_scalar": party.share_scalar.hex(),
                "share_kem_seed": party.share_kem_seed.hex(),
                "seed": party.seed.hex(),
                "weight": party.weight,
                "update": pack(party.update),
                "advert": party.advert,
                "deal": dealt[party.site][1] | {"root": dealt[party.site][0].hex()},
                "upload": party.upload.hex(),
                "upload_root": transcript.vector_root(party.upload).hex(),
            }
            for party in parties
        ],
        "kx": kx.hex(),
        "deals": deals.hex(),
        "survivors": u.hex(),
        "sum": total.hex(),
        "sum_root": sum_root.hex(),
        "verdict": verdict,
        "next_hash": next_hash.hex(),
        "opened_pairs": [pair.hex() for pair in sealed],
        "result": transcript.result(kx, u, verdict, sum_root, (seeds, opened, sealed), next_hash).hex(),
    }


def rounds() -> Iterator[tuple[str, Case]]:
    plans: dict[str, dict[str, Any]] = {
        "three_sites": {"ids": ["1", "12", "2"], "c": 0, "dropped": []},
        "four_sites_one_lost": {"ids": ["d", "a", "c", "b"], "c": 1, "dropped": ["b"]},
        "six_sites_two_lost": {"ids": list("abcdef"), "c": 1, "dropped": ["a", "d"]},
        "sixty_four_bits": {"ids": ["north", "south", "west"], "c": 0, "dropped": [], "bits": 64},
        "twenty_four_bits": {"ids": ["d", "a", "c", "b"], "c": 1, "dropped": ["c"], "bits": 24},
        "exact_repeat": {"ids": ["1", "2", "3"], "c": 1, "dropped": [], "repeat": True},
    }
    for name, plan in plans.items():
        yield name, attempt(name, plan.pop("ids"), **plan)


def contexts() -> Iterator[tuple[str, Case]]:
    """Bytes of a context that a reader must take, and some that it must not."""
    drawn = Drawn("contexts")
    told = layout()
    parties = _parties(["1", "12", "2"], drawn, told)
    good = _context(parties, drawn, told, 0, drawn.take(32), repeat=True)
    one, other, third = good["members"]
    encoded = transcript.context_bytes(good)
    yield "good", {"comment": "one form", "expect": "ok", "bytes": encoded.hex(), "ctx": transcript.ctx(good).hex()}
    changed = {
        "members_out_of_order": {"members": [other, one, third]},
        "member_twice": {"members": [one, one, third]},
        "certificate_twice": {"members": [one, other, third | {"cert": one["cert"]}]},
        "fewer_members_than_n": {"members": [one, other]},
        "name_with_a_space": {"members": [one | {"site": "1 "}, other, third]},
        "empty_name": {"run": ""},
        "short_digest": {"state_hash": "00" * 31},
        "long_digest": {"state_hash": "00" * 33},
    }
    faulty = {name: transcript.context_bytes(good | change) for name, change in changed.items()}
    faulty |= {
        "leftover_byte": encoded + b"\0",
        "missing_byte": encoded[:-1],
        "empty": b"",
        "length_beyond_the_end": encoded[:8] + b"\xff\xff\xff\xff" + encoded[12:],
    }
    for name, data in faulty.items():
        yield name, {"comment": "must not be read", "expect": "codec", "bytes": data.hex()}


TOPICS = {"rounds": rounds, "contexts": contexts}
