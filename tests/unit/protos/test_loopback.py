"""The federation in one process: what goes between its parties are the parcels that the shells would send."""

from __future__ import annotations

from collections import Counter

import pytest

from lazaret.errors import CodecError, LocalProtocolError
from protos.loopback import COORDINATOR, sent_message
from protos.parse import FROM_COORDINATOR, FROM_SITE, Parcel
from protos.stream_end import StreamEnd, empty_log_head
from security.crypto.merkle import EMPTY_ROOT
from security.log.note import NoteSigner
from security.secagg import messages
from security.secagg.relay import FRAMES, Ping, Pong
from tests.support.secagg_world import federation, random_updates

SEED = bytes(range(32))
HEAD = empty_log_head("graz", "lesions", SEED)


def pair() -> tuple[StreamEnd, StreamEnd]:
    return StreamEnd.of_site(HEAD), StreamEnd.of_coordinator(empty_log_head(COORDINATOR, "lesions", SEED))


def test_the_head_is_signed_by_the_key_of_its_log() -> None:
    key = NoteSigner.from_seed("graz.lesions/audit", SEED).key
    assert HEAD.note.verify([key]) == {key: None}
    assert (HEAD.origin, HEAD.size, HEAD.root) == ("graz.lesions/audit", 0, EMPTY_ROOT)


def test_parcels_are_numbered_in_each_direction() -> None:
    site, coordinator = pair()
    frame = messages.UploadFrame(kx=bytes(32), index=0, data=b"masked")
    sent = [site.encode(message) for message in (Pong(number=1), frame, Pong(number=2))]
    assert sent[0] == FROM_SITE.encode(Parcel(message=Pong(number=1), sequence=1, log_head=HEAD))
    assert sent[1] == FROM_SITE.encode(Parcel(message=frame, sequence=2))
    assert [coordinator.decode(data) for data in sent] == [Pong(number=1), frame, Pong(number=2)]
    assert site.decode(coordinator.encode(Ping(number=3))) == Ping(number=3)


@pytest.mark.parametrize("order", [[1], [0, 0], [0, 2]])
def test_a_gap_or_a_repetition_is_refused(order: list[int]) -> None:
    site, coordinator = pair()
    sent = [site.encode(Pong(number=number)) for number in range(3)]
    for at in order[:-1]:
        coordinator.decode(sent[at])
    with pytest.raises(CodecError, match="out of order"):
        coordinator.decode(sent[order[-1]])


def test_each_end_sends_and_takes_what_is_its_own() -> None:
    site, coordinator = pair()
    with pytest.raises(LocalProtocolError, match="does not travel"):
        site.encode(Ping(number=1))
    with pytest.raises(CodecError):
        coordinator.decode(coordinator.encode(Ping(number=1)))


def test_a_round_is_carried_in_parcels_of_the_network() -> None:
    run = federation(4)
    run.transcript = []
    assert run.run_round(random_updates(run.policy.layout, run.sites, 1)).total is not None
    run.restart_site("site-00")
    assert run.run_round(random_updates(run.policy.layout, run.sites, 2)).total is not None
    numbers: Counter[tuple[str, str]] = Counter()
    up: Counter[str] = Counter()
    for sender, receiver, data in run.transcript:
        parcel = (FROM_COORDINATOR if sender == COORDINATOR else FROM_SITE).decode(data)
        if parcel.sequence == 1:
            numbers[sender, receiver] = 0
        numbers[sender, receiver] += 1
        assert parcel.sequence == numbers[sender, receiver]
        assert sent_message(sender, data) == parcel.message
        if type(parcel.message) not in FRAMES:
            assert parcel.log_head is not None and parcel.log_head.origin == f"{sender}.loopback/audit"
        if sender != COORDINATOR:
            up[sender] += len(data)
    assert dict(up) == run.bytes_up
