"""Attacks on what leaves: a plain update, spare bytes, a message type that may not. Bytes past the log are in
test_audit_network.py."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import numpy as np
import pytest

from lazaret.errors import PolicyViolation
from security.audit.agreement import Keys
from security.audit.verify import verify
from security.log import egress as door
from security.log import events as ev
from security.log.egress import Outgoing, blocked, check_outgoing, due_bytes, recorded_shape
from security.rng import CountedRandomness
from security.secagg.registry import Shape
from tests.support.audit_attacks import Lonely, weighty, without


def _outgoing(vector: bytes, /, **changes: object) -> Outgoing:
    """An upload frame as a site would send it: a header, and the words."""
    shape = Shape(federation="lesions", site="graz", cohort=("graz", "linz", "vienna"), vector_bytes=len(vector))
    due = due_bytes("UploadFrame", shape.origin, recorded_shape(shape))
    assert due is not None
    fields: dict[str, object] = {
        "msg_id": "12" * 16,
        "message": "UploadFrame",
        "payload": bytes(due - len(vector)) + vector,
        "shape": shape,
        "destination": "ab" * 32,
        "head": 1,
        "modulus_bits": 32,
        "vector": vector,
    }
    return Outgoing(**{**fields, **changes})  # type: ignore[arg-type]  # the fields of a test


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
    outgoing = _outgoing(_updates()[name])
    with pytest.raises(PolicyViolation, match="does not look masked") as refused:
        check_outgoing(outgoing)
    entry = blocked(outgoing, refused.value)
    assert entry.sha256 is None, "the digest of a plain update would confirm a guess"


def test_plain_update_does_not_leave_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_evenness", lambda outgoing: 1.0)
    assert check_outgoing(_outgoing(_updates()["float32"])).masked, "the flag alone is only the sender's word"


def test_masked_vectors_pass() -> None:
    rng = CountedRandomness(b"masks")
    for size in (64, 1000, 5120, 65_536):
        entry = check_outgoing(_outgoing(rng.bytes(size)))
        assert entry.masked
        assert float(entry.uniformity or 0) > 1e-6


VECTOR = CountedRandomness(b"p").bytes(4096)


@pytest.mark.parametrize("extra", [b"\x00", b"\xfa\x06\x03abc"])
def test_spare_bytes_do_not_leave(extra: bytes) -> None:
    good = _outgoing(VECTOR)
    with pytest.raises(PolicyViolation, match="length"):
        check_outgoing(dataclasses.replace(good, payload=good.payload + extra))


def test_spare_bytes_do_not_leave_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    good = _outgoing(VECTOR)
    monkeypatch.setattr(door, "due_bytes", lambda *told: len(good.payload) + 1)
    assert check_outgoing(dataclasses.replace(good, payload=good.payload + b"\x00")).bytes == len(good.payload) + 1


def test_unknown_message_does_not_leave() -> None:
    with pytest.raises(PolicyViolation, match="not permitted"):
        check_outgoing(_outgoing(VECTOR, message="Prototypes"))


def test_vector_in_a_control_message_does_not_leave() -> None:
    shape = _outgoing(VECTOR).shape
    due = due_bytes("Agree", shape.origin, recorded_shape(shape))
    assert due is not None
    with pytest.raises(PolicyViolation, match="carries none"):
        check_outgoing(_outgoing(VECTOR, message="Agree", payload=bytes(due)))


@pytest.mark.parametrize("vector", [None, b"something else"])
def test_vector_must_be_shown_to_the_door(vector: bytes | None) -> None:
    with pytest.raises(PolicyViolation, match="not checked"):
        check_outgoing(_outgoing(VECTOR, vector=vector))


GOOD = check_outgoing(_outgoing(VECTOR)).body()
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
def test_auditor_sees_what_a_bent_door_let_pass(lonely: Lonely, change: dict[str, object], code: str) -> None:
    lonely.log.append(ev.Egress(**{**GOOD, **change}), run="r", round=1)
    lonely.log.checkpoint()
    assert lonely.codes() == {code}
    with without(code):
        assert lonely.codes() == set(), "twin"


@pytest.mark.parametrize(("due", "codes"), [(100, set()), (90, {"LayoutMismatch"})])
def test_an_entry_cannot_choose_its_vector(lonely: Lonely, due: int, codes: set[str]) -> None:
    """A vector of another length with numbers to match: the manifest knows better."""
    lonely.log.append(ev.Egress(**{**GOOD, "head": 1}), run="r", round=1)
    lonely.log.checkpoint()
    keys = Keys.bare(replace(lonely.roster, vector_bytes=GOOD["shape"]["vector_bytes"] * due // 100))
    assert weighty(verify(lonely.folder, keys).findings) == codes
    with without("LayoutMismatch"):
        assert weighty(verify(lonely.folder, keys).findings) == set(), "twin"
