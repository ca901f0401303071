"""Attacks on what leaves: a plain update, spare bytes, a message type that may not, bytes past the log."""

from __future__ import annotations

import numpy as np
import pytest

from security.audit import egress as door
from security.audit import events as ev
from security.audit.egress import Outgoing, blocked, pass_door, uniformity
from security.errors import PolicyViolation
from security.rng import CountedRandomness
from tests.support.audit_attacks import Lonely, without


def _outgoing(payload: bytes, **changes: object) -> Outgoing:
    fields: dict[str, object] = {
        "msg_id": "12" * 16,
        "message": "UploadFrame",
        "payload": payload,
        "expected_bytes": len(payload),
        "destination": "ab" * 32,
        "head": 1,
        "cohort_size": 3,
        "dim": len(payload) // 4,
        "modulus_bits": 32,
        "vector": payload,
    }
    return Outgoing(**{**fields, **changes})  # type: ignore[arg-type]  # the fields of a test


def _updates() -> dict[str, bytes]:
    values = np.random.default_rng(1).normal(0, 1e-3, 20_000)
    return {
        "float32": values.astype("<f4").tobytes(),
        "fixed point": np.rint(values * 2**27).astype("<i4").tobytes(),
        "all zero": bytes(80_000),
        "short": values[:40].astype("<f4").tobytes(),
        "one word repeated": bytes(range(4)) * 20_000,
    }


@pytest.mark.parametrize("name", _updates())
def test_plain_update_does_not_leave(name: str) -> None:
    outgoing = _outgoing(_updates()[name])
    with pytest.raises(PolicyViolation, match="does not look masked") as refused:
        pass_door(outgoing)
    entry = blocked(outgoing, refused.value)
    assert entry.sha256 is None, "the digest of a plain update would confirm a guess"


def test_plain_update_does_not_leave_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "uniformity", lambda payload: 1.0)
    assert pass_door(_outgoing(_updates()["float32"])).masked, "the flag alone is only the sender's word"


def test_masked_vectors_pass() -> None:
    rng = CountedRandomness(b"masks")
    chances = [uniformity(rng.bytes(size)) for size in (64, 1000, 5120, 65_536) for _ in range(20)]
    assert min(chances) > 1e-4
    assert 0.3 < sum(chances) / len(chances) < 0.7


@pytest.mark.parametrize("extra", [b"\x00", b"\xfa\x06\x03abc"])
def test_spare_bytes_do_not_leave(extra: bytes) -> None:
    payload = CountedRandomness(b"p").bytes(4096)
    with pytest.raises(PolicyViolation, match="length"):
        pass_door(_outgoing(payload + extra, expected_bytes=len(payload), vector=payload))


def test_unknown_message_does_not_leave() -> None:
    payload = CountedRandomness(b"p").bytes(64)
    with pytest.raises(PolicyViolation, match="not permitted"):
        pass_door(_outgoing(payload, message="Prototypes"))


def test_vector_in_a_control_message_does_not_leave() -> None:
    payload = CountedRandomness(b"p").bytes(64)
    with pytest.raises(PolicyViolation, match="carries none"):
        pass_door(_outgoing(payload, message="Agree"))


GOOD = pass_door(_outgoing(CountedRandomness(b"p").bytes(4096))).body()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"bytes": 4097}, "SurplusBytes"),
        ({"head": 99}, "SurplusBytes"),
        ({"message": "Prototypes"}, "ForbiddenMessage"),
        ({"message": "Agree"}, "ForbiddenMessage"),
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


@pytest.mark.parametrize("counted", [100, 9_000_000])
def test_network_counter_disagrees(lonely: Lonely, counted: int) -> None:
    for _ in range(40):
        lonely.log.append(ev.Egress(**GOOD), run="r", round=1)
    lonely.log.append(ev.NetCounter(source="eth0", bytes_out=counted, bytes_in=0))
    lonely.log.checkpoint()
    assert lonely.codes() == {"UnloggedTraffic"}
    with without("UnloggedTraffic"):
        assert lonely.codes() == set(), "twin"


def test_network_counter_agrees(lonely: Lonely) -> None:
    for _ in range(40):
        lonely.log.append(ev.Egress(**GOOD), run="r", round=1)
    lonely.log.append(ev.NetCounter(source="eth0", bytes_out=40 * 4096 + 9000, bytes_in=0))
    lonely.log.checkpoint()
    assert lonely.codes() == set()
