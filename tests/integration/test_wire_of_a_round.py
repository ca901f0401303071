"""Whole rounds of the real machines, every message through the wire's one encoding and the size equation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from protos.loopback import COORDINATOR, Drop
from protos.parse import FROM_COORDINATOR, FROM_SITE, Parcel
from security.secagg import messages
from security.secagg.certificates import Advert
from security.secagg.fields import Wire
from security.secagg.messages import Agree, UploadFrame
from security.secagg.registry import Shape
from security.secagg.relay import FRAMES, HeadSignature, SignedHead
from security.secagg.sizes import expected_bytes
from tests.support.secagg_world import federation, random_updates, reference_sum, small_layout

FEDERATION = "loopback"


def head(origin: str) -> SignedHead:
    signature = HeadSignature(name=origin, key_id=bytes(4), value=bytes(64))
    return SignedHead(origin=origin, size=1, root=bytes(32), signatures=(signature,))


def later_members(message: Wire) -> int:
    """How many pairs a message has a secret or its hash for."""
    if isinstance(message, Advert):
        return len(message.pair_hashes)
    return sum(bool(line.pair) for line in message.shares) if isinstance(message, messages.Shares) else 0


@dataclass
class ProtobufWire:
    """Stands between the machines: what arrives is what was read from the bytes that were sent."""

    vector_bytes: int
    cohorts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    carried: set[str] = field(default_factory=set)
    up: int = 0

    def __call__(self, sender: str, receiver: str, message: Wire) -> Iterable[Wire]:
        direction = FROM_COORDINATOR if sender == COORDINATOR else FROM_SITE
        if isinstance(message, messages.Plan):
            self.cohorts[receiver] = message.context.sites
        log_head = None if type(message) in FRAMES else head(f"{sender}.{FEDERATION}/audit")
        data = direction.encode(Parcel(message=message, sequence=1, log_head=log_head))
        if sender != COORDINATOR:
            self.up += len(data) if not isinstance(message, Advert | messages.Shares) else 0
            assert len(data) == self._due(sender, message), type(message).__name__
        self.carried.add(type(message).__name__)
        parcel = direction.decode(data)
        assert parcel.log_head == log_head
        yield parcel.message

    def _due(self, sender: str, message: Wire) -> int:
        shape = Shape(
            federation=FEDERATION,
            site=sender,
            cohort=self.cohorts.get(sender, ()),
            vector_bytes=self.vector_bytes,
            frame=message.index if isinstance(message, UploadFrame) else 0,
            path=later_members(message),
        )
        return expected_bytes(type(message), shape)


@pytest.mark.parametrize("words", [40, 150_000])
def test_rounds_over_the_wire_give_the_exact_sum(words: int) -> None:
    layout = small_layout(5, words=words)
    wire = ProtobufWire(vector_bytes=layout.byte_length)
    parties = federation(5, layout=layout)
    parties.hook = wire
    for number, silent in enumerate(["site-01", None, "site-03"], start=1):
        updates = random_updates(layout, parties.sites, seed=number)
        drops = {silent: Drop(Agree)} if silent else {}
        outcome = parties.run_round(updates, drops=drops)
        assert outcome.total is not None
        assert outcome.total.tolist() == reference_sum(layout, updates, outcome.survivors)
    parties.check_promises()
    assert wire.carried >= {
        "Plan",
        "Advert",
        "Adverts",
        "Shares",
        "Deliver",
        "UploadHeader",
        "UploadFrame",
        "Survivors",
        "Agree",
        "Quorum",
        "Unmask",
        "Result",
        "SumFrame",
        "ChunkRequest",
        "ChunkPiece",
        "Ack",
    }


def test_what_a_site_sends_is_hardly_more_than_its_vector() -> None:
    layout = small_layout(4, words=1_000_000)
    wire = ProtobufWire(vector_bytes=layout.byte_length)
    parties = federation(4, layout=layout)
    parties.hook = wire
    parties.run_round(random_updates(layout, parties.sites, seed=1), audit=False)
    # Keys and shares are counted apart: they do not grow with the vector.
    beside = wire.up / 4 - layout.byte_length
    assert 0 < beside < 8000  # half a thousandth of a vector of 16 MB
