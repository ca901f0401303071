"""Heads and cosignatures in typed pieces give back the very notes that were signed."""

from __future__ import annotations

import pytest

from lazaret.errors import CodecError
from protos.parse import FROM_COORDINATOR, FROM_SITE, Parcel
from security.log.keys import Endorsement, endorse
from security.log.note import Checkpoint, KeyType, Note, NoteSigner
from security.log.witness import HeldCheckpoint, Submission
from security.secagg import relay
from security.secagg.fields import Wire
from security.secagg.relay import EpochKey, Head, HeadSignature, SignedHead, message_id

ORIGIN = "graz.lesions/audit"
ROOT = NoteSigner.from_seed(ORIGIN, bytes([1]) * 32)
EPOCHS = [NoteSigner.from_seed(ORIGIN, bytes([number]) * 32) for number in (2, 3)]
WITNESS = NoteSigner.from_seed("linz.lesions/witness", bytes([9]) * 32, KeyType.COSIGNER)


def endorsements() -> tuple[Note, ...]:
    first, second = (Endorsement(origin=ORIGIN, epoch=n, key=key.key) for n, key in enumerate(EPOCHS))
    return endorse(ROOT, first), endorse(EPOCHS[0], second)


def signed_head(size: int = 5) -> Note:
    text = Checkpoint(origin=ORIGIN, size=size, root=bytes(range(32))).text
    return Note(text=text, signatures=(EPOCHS[1].sign(text), WITNESS.cosign(text, 1_800_000_000)))


def over_the_wire(message: Wire) -> Wire:
    """Up from the owner of a log to the coordinator, and down from there to a witness."""
    head = SignedHead.of(signed_head())
    up = FROM_SITE.decode(FROM_SITE.encode(Parcel(message=message, sequence=1, log_head=head)))
    down = Parcel(message=up.message, sequence=7, log_head=head)
    return FROM_COORDINATOR.decode(FROM_COORDINATOR.encode(down)).message


def test_a_head_comes_back_byte_for_byte() -> None:
    note = signed_head()
    typed = SignedHead.of(note)
    assert typed.note.encode() == note.encode()
    pong = Parcel(message=relay.Pong(number=1), sequence=1, log_head=typed)
    assert FROM_SITE.decode(FROM_SITE.encode(pong)).log_head == typed
    assert typed.note.verify([EPOCHS[1].key, WITNESS.key]) == {EPOCHS[1].key: None, WITNESS.key: 1_800_000_000}


def test_a_submission_comes_back() -> None:
    offer = Submission(old_size=3, path=(bytes(32), bytes([7]) * 32), note=signed_head(), endorsements=endorsements())
    travelled = over_the_wire(Head.of("linz", offer))
    assert isinstance(travelled, Head)
    assert travelled.submission == offer
    assert travelled.witness == "linz"


def test_a_held_head_comes_back_and_still_verifies() -> None:
    held = HeldCheckpoint(note=signed_head(), endorsements=endorsements())
    travelled = over_the_wire(relay.Held.of("linz", held))
    assert isinstance(travelled, relay.Held) and travelled.held == held
    travelled.held.verify(ROOT.key, ORIGIN)


def test_epoch_keys_travel_in_order_only() -> None:
    first, second = endorsements()
    assert EpochKey.of(first, 0).note(ORIGIN, 0) == first
    with pytest.raises(CodecError, match="not in order"):
        EpochKey.of(second, 0)


@pytest.mark.parametrize("length", [0, 63, 65, 71])
def test_a_signature_has_one_of_two_lengths(length: int) -> None:
    with pytest.raises(CodecError):
        HeadSignature(name=ORIGIN, key_id=bytes(4), value=bytes(length))


@pytest.mark.parametrize("name", ["", "a b", "a+b", "x" * 161, "é", "/a"])
def test_log_names_hold_nothing_but_a_name(name: str) -> None:
    with pytest.raises(CodecError, match="log name"):
        HeadSignature(name=name, key_id=bytes(4), value=bytes(64))


def test_message_ids_are_all_different() -> None:
    places = [
        (site, session, sequence, from_site)
        for site in ("a", "b", "a1")
        for session in (1, 2, 11)
        for sequence in (1, 2, 11)
        for from_site in (True, False)
    ]
    ids = {message_id(site, session, number, from_site=way) for site, session, number, way in places}
    assert len(ids) == len(places)
    assert all(len(name) == 32 for name in ids)
