"""The vectors of single primitives. Each case is a dictionary that becomes one JSON file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from . import curve, field, lattice, symmetric, transcript
from .drawn import Drawn
from .numbers import combine

Case = dict[str, Any]
# Ids that a careless concatenation would confuse.
IDS = ["1", "12", "123", "23"]
# RFC 7748 section 6.1 asks for a check of these: they make every shared secret zero.
SMALL_ORDER = {
    "zero": bytes(32),
    "one": (1).to_bytes(32, "little"),
    "order_eight": bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    "prime": (2**255 - 19).to_bytes(32, "little"),
}


def keys() -> Iterator[tuple[str, Case]]:
    drawn = Drawn("keys")
    kx = drawn.take(32)
    for one, other in (("1", "12"), ("123", "23"), ("site-b", "site-a")):
        scalars = drawn.take(32), drawn.take(32)
        publics = [curve.x25519_public(scalar) for scalar in scalars]
        shared = curve.x25519(scalars[0], publics[1])
        assert shared == curve.x25519(scalars[1], publics[0])
        seed = drawn.take(32)
        pair, kem_seed, coins = drawn.take(32), drawn.take(64), drawn.take(32)
        kem_public, kem_private = lattice.keys(kem_seed)
        encapsulated, ciphertext = lattice.encapsulate(kem_public, coins)
        bent = bytes([ciphertext[0] ^ 1]) + ciphertext[1:]
        nonce = drawn.take(12)
        box_key = transcript.share_key(shared, encapsulated, kx, one, other)
        associated = kx + transcript.tlv(one) + transcript.tlv(other)
        box = ciphertext + nonce + symmetric.gcm_seal(box_key, nonce, seed + pair, associated)
        yield f"pair_{one}_{other}", {
            "comment": "both ends derive the same mask key; the second opens the box of the first",
            "expect": "ok",
            "kx": kx.hex(),
            "ids": [one, other],
            "scalars": [scalar.hex() for scalar in scalars],
            "clamped": [curve.clamp(scalar).hex() for scalar in scalars],
            "publics": [public.hex() for public in publics],
            "shared": shared.hex(),
            "pair": pair.hex(),
            "mask_key": transcript.mask_key(shared, pair, kx, one, other).hex(),
            "kem_seed": kem_seed.hex(),
            "kem_public": kem_public.hex(),
            "ciphertext": ciphertext.hex(),
            "encapsulated": encapsulated.hex(),
            "bent": bent.hex(),
            "rejected": lattice.decapsulate(kem_private, bent).hex(),
            "box": box.hex(),
            "plain": (seed + pair).hex(),
            "mask_seed_scalar": curve.clamp(transcript.seed_scalar(seed, kx, one)).hex(),
            "mask_seed_kem": lattice.keys(transcript.seed_kem(seed, kx, one))[0].hex(),
            "mask_seed_pair": transcript.pair_secret(seed, kx, one, other).hex(),
            "seed": seed.hex(),
            "self_mask_key": transcript.self_mask_key(seed, kx, one).hex(),
        }
    scalar = drawn.take(32)
    faults = {f"small_order_{name}": point for name, point in SMALL_ORDER.items()} | {"short_key": bytes(31)}
    for name, point in faults.items():
        if len(point) == 32:
            assert curve.x25519(scalar, point) == bytes(32)
        yield name, {
            "comment": "a public key that makes the secret zero, or is none at all",
            "expect": "verification",
            "scalar": scalar.hex(),
            "public": point.hex(),
        }


def boxes() -> Iterator[tuple[str, Case]]:
    drawn = Drawn("boxes")
    key, kx, nonce, plaintext = drawn.take(32), drawn.take(32), drawn.take(12), drawn.take(64)
    source, destination = "12", "3"
    associated = kx + transcript.tlv(source) + transcript.tlv(destination)
    box = nonce + symmetric.gcm_seal(key, nonce, plaintext, associated)
    good: Case = {
        "comment": "two shares of 32 bytes in a box of 92",
        "expect": "ok",
        "key": key.hex(),
        "kx": kx.hex(),
        "source": source,
        "destination": destination,
        "nonce": nonce.hex(),
        "plaintext": plaintext.hex(),
        "box": box.hex(),
    }
    yield "sealed", good
    bad = good | {"expect": "verification"}
    del bad["plaintext"], bad["nonce"]
    yield "reflected", bad | {"comment": "sent back to its source", "source": destination, "destination": source}
    yield "shifted_ids", bad | {"comment": "1 and 23 instead of 12 and 3", "source": "1", "destination": "23"}
    yield "other_attempt", bad | {"comment": "kept from another attempt", "kx": drawn.take(32).hex()}
    yield "other_key", bad | {"comment": "opened by somebody else", "key": drawn.take(32).hex()}
    flipped = bytes([*box[:20], box[20] ^ 1, *box[21:]])
    yield "flipped_bit", bad | {"comment": "one bit of the ciphertext changed", "box": flipped.hex()}
    yield "truncated", bad | {"comment": "the tag cut short", "box": box[:-1].hex()}
    yield "empty", bad | {"comment": "no bytes at all", "box": ""}


def shares() -> Iterator[tuple[str, Case]]:
    for threshold, holders in ((1, 1), (2, 3), (7, 10), (67, 100)):
        drawn = Drawn(f"shares {threshold}")
        kx, secret = drawn.take(32), drawn.take(32)
        draw = Drawn(f"coefficients {threshold}")
        coefficients = [draw.take(32) for _ in range(threshold - 1)]
        dealt = [field.share(secret, coefficients, x) for x in range(1, holders + 1)]
        subset = list(range(holders - threshold + 1, holders + 1))
        assert field.join({x: dealt[x - 1] for x in subset}) == secret
        yield f"{threshold}_of_{holders}", {
            "comment": "coefficients are drawn from the highest power down; positions are 1..n",
            "expect": "ok",
            "threshold": threshold,
            "holders": holders,
            "kx": kx.hex(),
            "secret": secret.hex(),
            "randomness": draw.all.hex(),
            "shares": [share.hex() for share in dealt],
            "subset": subset,
            "hash_b": transcript.share_hash(kx, "12", "3", "b", dealt[0]).hex(),
            "hash_s": transcript.share_hash(kx, "12", "3", "s", dealt[0]).hex(),
        }
    three = {"threshold": 2, "shares": {"1": "11" * 32, "2": "22" * 32}}
    yield "too_few", {
        "comment": "one share of two",
        "expect": "protocol-local",
        "threshold": 2,
        "shares": {"1": "11" * 32},
    }
    yield "position_zero", three | {
        "comment": "the secret's own place",
        "expect": "protocol-local",
        "shares": {"0": "11" * 32, "2": "22" * 32},
    }
    yield "short_share", three | {
        "comment": "31 bytes",
        "expect": "protocol-local",
        "shares": {"1": "11" * 32, "2": "22" * 31},
    }


def streams() -> Iterator[tuple[str, Case]]:
    for bits in (16, 32, 64):
        drawn = Drawn(f"streams {bits}")
        plus, minus, start = [drawn.take(32), drawn.take(32)], [drawn.take(32)], drawn.take(208)
        layout = {"ring_bits": bits}
        for name, offset in (("from_zero", 0), ("sought", 16 * 0xFFFF_FFFF)):
            words = start
            for sign, group in ((1, plus), (-1, minus)):
                for key in group:
                    words = combine(layout, words, symmetric.ctr(key, offset // 16, len(start)), sign)
            yield f"u{bits}_{name}", {
                "comment": "little-endian words; a stream at byte o starts at counter block o / 16",
                "expect": "ok",
                "ring_bits": bits,
                "add": [key.hex() for key in plus],
                "subtract": [key.hex() for key in minus],
                "offset": offset,
                "before": start.hex(),
                "after": words.hex(),
            }
    yield "offset_inside_a_block", {
        "comment": "a stream is sought in whole AES blocks",
        "expect": "protocol-local",
        "ring_bits": 32,
        "add": [],
        "subtract": [bytes(32).hex()],
        "offset": 8,
        "before": bytes(16).hex(),
    }


def statements() -> Iterator[tuple[str, Case]]:
    drawn = Drawn("statements")
    seed = drawn.take(32)
    kx, root = drawn.take(32), drawn.take(32)
    for signer in IDS:
        message = transcript.statement("deal", signer, kx, root)
        good: Case = {
            "comment": "label, signer, fields: each with its length",
            "expect": "ok",
            "purpose": "deal",
            "seed": seed.hex(),
            "public": curve.ed25519_public(seed).hex(),
            "signer": signer,
            "fields": [kx.hex(), root.hex()],
            "statement": message.hex(),
            "signature": curve.ed25519_sign(seed, message).hex(),
        }
        yield f"deal_by_{signer}", good
    bad = good | {"expect": "verification"}
    del bad["seed"], bad["statement"]
    yield "other_purpose", bad | {"comment": "a deal is not an agreement", "purpose": "agree"}
    yield "other_signer", bad | {"comment": "signed by 23, shown as by 123", "signer": "123"}
    yield "moved_boundary", bad | {
        "comment": "the same bytes cut in another place",
        "fields": [(kx + root[:1]).hex(), root[1:].hex()],
    }
    yield "swapped_fields", bad | {"comment": "root before transcript", "fields": [root.hex(), kx.hex()]}
    yield "short_signature", bad | {"comment": "63 bytes", "signature": good["signature"][:-2]}


TOPICS = {"keys": keys, "boxes": boxes, "shares": shares, "streams": streams, "statements": statements}
