"""The encoding and every hash of an attempt, from docs/spec/secure-aggregation.md (sections 3 and 4)."""

from __future__ import annotations

import hashlib
from typing import Any

from .symmetric import hkdf


def label(purpose: str) -> bytes:
    return b"FLSA1/" + purpose.encode() + b"\0"


def h(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def u32(value: int) -> bytes:
    return value.to_bytes(4, "big")


def u64(value: int) -> bytes:
    return value.to_bytes(8, "big")


def tlv(value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return u32(len(data)) + data


def listed(items: list[bytes]) -> bytes:
    return u32(len(items)) + b"".join(items)


def statement(purpose: str, signer: str, *fields: bytes) -> bytes:
    """What is signed."""
    return label(purpose) + tlv(signer) + b"".join(tlv(field) for field in fields)


def context_bytes(context: dict[str, Any]) -> bytes:
    """All fields in the order of the specification; digests given as hex."""

    def digest(name: str) -> bytes:
        return tlv(bytes.fromhex(context[name]))

    members = [tlv(m["site"]) + tlv(bytes.fromhex(m["cert"])) for m in context["members"]]
    repeats = [tlv(bytes.fromhex(r["ctx"])) + tlv(bytes.fromhex(r["survivors"])) for r in context["repeats"]]
    sums = [u64(s["round"]) + listed([tlv(site) for site in s["sites"]]) for s in context["sums"]]
    return b"".join(
        [
            u64(context["version"]),
            tlv(context["federation"]),
            digest("manifest_hash"),
            tlv(context["run"]),
            *(u64(context[name]) for name in ("round", "attempt", "n", "t", "a", "c", "m")),
            listed(members),
            digest("coordinator_cert"),
            tlv(context["suite"]),
            listed(repeats),
            listed(sums),
            *(digest(name) for name in ("state_hash", "config_hash", "layout_hash", "prev_result")),
        ]
    )


def ctx(context: dict[str, Any]) -> bytes:
    return h(label("ctx"), context_bytes(context))


def commitment(ctx_hash: bytes, site: str, seed: bytes) -> bytes:
    return h(label("com"), ctx_hash, tlv(site), tlv(seed))


def advert_body(advert: dict[str, Any]) -> bytes:
    def fixed(name: str) -> bytes:
        return tlv(bytes.fromhex(advert[name]))

    return b"".join(
        [
            tlv(advert["site"]),
            *(fixed(name) for name in ("ctx", "mask_key", "mask_kem", "share_key", "share_kem")),
            listed([tlv(bytes.fromhex(value)) for value in advert["pair_hashes"]]),
            fixed("commitment"),
            u64(advert["sequence"]),
            u64(advert["log_size"]),
            fixed("log_root"),
            fixed("ledger_head"),
        ]
    )


def kx(ctx_hash: bytes, bodies: list[bytes]) -> bytes:
    return h(label("keys"), ctx_hash, listed([tlv(body) for body in bodies]))


SUITE = "x25519-mlkem768"


def seed_scalar(seed: bytes, ctx_hash: bytes, site: str) -> bytes:
    return hkdf(seed, ctx_hash, label("seed/x25519") + tlv(site), 32)


def seed_kem(seed: bytes, ctx_hash: bytes, site: str) -> bytes:
    return hkdf(seed, ctx_hash, label("seed/mlkem768") + tlv(site), 64)


def pair_secret(seed: bytes, ctx_hash: bytes, site: str, peer: str) -> bytes:
    return hkdf(seed, ctx_hash, label("seed/pair") + tlv(site) + tlv(peer), 32)


def pair_hash(ctx_hash: bytes, site: str, peer: str, pair: bytes) -> bytes:
    return h(label("pair"), ctx_hash, tlv(site), tlv(peer), tlv(pair))


def pair_box_key(encapsulated: bytes, kx_hash: bytes, source: str, destination: str) -> bytes:
    return hkdf(encapsulated, kx_hash, label("pair-box") + tlv(source) + tlv(destination), 32)


def mask_key(shared: bytes, pair: bytes, kx_hash: bytes, one: str, other: str) -> bytes:
    low, high = sorted([one.encode(), other.encode()])
    return hkdf(shared + pair, kx_hash, label("mask/aes256ctr") + tlv(SUITE) + tlv(low) + tlv(high), 32)


def share_key(shared: bytes, encapsulated: bytes, kx_hash: bytes, source: str, destination: str) -> bytes:
    info = label("share") + tlv(SUITE) + tlv(source) + tlv(destination)
    return hkdf(shared + encapsulated, kx_hash, info, 32)


def self_mask_key(seed: bytes, kx_hash: bytes, site: str) -> bytes:
    return hkdf(seed, kx_hash, label("self/aes256ctr") + tlv(site), 32)


def share_hash(kx_hash: bytes, dealer: str, holder: str, kind: str, share: bytes) -> bytes:
    return h(label("sh"), kx_hash, tlv(dealer), tlv(holder), tlv(kind), tlv(share))


def share_leaf(
    kx_hash: bytes, dealer: str, holder: str, hashes: list[bytes], box: bytes, pair: bytes, kem_key: bytes
) -> bytes:
    return h(label("leaf"), kx_hash, tlv(dealer), tlv(holder), *hashes, h(box), h(tlv(kem_key), pair))


def merkle_root(leaves: list[bytes]) -> bytes:
    """RFC 6962 section 2.1, by its recursive definition."""
    if not leaves:
        return h(b"")
    if len(leaves) == 1:
        return h(b"\0", leaves[0])
    k = 1
    while 2 * k < len(leaves):
        k *= 2
    return h(b"\1", merkle_root(leaves[:k]), merkle_root(leaves[k:]))


def vector_root(vector: bytes) -> bytes:
    size = 192 * 1024
    return merkle_root([vector[i : i + size] for i in range(0, len(vector), size)])


def _named(roots: list[tuple[str, bytes]]) -> bytes:
    return listed([tlv(site) + tlv(root) for site, root in roots])


def deals(kx_hash: bytes, roots: list[tuple[str, bytes]]) -> bytes:
    return h(label("deals"), kx_hash, _named(roots))


def survivors(kx_hash: bytes, deals_hash: bytes, roots: list[tuple[str, bytes]]) -> bytes:
    return h(label("surv"), kx_hash, deals_hash, _named(roots))


def result(
    kx_hash: bytes, u: bytes, verdict: int, sum_root: bytes, secrets: tuple[list[bytes], ...], state: bytes
) -> bytes:
    """:param secrets: seeds of the survivors, seeds of the mask keys of the lost, secrets of pairs."""
    opened = b"".join(listed([tlv(one) for one in kind]) for kind in secrets)
    return h(label("result"), kx_hash, u, u64(verdict), sum_root, opened, state)
