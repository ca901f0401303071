"""The size equation: what a site sends has exactly the length that public numbers give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lazaret.errors import LocalProtocolError
from protos.parse import FROM_SITE, Parcel
from security.crypto.key_agreement import BOX_BYTES, PAIR_BYTES
from security.crypto.ring import FRAME_BYTES
from security.secagg import certificates, messages, relay
from security.secagg.fields import Wire
from security.secagg.messages import DealtShare
from security.secagg.registry import REGISTRY, Shape
from security.secagg.relay import FRAMES, EpochKey, HeadSignature, SignedHead
from security.secagg.sizes import expected_bytes

D, S, K = bytes(32), bytes(64), bytes(32)


def head(origin: str, signatures: int = 1, witness: str = "", cosigned: int = 0) -> SignedHead:
    own = HeadSignature(name=origin, key_id=bytes(4), value=bytes(64))
    other = HeadSignature(name=witness or "x", key_id=bytes(4), value=bytes(72))
    return SignedHead(origin=origin, size=2**40, root=D, signatures=(own,) * signatures + (other,) * cosigned)


def advert(site: str, later: int) -> certificates.Advert:
    return certificates.Advert(
        site=site,
        ctx=D,
        mask_key=K,
        mask_kem=bytes(1184),
        share_key=K,
        share_kem=bytes(1184),
        pair_hashes=(D,) * later,
        commitment=D,
        sequence=1,
        log_size=0,
        log_root=D,
        ledger_head=D,
        signature=S,
    )


def shares(shape: Shape) -> Wire:
    lines = tuple(
        DealtShare(
            b_hash=D,
            s_hash=D,
            box=b"" if member == shape.site else bytes(BOX_BYTES),
            pair=bytes(PAIR_BYTES) if at >= len(shape.cohort) - shape.path else b"",
        )
        for at, member in enumerate(shape.cohort)
    )
    return messages.Shares(site=shape.site, kx=D, shares=lines, signature=S)


def upload_frame(shape: Shape) -> Wire:
    length = min(FRAME_BYTES, shape.vector_bytes - shape.frame * FRAME_BYTES)
    return messages.UploadFrame(kx=D, index=shape.frame, data=bytes(length))


def ack(shape: Shape) -> Wire:
    chunks = -(-shape.vector_bytes // FRAME_BYTES)
    return certificates.Ack(site=shape.site, result=D, state_hash=D, bitmap=bytes((chunks + 7) // 8), signature=S)


def offered(shape: Shape) -> Wire:
    epochs = (EpochKey(public=K, endorser=bytes(4), signature=S),) * shape.epochs
    own = head(shape.origin, shape.head_signatures)
    return relay.Head(witness=shape.named, old_size=1, path=(D,) * shape.path, head=own, epochs=epochs)


def held(shape: Shape) -> Wire:
    epochs = (EpochKey(public=K, endorser=bytes(4), signature=S),) * shape.epochs
    witness = f"{shape.site}.{shape.federation}/witness"
    kept = head(shape.named, shape.head_signatures, witness, shape.cosigned)
    return relay.Held(witness=shape.site, head=kept, epochs=epochs)


def cosignature(shape: Shape) -> Wire:
    name = f"{shape.site}.{shape.federation}/witness"
    line = HeadSignature(name=name, key_id=bytes(4), value=bytes(72))
    return relay.Cosignature(origin=shape.named, size=1, signature=line)


MAKERS: dict[type[Wire], Callable[[Shape], Wire]] = {
    messages.Hello: lambda s: messages.Hello(site=s.site, open_ctx=D, round=0, result=D),
    messages.Ready: lambda s: messages.Ready(site=s.site, round=2**63),
    messages.Refusal: lambda s: messages.Refusal(site=s.site, ctx=D),
    certificates.Advert: lambda s: advert(s.site, s.path),
    messages.Shares: shares,
    messages.Accusation: lambda s: messages.Accusation(site=s.site, kx=D, dealer=s.named, signature=S),
    messages.Disclosure: lambda s: messages.Disclosure(
        site=s.site, kx=D, holder=s.named, b_share=D, s_share=D, pair=D if s.named > s.site else b"", signature=S
    ),
    messages.UploadHeader: lambda s: messages.UploadHeader(
        site=s.site, kx=D, deals=D, length=s.vector_bytes, root=D, signature=S
    ),
    messages.UploadFrame: upload_frame,
    messages.Agree: lambda s: messages.Agree(site=s.site, kx=D, survivors=D, signature=S),
    messages.Unmask: lambda s: messages.Unmask(
        site=s.site, kx=D, survivors=D, shares=(D,) * len(s.cohort), signature=S
    ),
    messages.Abort: lambda s: messages.Abort(site=s.site, ctx=D, code=1, signature=S),
    messages.Rollback: lambda s: messages.Rollback(advert=advert(s.named, s.path)),
    messages.ChunkRequest: lambda s: messages.ChunkRequest(site=s.site, result=D, chunk=0),
    certificates.Ack: ack,
    relay.Open: lambda s: relay.Open(
        protocol=1, federation=s.federation, site=s.site, session=1, manifest_version=0, manifest_hash=D
    ),
    relay.Pong: lambda s: relay.Pong(number=0),
    relay.ModelRequest: lambda s: relay.ModelRequest(manifest_version=2, next_frame=0),
    relay.Decline: lambda s: relay.Decline(site=s.site, round=1),
    relay.Head: offered,
    relay.Held: held,
    relay.Cosignature: cosignature,
}


def test_every_message_of_a_site_has_an_equation() -> None:
    assert set(MAKERS) == set(relay.FROM_SITE)


@pytest.mark.parametrize("cls", list(MAKERS), ids=[cls.__name__ for cls in MAKERS])
def test_what_a_message_mentions_is_all_that_its_length_takes_from_it(cls: type[Wire]) -> None:
    """A door that knows cohort, vector and head has the whole shape once it has looked at the message."""
    known = Shape(federation="lesions", site="graz", cohort=("graz", "linz", "wien"), vector_bytes=1000)
    shape = replace(known, named="linz", path=3, epochs=2, cosigned=1)
    message = MAKERS[cls](shape)
    log_head = None if cls in FRAMES else head(shape.origin)
    data = FROM_SITE.encode(Parcel(message=message, sequence=1, log_head=log_head))
    assert expected_bytes(cls, REGISTRY[cls].shape_of(message, known)) == len(data)


def check(cls: type[Wire], shape: Shape, sequence: int) -> None:
    log_head = None if cls in FRAMES else head(shape.origin, shape.head_signatures)
    data = FROM_SITE.encode(Parcel(message=MAKERS[cls](shape), sequence=sequence, log_head=log_head))
    assert len(data) == expected_bytes(cls, shape)


names = st.from_regex(r"[a-z][a-z0-9.-]{0,30}", fullmatch=True)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    site, length = draw(names), draw(st.integers(1, 3 * FRAME_BYTES))
    return Shape(
        federation=draw(names),
        site=site,
        cohort=sorted({*draw(st.lists(names, max_size=40)), site}),
        vector_bytes=length,
        head_signatures=draw(st.integers(1, 2)),
        path=draw(st.integers(0, 63)),
        epochs=draw(st.integers(0, 400)),
        named=draw(names),
        cosigned=1,
        frame=(length - 1) // FRAME_BYTES,
    )


@pytest.mark.parametrize("cls", list(MAKERS), ids=[cls.__name__ for cls in MAKERS])
def test_the_length_follows_from_public_numbers(cls: type[Wire]) -> None:
    @settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(shapes(), st.integers(1, 2**64 - 1))
    def run(shape: Shape, sequence: int) -> None:
        check(cls, shape, sequence)

    run()


def test_other_messages_have_none() -> None:
    with pytest.raises(LocalProtocolError, match="not a message of a site"):
        expected_bytes(messages.Plan, Shape(federation="f", site="s"))


def test_a_frame_beyond_the_vector_has_no_length() -> None:
    with pytest.raises(LocalProtocolError, match="length"):
        expected_bytes(messages.UploadFrame, Shape(federation="f", site="s", vector_bytes=10, frame=1))


def test_one_byte_more_is_seen() -> None:
    shape = Shape(federation="f", site="s", cohort=("s", "t"), vector_bytes=16)
    longer = messages.UploadFrame(kx=D, index=0, data=bytes(17))
    assert len(FROM_SITE.encode(Parcel(message=longer, sequence=1))) == expected_bytes(messages.UploadFrame, shape) + 1
