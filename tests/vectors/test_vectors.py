"""Our code against every vector. A vector that expects an error names its code."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from test_reference import published

from lazaret.errors import ToolkitError
from security import labels
from security.crypto import aead, key_agreement, prg, shamir
from security.crypto.key_agreement import HybridPair, KeyPair
from security.crypto.signing import SigningKey, VerifyKey, statement
from security.secagg import fixed_point
from security.secagg.context import SumVerdict, share_hash
from security.secagg.layout import Layout
from security.secagg.state import MovementRule, next_state, state_hash
from security.secrets import Secret

HERE = Path(__file__).parent
unhex = bytes.fromhex
Case = dict[str, Any]
PURPOSES = {"deal": labels.SIGN_DEAL, "agree": labels.SIGN_AGREE}


class Replay:
    """A randomness that gives back what a vector recorded, and no more."""

    def __init__(self, recorded: bytes) -> None:
        self.left = recorded

    def bytes(self, count: int) -> bytes:
        assert count <= len(self.left)
        taken, self.left = self.left[:count], self.left[count:]
        return taken


def secret(value: str) -> Secret:
    return Secret(unhex(value))


def topic(name: str) -> list[Any]:
    paths = sorted((HERE / name).glob("*.json"))
    assert paths, f"no vectors for {name}"
    return [pytest.param(json.loads(path.read_text()), id=path.stem) for path in paths]


def refuses(case: Case, act: Any) -> ToolkitError:
    with pytest.raises(ToolkitError) as caught:
        act()
    assert caught.value.code == case["expect"]
    return caught.value


@pytest.mark.parametrize("case", published("x25519"))
def test_published_x25519(case: Case) -> None:
    assert KeyPair(secret(case["scalar"])).exchange(unhex(case["u"])).reveal().hex() == case["out"]


@pytest.mark.parametrize("case", published("hkdf"))
def test_published_hkdf(case: Case) -> None:
    """Of the library that we derive with."""
    derivation = HKDF(SHA256(), len(case["okm"]) // 2, unhex(case["salt"]), unhex(case["info"]))
    assert derivation.derive(unhex(case["ikm"])).hex() == case["okm"]


@pytest.mark.parametrize("case", published("aes256ctr"))
def test_published_counter_mode(case: Case) -> None:
    plaintext = unhex(case["plaintext"])
    stream = prg.keystream(secret(case["key"]), len(plaintext), offset=16 * int(case["counter"], 16))
    assert bytes(a ^ b for a, b in zip(plaintext, stream, strict=True)).hex() == case["ciphertext"]


@pytest.mark.parametrize("case", topic("keys"))
def test_keys(case: Case) -> None:
    if case["expect"] != "ok":
        refuses(case, lambda: KeyPair(secret(case["scalar"])).exchange(unhex(case["public"])))
        return
    one, other = (KeyPair(secret(scalar)) for scalar in case["scalars"])
    a, b = case["ids"]
    kx = unhex(case["kx"])
    assert [one.public.hex(), other.public.hex()] == case["publics"]
    assert [one.scalar.reveal().hex(), other.scalar.reveal().hex()] == case["clamped"]
    pair = secret(case["pair"])
    for own, peer, own_id, peer_id in ((one, other, a, b), (other, one, b, a)):
        key = key_agreement.mask_key(own, peer.public, pair, kx=kx, own_id=own_id, peer_id=peer_id)
        assert key.reveal().hex() == case["mask_key"]
    receiver = HybridPair(secret(case["scalars"][1]), secret(case["kem_seed"]))
    assert receiver.kem_public.hex() == case["kem_public"]
    assert receiver.decapsulate(unhex(case["ciphertext"])).reveal().hex() == case["encapsulated"]
    assert receiver.decapsulate(unhex(case["bent"])).reveal().hex() == case["rejected"]
    plain = key_agreement.open_shares(receiver, one.public, unhex(case["box"]), kx=kx, source=a, destination=b)
    assert plain.reveal().hex() == case["plain"]
    seed = secret(case["seed"])
    derived = HybridPair.from_seed(seed, ctx=kx, site=a)
    assert (derived.scalar.reveal().hex(), derived.kem_public.hex()) == (
        case["mask_seed_scalar"],
        case["mask_seed_kem"],
    )
    assert key_agreement.pair_secret(seed, ctx=kx, site=a, peer=b).reveal().hex() == case["mask_seed_pair"]
    assert key_agreement.self_mask_key(secret(case["seed"]), kx=kx, site=a).reveal().hex() == case["self_mask_key"]


@pytest.mark.parametrize("case", topic("boxes"))
def test_boxes(case: Case) -> None:
    ends = {"kx": unhex(case["kx"]), "source": case["source"], "destination": case["destination"]}
    key, box = secret(case["key"]), unhex(case["box"])
    if case["expect"] != "ok":
        refuses(case, lambda: aead.open_box(key, box, **ends))
        return
    nonce = Replay(unhex(case["nonce"]))
    assert aead.seal(key, secret(case["plaintext"]), **ends, randomness=nonce) == box
    assert aead.open_box(key, box, **ends) == secret(case["plaintext"])


@pytest.mark.parametrize("case", topic("shares"))
def test_shares(case: Case) -> None:
    threshold = case["threshold"]
    if case["expect"] != "ok":
        given = {int(x): secret(share) for x, share in case["shares"].items()}
        refuses(case, lambda: shamir.join(given, threshold=threshold))
        return
    draw = Replay(unhex(case["randomness"]))
    dealt = shamir.split(secret(case["secret"]), threshold=threshold, holders=case["holders"], randomness=draw)
    assert [share.reveal().hex() for share in dealt] == case["shares"]
    assert draw.left == b""
    joined = shamir.join({x: dealt[x - 1] for x in case["subset"]}, threshold=threshold)
    assert joined == secret(case["secret"])
    for kind in ("b", "s"):
        made = share_hash(dealt[0], kx=unhex(case["kx"]), dealer="12", holder="3", kind=kind)
        assert made.hex() == case[f"hash_{kind}"]


@pytest.mark.parametrize("case", topic("streams"))
def test_streams(case: Case) -> None:
    words = np.frombuffer(unhex(case["before"]), dtype=f"<u{case['ring_bits'] // 8}").copy()
    keys = {sign: [secret(key) for key in case[sign]] for sign in ("add", "subtract")}
    if case["expect"] != "ok":
        refuses(case, lambda: prg.apply_streams(words, **keys, offset=case["offset"]))
        return
    prg.apply_streams(words, **keys, offset=case["offset"])
    assert words.tobytes().hex() == case["after"]


@pytest.mark.parametrize("case", topic("statements"))
def test_statements(case: Case) -> None:
    label, fields = PURPOSES[case["purpose"]], [unhex(field) for field in case["fields"]]
    key, signature = VerifyKey(unhex(case["public"])), unhex(case["signature"])
    if case["expect"] != "ok":
        refuses(case, lambda: key.verify(signature, label, case["signer"], *fields))
        return
    own = SigningKey(secret(case["seed"]))
    assert own.verify_key == key
    assert statement(label, case["signer"], *fields).hex() == case["statement"]
    assert own.sign(label, case["signer"], *fields) == signature
    key.verify(signature, label, case["signer"], *fields)


@pytest.mark.parametrize("case", topic("layouts"))
def test_layouts(case: Case) -> None:
    refuses(case, lambda: Layout.from_dict(case["layout"]))


@pytest.mark.parametrize("case", topic("encodings"))
def test_encodings(case: Case) -> None:
    layout = Layout.from_dict(case["layout"])
    update = np.frombuffer(unhex(case["update"]), dtype="<f4")
    values = {name: case[name] for name in ("weight", "loss", "hits")}
    if "rounding" in case:
        values["rounding"] = secret(case["rounding"])
    if case["expect"] != "ok":
        error = refuses(case, lambda: fixed_point.encode(layout, update, **values))
        assert case["names"] in str(error)
        return
    assert layout.layout_hash.hex() == case["layout_hash"]
    assert layout.quantum == case["quantum"]
    encoded = fixed_point.encode(layout, update, **values)
    assert layout.ring.pack(encoded.words).tobytes().hex() == case["words"]
    assert encoded.saturated == 0


@pytest.mark.parametrize("case", topic("states"))
def test_states(case: Case) -> None:
    layout = Layout.from_dict(case["layout"])
    state = np.frombuffer(unhex(case["state"]), dtype="<f4")
    total = layout.ring.unpack(unhex(case["sum"]))
    assert state_hash(state).hex() == case["state_hash"]
    told = case.get("movement", {"window": 0, "factor": "2", "before": [], "after": []})
    rule = MovementRule(told["window"], Fraction(told["factor"]))
    before, after = (np.array(told[name], dtype=">u8").tobytes() for name in ("before", "after"))
    outcome = next_state(layout, state, total, survivors=case["survivors"], rule=rule, movements=before)
    assert outcome.movements == after
    assert outcome.verdict == SumVerdict(case["verdict"])
    assert bool(outcome.reason) == (outcome.verdict is SumVerdict.VOID)
    assert outcome.state.tobytes().hex() == case["next"]
    assert state_hash(outcome.state).hex() == case["next_hash"] != case.get("fused_hash")
