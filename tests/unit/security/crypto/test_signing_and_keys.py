"""Signatures, key agreement and boxes: each check, and what happens where it is switched off."""

from __future__ import annotations

import pytest

from lazaret.errors import VerificationFailed
from security import labels
from security.crypto import aead, key_agreement, signing
from security.crypto.key_agreement import KeyPair
from security.crypto.signing import SigningKey, VerifyKey
from security.rng import CountedRandomness, SystemRandomness
from security.secrets import Secret

KX = b"\x11" * 32
RANDOM = SystemRandomness()


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
    shared = key_agreement.mask_key(a, b.public, kx=KX, own_id="a", peer_id="b")
    assert shared == key_agreement.mask_key(b, a.public, kx=KX, own_id="b", peer_id="a")
    assert shared != key_agreement.mask_key(a, b.public, kx=b"\x12" * 32, own_id="a", peer_id="b")
    assert shared != key_agreement.mask_key(eve, a.public, kx=KX, own_id="b", peer_id="a")
    there = key_agreement.share_key(a, b.public, kx=KX, source="a", destination="b")
    assert there == key_agreement.share_key(b, a.public, kx=KX, source="a", destination="b")
    assert there != key_agreement.share_key(a, b.public, kx=KX, source="b", destination="a")


def test_a_recovered_scalar_gives_the_same_mask() -> None:
    gone, alive = KeyPair.generate(RANDOM), KeyPair.generate(RANDOM)
    again = KeyPair(Secret(gone.scalar.reveal()))
    assert again.public == gone.public
    expected = key_agreement.mask_key(alive, gone.public, kx=KX, own_id="b", peer_id="a")
    assert key_agreement.mask_key(again, alive.public, kx=KX, own_id="a", peer_id="b") == expected


def test_scalars_have_one_form() -> None:
    loose = bytes([0xFF] * 32)
    assert KeyPair(Secret(loose)).scalar.reveal() == key_agreement.clamp(loose) != loose
    with pytest.raises(ValueError, match="32 bytes"):
        key_agreement.clamp(bytes(31))


def guess_the_mask_key() -> bool:
    """The coordinator replaces a peer's key by the point zero, and derives from an all-zero secret what follows."""
    honest = KeyPair.generate(RANDOM)
    theirs = key_agreement.mask_key(honest, bytes(32), kx=KX, own_id="a", peer_id="b")
    info = labels.KDF_MASK + b"\0\0\0\1a\0\0\0\1b"
    return theirs == key_agreement._derive(Secret(bytes(32)), KX, info)


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
