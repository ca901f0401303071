"""A21: names and fields that run into each other, and bytes with two readings.

Sites "1" and "23", or "12" and "3": without lengths a share from one pair would pass as one of the other.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from lazaret.errors import CodecError
from protos import parse
from protos.loopback import COORDINATOR
from protos.parse import FROM_COORDINATOR, FROM_SITE, Direction, Parcel, tag, varint
from security.crypto import encoding, signing
from security.crypto.encoding import Reader
from security.rng import CountedRandomness
from security.secagg import context as hashes
from security.secagg import messages
from security.secagg.context import share_hash
from security.secagg.fields import Wire
from security.secrets import Secret
from tests.support.evil import evil

NAMES = ["1", "12", "123", "2", "23", "3"]
KX = bytes(32)


LINE: Any = {"b_hash": KX, "s_hash": KX, "box": b"", "pair": b"", "kem_key": KX}


def all_bytes() -> list[tuple[str, bytes]]:
    """Everything that names two sites, for every pair of names."""
    share = Secret(bytes(32))
    found = []
    for one, other in product(NAMES, NAMES):
        pair = f"{one}/{other}"
        found += [
            (f"share {pair}", share_hash(share, kx=KX, dealer=one, holder=other, kind="b")),
            (f"leaf {pair}", hashes.share_leaf(KX, dealer=one, holder=other, **LINE)),
            (f"pair {pair}", hashes.pair_hash(KX, one, other, KX)),
            (f"accuse {pair}", signing.statement(b"accuse\0", one, KX, other.encode())),
            (f"fields {pair}", signing.statement(b"two\0", "s", one.encode(), other.encode())),
            (f"names {pair}", hashes.deals_digest(KX, [(one, other.encode())])),
        ]
    return found


def test_no_two_things_have_the_same_bytes() -> None:
    found = all_bytes()
    assert len({value for _, value in found}) == len(found)


def test_fields_without_lengths_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "tlv", lambda value: value)
    found = all_bytes()
    clashes = {name for name, value in found if sum(value == other for _, other in found) > 1}
    assert {"share 1/23", "share 12/3", "fields 12/3", "names 1/23"} <= clashes


def recorded() -> list[tuple[Direction, bytes]]:
    """The parcel of one message of every kind that a round with an audit knows, as it went over the wire."""
    run = evil(wide=False)
    run.transcript = []
    run.run_round(run.updates(1))
    first: dict[type[Wire], tuple[Direction, bytes]] = {}
    for sender, _, data in run.transcript:
        direction = FROM_COORDINATOR if sender == COORDINATOR else FROM_SITE
        first.setdefault(type(direction.decode(data).message), (direction, data))
    assert len(first) > 12
    return list(first.values())


def read(direction: Direction, data: bytes) -> Parcel | None:
    try:
        return direction.decode(data)
    except CodecError:
        return None


def test_every_accepted_form_is_the_only_one() -> None:
    """Cut, lengthened or changed in a byte: refused, or read as what it says and nothing else."""
    randomness = CountedRandomness(b"fuzz")
    for direction, data in recorded():
        assert read(direction, data + b"\0") is None and read(direction, data[:-1]) is None
        for _ in range(60):
            at = int.from_bytes(randomness.bytes(4), "big") % len(data)
            changed = data[:at] + randomness.bytes(1) + data[at + 1 :]
            parcel = read(direction, changed)
            assert parcel is None or direction.encode(parcel) == changed


def test_leftovers_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the comparison with the one encoding, one message has many, and logs disagree about what was sent."""
    leftover = tag(999, 2) + varint(1) + b"\0"  # a field that nobody knows
    shown = recorded()
    assert all(read(direction, data + leftover) is None for direction, data in shown)
    monkeypatch.setattr(parse, "check_same", lambda pieces, data, where: None)
    for direction, data in shown:
        parcel = read(direction, data + leftover)
        assert parcel is not None and direction.encode(parcel) == data


def test_records_have_no_leftovers() -> None:
    """What is decoded from a disk in the length-prefixed form has no second reading either."""
    ready = messages.Ready(site="graz", round=1)
    assert messages.Ready.from_bytes(ready.to_bytes()) == ready
    for broken in (ready.to_bytes() + b"\0", ready.to_bytes()[:-1]):
        with pytest.raises(CodecError):
            messages.Ready.from_bytes(broken)


def test_records_have_no_leftovers_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reader, "finish", lambda self: None)
    ready = messages.Ready(site="graz", round=1)
    assert messages.Ready.from_bytes(ready.to_bytes() + b"\0") == ready
