"""Attacks on what leaves: a plain update, spare bytes, a message type that may not. Bytes past the log are in
test_audit_network.py."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest

from lazaret.errors import PolicyViolation
from security.audit.agreement import Keys
from security.audit.verify import verify
from security.log import egress
from security.log import events as ev
from security.log.egress import (
    Outgoing,
    OutgoingVector,
    blocked,
    check_outgoing,
    check_outgoing_vector,
    due_bytes,
    recorded_shape,
)
from security.rng import CountedRandomness
from security.secagg.registry import Shape
from tests.support.audit_attacks import Lonely, unchecked, weighty

SHAPE = Shape(federation="lesions", site="graz", cohort=("graz", "linz", "vienna"), vector_bytes=4096)


def _vector(vector: bytes) -> OutgoingVector:
    """A masked vector as a site would send it, in one frame."""
    return OutgoingVector(
        msg_id="12" * 16,
        shape=dataclasses.replace(SHAPE, vector_bytes=len(vector)),
        vector=vector,
        root=sha256(vector).digest(),
        destination="ab" * 32,
        head=1,
        modulus_bits=32,
    )


def _message(message: str = "Agree", spare: bytes = b"") -> Outgoing:
    due = due_bytes("Agree", SHAPE.origin, recorded_shape(SHAPE))
    assert due is not None
    payload = bytes(due) + spare
    return Outgoing(msg_id="12" * 16, message=message, payload=payload, shape=SHAPE, destination="ab" * 32, head=1)


def _updates() -> dict[str, bytes]:
    values = np.random.default_rng(1).normal(0, 1e-3, 20_000)
    return {
        "float32": values.astype("<f4").tobytes(),
        "fixed point": np.rint(values * 2**27).astype("<i4").tobytes(),
        "all zero": bytes(80_000),
        "short": values[:400].astype("<f4").tobytes(),
        "one word repeated": bytes(range(4)) * 20_000,
    }


@pytest.mark.parametrize("name", _updates())
def test_plain_update_does_not_leave(name: str) -> None:
    outgoing = _vector(_updates()[name])
    with pytest.raises(PolicyViolation, match="does not look masked") as refused:
        check_outgoing_vector(outgoing)
    entry = blocked(outgoing, refused.value)
    assert entry.sha256 is None, "the digest of a plain update would confirm a guess"


def test_plain_update_does_not_leave_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress, "uniformity_of", lambda outgoing: 1.0)
    assert check_outgoing_vector(_vector(_updates()["float32"])).masked, "the flag alone is only the sender's word"


def test_masked_vectors_pass() -> None:
    rng = CountedRandomness(b"masks")
    for size in (64, 1000, 5120, 65_536):
        entry = check_outgoing_vector(_vector(rng.bytes(size)))
        assert entry.masked
        assert float(entry.uniformity or 0) > 1e-6


VECTOR = CountedRandomness(b"p").bytes(4096)


def test_a_vector_of_another_length_does_not_leave() -> None:
    good = _vector(VECTOR)
    with pytest.raises(PolicyViolation, match="layout"):
        check_outgoing_vector(dataclasses.replace(good, vector=VECTOR + b"\x00"))


@pytest.mark.parametrize("extra", [b"\x00", b"\xfa\x06\x03abc"])
def test_spare_bytes_do_not_leave(extra: bytes) -> None:
    assert not check_outgoing(_message()).masked
    with pytest.raises(PolicyViolation, match="length"):
        check_outgoing(_message(spare=extra))


def test_spare_bytes_do_not_leave_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    bent = _message(spare=b"\x00")
    monkeypatch.setattr(egress, "due_bytes", lambda *told: len(bent.payload))
    assert check_outgoing(bent).bytes == len(bent.payload)


def test_unknown_message_does_not_leave() -> None:
    with pytest.raises(PolicyViolation, match="not permitted"):
        check_outgoing(_message("Prototypes"))


def test_a_vector_passes_its_own_check_only() -> None:
    """Bytes under the name of an upload that nobody looked at."""
    with pytest.raises(PolicyViolation, match="not checked"):
        check_outgoing(_message("UploadFrame"))


def test_a_vector_passes_its_own_check_only_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress, "MASKED", "nothing")
    due = due_bytes("UploadFrame", SHAPE.origin, recorded_shape(SHAPE))
    assert check_outgoing(dataclasses.replace(_message("UploadFrame"), payload=bytes(due or 0)))


GOOD = check_outgoing_vector(_vector(VECTOR)).body()
SIZE = GOOD["bytes"]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"bytes": SIZE + 1}, "SurplusBytes"),
        ({"bytes": SIZE + 1, "expected_bytes": SIZE + 1}, "SurplusBytes"),
        ({"shape": {**GOOD["shape"], "named": "x" * 90}}, "SurplusBytes"),
        ({"message": "Agree", "data_class": "control"}, "SurplusBytes"),
        ({"head": 99}, "SurplusBytes"),
        ({"data_class": "control"}, "ForbiddenMessage"),
        ({"masked": False}, "UnmaskedVector"),
        ({"uniformity": "1e-12"}, "UnmaskedVector"),
        ({"uniformity": None}, "UnmaskedVector"),
    ],
)
def test_auditor_sees_what_a_bent_filter_let_pass(lonely: Lonely, change: dict[str, object], code: str) -> None:
    lonely.log.append(ev.Egress(**{**GOOD, **change}), run="r", round=1)
    lonely.log.checkpoint()
    assert lonely.codes() == {code}
    with unchecked(code):
        assert lonely.codes() == set(), "twin"


@pytest.mark.parametrize(("due", "codes"), [(100, set()), (90, {"LayoutMismatch"})])
def test_an_entry_cannot_choose_its_vector(lonely: Lonely, due: int, codes: set[str]) -> None:
    """A vector of another length with numbers to match: the manifest knows better."""
    lonely.log.append(ev.Egress(**{**GOOD, "head": 1}), run="r", round=1)
    lonely.log.checkpoint()
    keys = Keys.bare(replace(lonely.roster, vector_bytes=GOOD["shape"]["vector_bytes"] * due // 100))
    assert weighty(verify(lonely.folder, keys).findings) == codes
    with unchecked("LayoutMismatch"):
        assert weighty(verify(lonely.folder, keys).findings) == set(), "twin"
