"""What travels: any message comes back as it was, has one encoding, and nothing else is read as a message.

Invariant of the fuzz tests: whatever bytes come in, `decode` gives a parcel whose encoding is exactly those bytes, or
raises CodecError; nothing else.
"""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lazaret.errors import CodecError, LocalProtocolError
from protos import federation_pb2 as pb
from protos.parse import FROM_COORDINATOR, FROM_SITE, Direction, Parcel, tag, varint
from protos.schema import field_name
from security.crypto.ring import MAX_PARCEL
from security.secagg import relay
from security.secagg.fields import Many, Maybe, Nested, Wire, kinds
from security.secagg.relay import FRAMES, Pong, SignedHead
from tests.support.wire_strategies import heads, messages

TYPES = [(direction, cls) for direction in (FROM_SITE, FROM_COORDINATOR) for cls in direction.allowed]
TYPES.sort(key=lambda row: (row[0].envelope.DESCRIPTOR.name, row[1].__name__))
IDS = [f"{direction.envelope.DESCRIPTOR.name}-{cls.__name__}" for direction, cls in TYPES]
small = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def parcels(cls: type[Wire]) -> st.SearchStrategy[Parcel]:
    head = st.none() if cls in FRAMES else heads
    return st.builds(Parcel, message=messages(cls), sequence=st.integers(1, 2**64 - 1), log_head=head)


any_parcel = st.sampled_from(TYPES).flatmap(lambda row: st.tuples(st.just(row[0]), parcels(row[1])))


def fill(target: Message, message: Wire) -> None:
    """The library's own way to build a message: the second opinion."""
    target.SetInParent()
    for name, kind in kinds(type(message)):
        value: Any = getattr(message, name)
        if isinstance(kind, Many) and isinstance(kind.item, Nested):
            for item in value:
                fill(getattr(target, name).add(), item)
        elif isinstance(kind, Many):
            getattr(target, name).extend(value)
        elif isinstance(kind, Nested) or (isinstance(kind, Maybe) and value is not None):
            fill(getattr(target, name), value)
        elif value is not None:
            setattr(target, name, value)


@pytest.mark.parametrize(("direction", "cls"), TYPES, ids=IDS)
def test_a_message_comes_back_and_the_library_agrees(direction: Direction, cls: type[Wire]) -> None:
    @small
    @given(parcels(cls))
    def check(parcel: Parcel) -> None:
        data = direction.encode(parcel)
        assert direction.decode(data) == parcel
        envelope = direction.envelope(sequence=parcel.sequence)
        fill(getattr(envelope, field_name(cls)), parcel.message)
        if parcel.log_head is not None:
            fill(envelope.log_head, parcel.log_head)
        assert envelope.SerializeToString(deterministic=True) == data

    check()


def survives(direction: Direction, data: bytes) -> bool:
    try:
        parcel = direction.decode(data)
    except CodecError:
        return False
    assert direction.encode(parcel) == data
    return True


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused_or_canonical(data: bytes) -> None:
    survives(FROM_SITE, data)
    survives(FROM_COORDINATOR, data)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(any_parcel, st.data())
def test_changed_bytes_are_refused_or_canonical(row: tuple[Direction, Parcel], data: st.DataObject) -> None:
    direction, parcel = row
    good = direction.encode(parcel)
    at = data.draw(st.integers(0, len(good) - 1))
    flipped = bytearray(good)
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.integers(0, len(good) - 1))
    survives(direction, bytes(flipped))
    survives(direction, good[:cut])
    inserted = good[:at] + data.draw(st.binary(min_size=1, max_size=8)) + good[at:]
    survives(direction, inserted)


def head() -> SignedHead:
    signature = relay.HeadSignature(name="graz.lesions/audit", key_id=b"abcd", value=bytes(64))
    return SignedHead(origin="graz.lesions/audit", size=3, root=bytes(32), signatures=(signature,))


GOOD = FROM_SITE.encode(Parcel(message=Pong(number=7), sequence=1, log_head=head()))


def with_unknown_field() -> bytes:
    return GOOD + tag(999, 2) + varint(16) + b"patient-data-xyz"


def with_unknown_inner_field() -> bytes:
    envelope = pb.FromSite.FromString(GOOD)
    inner = envelope.pong.SerializeToString() + tag(15, 2) + varint(4) + b"leak"
    envelope.pong.ParseFromString(inner)
    return envelope.SerializeToString(deterministic=True)


def with_two_messages() -> bytes:
    return GOOD + pb.FromSite(ready=pb.Ready(site="graz", round=1)).SerializeToString()


def with_doubled_field() -> bytes:
    return GOOD + tag(100, 1) + (1).to_bytes(8, "little")


def in_another_order() -> bytes:
    envelope = pb.FromSite.FromString(GOOD)
    rest = pb.FromSite()
    rest.CopyFrom(envelope)
    rest.ClearField("pong")
    return rest.SerializeToString() + pb.FromSite(pong=envelope.pong).SerializeToString()


def with_a_long_number() -> bytes:
    key = tag(64, 2)
    assert GOOD.startswith(key)
    return key + bytes([GOOD[len(key)] | 0x80, 0x00]) + GOOD[len(key) + 1 :]


def without_a_field() -> bytes:
    envelope = pb.FromSite.FromString(GOOD)
    envelope.pong.ClearField("number")
    return envelope.SerializeToString(deterministic=True)


def without_sequence() -> bytes:
    envelope = pb.FromSite.FromString(GOOD)
    envelope.ClearField("sequence")
    return envelope.SerializeToString(deterministic=True)


def without_head() -> bytes:
    envelope = pb.FromSite.FromString(GOOD)
    envelope.ClearField("log_head")
    return envelope.SerializeToString(deterministic=True)


def a_frame_with_a_head() -> bytes:
    frame = pb.FromSite(upload_frame=pb.UploadFrame(kx=bytes(32), index=0, data=b"x"), sequence=1)
    frame.log_head.CopyFrom(pb.FromSite.FromString(GOOD).log_head)
    return frame.SerializeToString(deterministic=True)


def from_the_other_side() -> bytes:
    ping = Parcel(message=relay.Ping(number=1), sequence=1, log_head=head())
    return FROM_COORDINATOR.encode(ping)


def too_large() -> bytes:
    return GOOD + bytes(2**20)


FAULTS = [
    with_unknown_field,
    with_unknown_inner_field,
    with_two_messages,
    with_doubled_field,
    in_another_order,
    with_a_long_number,
    without_a_field,
    without_sequence,
    without_head,
    a_frame_with_a_head,
    from_the_other_side,
    too_large,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_refused(fault: Any) -> None:
    with pytest.raises(CodecError):
        FROM_SITE.decode(fault())


SMUGGLERS = [with_unknown_field, with_unknown_inner_field, with_two_messages, with_doubled_field]


@pytest.mark.parametrize("fault", [*SMUGGLERS, in_another_order, with_a_long_number])
def test_each_fault_is_refused_twin(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the comparison with the one encoding, the library reads all of these, hidden bytes and all."""
    monkeypatch.setattr("protos.parse.check_same", lambda pieces, data, where: None)
    monkeypatch.setattr("protos.parse.FRAMES", frozenset())
    FROM_SITE.decode(fault())


def test_a_field_out_of_bounds_is_refused() -> None:
    frame = pb.FromSite(upload_frame=pb.UploadFrame(kx=bytes(31), index=0, data=b"x"), sequence=1)
    with pytest.raises(CodecError, match=r"UploadFrame\.kx: expected 32 bytes"):
        FROM_SITE.decode(frame.SerializeToString())


def test_only_what_may_travel_is_sent() -> None:
    with pytest.raises(LocalProtocolError, match="does not travel"):
        FROM_SITE.encode(Parcel(message=relay.Ping(number=1), sequence=1, log_head=head()))
    with pytest.raises(LocalProtocolError, match="log head"):
        FROM_SITE.encode(Parcel(message=Pong(number=1), sequence=1))
    path = tuple(bytes(32) for _ in range(63))
    epoch = relay.EpochKey(public=bytes(32), endorser=bytes(4), signature=bytes(64))
    largest = relay.Head(witness="linz", old_size=0, path=path, head=head(), epochs=(epoch,) * 4096)
    assert len(FROM_SITE.encode(Parcel(message=largest, sequence=1, log_head=head()))) < 2**20
    from security.secagg.certificates import Ack, CheckCertificate
    from security.secagg.messages import ResultCertificate

    ack = Ack(site="graz", result=bytes(32), state_hash=bytes(32), bitmap=bytes(65536), signature=bytes(64))
    huge = ResultCertificate(result=bytes(32), check=CheckCertificate(acks=(ack,) * (MAX_PARCEL // 65536 + 1)))
    with pytest.raises(LocalProtocolError, match="larger than a frame"):
        FROM_COORDINATOR.encode(Parcel(message=huge, sequence=1, log_head=head()))
