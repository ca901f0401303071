"""A21: names and fields that run into each other, and bytes with two readings.

Sites "1" and "23", or "12" and "3": without lengths a share from one pair would pass as one of the other.
"""

from __future__ import annotations

from itertools import product

import pytest

from lazaret.errors import CodecError
from security.crypto import encoding, shamir, signing
from security.crypto.encoding import Reader
from security.rng import CountedRandomness
from security.secagg import context as hashes
from security.secagg import messages
from security.secagg.fields import Wire
from security.secrets import Secret
from tests.support.evil import evil

NAMES = ["1", "12", "123", "2", "23", "3"]
KX = bytes(32)


def all_bytes() -> list[tuple[str, bytes]]:
    """Everything that names two sites, for every pair of names."""
    share = Secret(bytes(32))
    found = []
    for one, other in product(NAMES, NAMES):
        pair = f"{one}/{other}"
        found += [
            (f"share {pair}", shamir.share_hash(share, kx=KX, dealer=one, holder=other, kind="b")),
            (f"leaf {pair}", hashes.share_leaf(KX, dealer=one, holder=other, b_hash=KX, s_hash=KX, box=b"")),
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


def recorded() -> list[bytes]:
    """One message of every kind that a round with an audit knows."""
    run = evil(wide=False)
    run.transcript = []
    run.run_round(run.updates(1))
    first: dict[type[Wire], bytes] = {}
    for _, _, data in run.transcript:
        first.setdefault(type(messages.decode(data)[0]), data)
    assert len(first) > 12
    return list(first.values())


def read(data: bytes) -> Wire | None:
    try:
        return messages.decode(data)[0]
    except CodecError:
        return None


def test_every_accepted_form_is_the_only_one() -> None:
    """Cut, lengthened or changed in a byte: refused, or read as what it says and nothing else."""
    randomness = CountedRandomness(b"fuzz")
    for data in recorded():
        assert read(data + b"\0") is None and read(data[:-1]) is None
        for _ in range(60):
            at = int.from_bytes(randomness.bytes(4), "big") % len(data)
            changed = data[:at] + randomness.bytes(1) + data[at + 1 :]
            message = read(changed)
            if message is None:
                continue
            _, head = messages.decode(changed)
            assert messages.encode(message, log_head=head) == changed


def test_leftovers_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check at the end, one message has many encodings, and logs disagree about what was sent."""
    monkeypatch.setattr(Reader, "finish", lambda self: None)
    for data in recorded():
        message = read(data + b"\0")
        assert message is not None and messages.encode(message) != data + b"\0"
