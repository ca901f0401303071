"""Signatures, key agreement and boxes: each check, and what happens where it is switched off."""

from __future__ import annotations

from typing import Any

import pytest

from lazaret.errors import VerificationFailed
from security import labels
from security.crypto import aead, encoding, key_agreement, signing
from security.crypto.key_agreement import HybridPair, KeyPair
from security.crypto.signing import SigningKey, VerifyKey
from security.rng import CountedRandomness, SystemRandomness
from security.secrets import Secret

KX = b"\x11" * 32
RANDOM = SystemRandomness()
PAIR = Secret(bytes(range(32)))


def test_a_signature_holds_for_one_statement_only() -> None:
    key = SigningKey.generate(RANDOM)
    signature = key.sign(labels.SIGN_AGREE, "north", KX, b"set")
    key.verify_key.verify(signature, labels.SIGN_AGREE, "north", KX, b"set")
    for wrong in (
        (labels.SIGN_ABORT, "north", KX, b"set"),
        (labels.SIGN_AGREE, "nort", b"h" + KX, b"set"),
        (labels.SIGN_AGREE, "north", KX, b"set", b""),
        (labels.SIGN_AGREE, "north", KX + b"set"),
    ):
        with pytest.raises(VerificationFailed):
            key.verify_key.verify(signature, *wrong)


def test_a_failed_verification_says_nothing_more() -> None:
    key, other = SigningKey.generate(RANDOM), SigningKey.generate(RANDOM)
    texts = set()
    for signature in (b"", bytes(64), other.sign(labels.SIGN_AGREE, "a"), key.sign(labels.SIGN_ABORT, "a")):
        with pytest.raises(VerificationFailed) as caught:
            key.verify_key.verify(signature, labels.SIGN_AGREE, "a")
        texts.add(str(caught.value))
        assert caught.value.__suppress_context__
    assert texts == {"signature does not verify"}


def test_a_signing_key_comes_back_from_its_seed() -> None:
    key = SigningKey.generate(RANDOM)
    assert SigningKey(key.seed) == key


def test_lengths_of_signing_keys() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        SigningKey(Secret(bytes(31)))
    with pytest.raises(VerificationFailed):
        VerifyKey(bytes(33))


def move_a_boundary() -> None:
    """Sign as site 12 about 3; show it as site 1 about 23."""
    key = SigningKey(Secret(bytes(32)))
    signature = key.sign(labels.SIGN_AGREE, "12", b"3")
    key.verify_key.verify(signature, labels.SIGN_AGREE, "1", b"23")


def test_moved_boundary() -> None:
    with pytest.raises(VerificationFailed):
        move_a_boundary()


def test_moved_boundary_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signing, "statement", lambda label, signer, *fields: label + signer.encode() + b"".join(fields))
    move_a_boundary()


def test_the_two_ends_agree_and_nobody_else() -> None:
    a, b, eve = (KeyPair.generate(RANDOM) for _ in range(3))
    shared = key_agreement.mask_key(a, b.public, PAIR, kx=KX, own_id="a", peer_id="b")
    assert shared == key_agreement.mask_key(b, a.public, PAIR, kx=KX, own_id="b", peer_id="a")
    assert shared != key_agreement.mask_key(a, b.public, PAIR, kx=b"\x12" * 32, own_id="a", peer_id="b")
    assert shared != key_agreement.mask_key(eve, a.public, PAIR, kx=KX, own_id="b", peer_id="a")
    other = Secret(bytes(32))
    assert shared != key_agreement.mask_key(a, b.public, other, kx=KX, own_id="a", peer_id="b"), "X25519 is not enough"


def test_the_secret_of_a_pair_is_of_this_pair_in_this_attempt() -> None:
    """Otherwise one member that was given its own would have those of all others."""
    ends = [("a", "b"), ("a", "c"), ("b", "c")]
    found = [key_agreement.pair_secret(PAIR, ctx=KX, site=site, peer=peer).reveal() for site, peer in ends]
    found.append(key_agreement.pair_secret(PAIR, ctx=bytes(32), site="a", peer="b").reveal())
    assert len(set(found)) == 4


def test_a_recovered_seed_gives_the_same_mask_keys() -> None:
    seed = Secret(RANDOM.bytes(32))
    gone, alive = HybridPair.from_seed(seed, ctx=KX, site="a"), HybridPair.generate(RANDOM)
    again = HybridPair.from_seed(seed, ctx=KX, site="a")
    assert (again.public, again.kem_public) == (gone.public, gone.kem_public)
    pair = key_agreement.pair_secret(seed, ctx=KX, site="a", peer="b")
    expected = key_agreement.mask_key(alive, gone.public, pair, kx=KX, own_id="b", peer_id="a")
    assert key_agreement.mask_key(again, alive.public, pair, kx=KX, own_id="a", peer_id="b") == expected
    box = key_agreement.seal_pair(gone.kem_public, PAIR, kx=KX, source="0", destination="a", rng=RANDOM)
    assert key_agreement.open_pair(again, box, kx=KX, source="0", destination="a") == PAIR


SEALED = {"kx": KX, "source": "a", "destination": "b"}


@pytest.mark.parametrize(
    "change",
    [
        {"kx": b"\x12" * 32},
        {"source": "c"},
        {"destination": "c"},
        {"box": lambda box: bytes([box[0] ^ 1]) + box[1:]},
        {"box": lambda box: box[:-1] + bytes([box[-1] ^ 1])},
        {"box": lambda box: box[:100]},
    ],
    ids=["other attempt", "other dealer", "other holder", "bent ciphertext", "bent box", "short"],
)
def test_boxes_open_for_their_holder_only(change: dict[str, Any]) -> None:
    """ML-KEM rejects silently, so that it is the box that fails."""
    a, b, eve = (HybridPair.generate(RANDOM) for _ in range(3))
    both = Secret(bytes(range(64)))
    box = key_agreement.seal_shares(a, (b.public, b.kem_public), both, rng=RANDOM, **SEALED)
    assert len(box) == key_agreement.BOX_BYTES
    assert key_agreement.open_shares(b, a.public, box, **SEALED) == both
    pair = key_agreement.seal_pair(b.kem_public, PAIR, rng=RANDOM, **SEALED)
    assert len(pair) == key_agreement.PAIR_BYTES and key_agreement.open_pair(b, pair, **SEALED) == PAIR
    bend = change.pop("box", lambda box: box) if "box" in change else lambda box: box
    with pytest.raises(VerificationFailed):
        key_agreement.open_shares(b, a.public, bend(box), **(SEALED | change))
    with pytest.raises(VerificationFailed):
        key_agreement.open_pair(b, bend(pair), **(SEALED | change))
    with pytest.raises(VerificationFailed):
        key_agreement.open_shares(eve, a.public, box, **SEALED)


def test_a_box_needs_both_agreements() -> None:
    """Whoever breaks one of the two, and has its private key, still cannot open it."""
    a, b = HybridPair.generate(RANDOM), HybridPair.generate(RANDOM)
    box = key_agreement.seal_shares(a, (b.public, b.kem_public), PAIR, rng=RANDOM, **SEALED)
    for scalar, kem in ((b.scalar, RANDOM.bytes(64)), (Secret(RANDOM.bytes(32)), None)):
        half = HybridPair(scalar, Secret(kem or bytes(64)))
        if kem is None:
            half._kem = b._kem
        with pytest.raises(VerificationFailed):
            key_agreement.open_shares(half, a.public, box, **SEALED)


def test_a_kem_key_that_is_none_is_refused() -> None:
    good = HybridPair.generate(RANDOM)
    key_agreement.require_usable(good.public, kems=(good.kem_public,))
    for bad in (bytes(1183), b"\xff" * 1184):
        with pytest.raises(VerificationFailed):
            key_agreement.require_usable(kems=(bad,))


def test_scalars_have_one_form() -> None:
    loose = bytes([0xFF] * 32)
    assert KeyPair(Secret(loose)).scalar.reveal() == key_agreement.clamp(loose) != loose
    with pytest.raises(ValueError, match="32 bytes"):
        key_agreement.clamp(bytes(31))


def guess_the_mask_key() -> bool:
    """The coordinator replaces a peer's key by the point zero, and derives from an all-zero secret what follows."""
    honest = KeyPair.generate(RANDOM)
    theirs = key_agreement.mask_key(honest, bytes(32), PAIR, kx=KX, own_id="a", peer_id="b")
    info = labels.KDF_MASK + encoding.text(key_agreement.SUITE) + b"\0\0\0\1a\0\0\0\1b"
    return theirs == key_agreement._derive(Secret(bytes(32) + PAIR.reveal()), KX, info)


def test_zero_point() -> None:
    with pytest.raises(VerificationFailed):
        guess_the_mask_key()


def test_zero_point_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeyPair, "exchange", lambda self, peer: Secret(bytes(32)))
    assert guess_the_mask_key()


def reflect_a_box() -> Secret:
    key = Secret(bytes(32))
    randomness = CountedRandomness(b"box")
    box = aead.seal(key, Secret(b"x" * 64), kx=KX, source="a", destination="b", randomness=randomness)
    return aead.open_box(key, box, kx=KX, source="b", destination="a")


def test_reflected_box() -> None:
    with pytest.raises(VerificationFailed):
        reflect_a_box()


def test_reflected_box_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aead, "_associated", lambda *ends: b"")
    assert reflect_a_box() == Secret(b"x" * 64)


def test_a_nonce_is_drawn_for_every_box() -> None:
    key, randomness = Secret(bytes(32)), CountedRandomness(b"nonces")
    boxes = {
        aead.seal(key, Secret(b"same"), kx=KX, source="a", destination="b", randomness=randomness) for _ in range(50)
    }
    assert len(boxes) == 50
    assert all(len(box) == aead.OVERHEAD + 4 for box in boxes)
