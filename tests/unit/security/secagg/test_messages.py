"""One encoding for each message, one message for each encoding, and sizes that follow from public numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import security
from lazaret.errors import CodecError
from protos.loopback import COORDINATOR, Drop, LoopbackFederation, sent_message
from protos.parse import FROM_COORDINATOR, FROM_SITE, Parcel, tag, varint
from protos.stream_end import empty_log_head
from security.crypto import encoding, key_agreement
from security.secagg import fields, messages, records, relay
from security.secagg.certificates import Advert
from security.secagg.context import RoundContext
from security.secagg.fields import Wire
from security.secagg.registry import REGISTRY
from tests.support.secagg_world import federation, random_updates

HEAD = empty_log_head("graz", "lesions", bytes(32))
PROTOCOL = [entry.cls for entry in REGISTRY if entry.cls.__module__ != relay.__name__]


@cache
def recorded() -> tuple[tuple[str, str, bytes], ...]:
    """Two rounds of five sites, the second with a site that drops out."""
    run = federation(5)
    run.transcript = []
    run.run_round(random_updates(run.policy.layout, run.sites, 1))
    run.run_round(random_updates(run.policy.layout, run.sites, 2), drops={"site-01": Drop(messages.UploadFrame)})
    return tuple(run.transcript)


@cache
def five() -> LoopbackFederation:
    return federation(5)


@cache
def examples() -> dict[type[Wire], tuple[Wire, bytes]]:
    found: dict[type[Wire], tuple[Wire, bytes]] = {}
    for sender, _, data in recorded():
        message = sent_message(sender, data)
        found.setdefault(type(message), (message, data))
    return found


def test_a_round_uses_most_messages() -> None:
    assert len(examples()) >= 16


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value that a kind of field can hold."""
    match kind:
        case fields.Number():
            return st.integers(kind.least, kind.limit)
        case fields.Fixed():
            return st.binary(min_size=kind.length, max_size=kind.length)
        case fields.Bounded():
            return st.sampled_from([b"", bytes(min(kind.limit, key_agreement.BOX_BYTES))])
        case fields.Name():
            return st.sampled_from(["a", "1", "12", "site-07", "north.example"])
        case fields.Nested():
            return instances(kind.type)
        case fields.Many():
            return st.lists(values(kind.item), max_size=min(2, kind.limit)).map(tuple)
        case fields.Maybe():
            return st.none() | values(kind.item)
    raise AssertionError(kind)


def instances(cls: type[Wire]) -> st.SearchStrategy[Any]:
    if cls is RoundContext:
        plan = examples()[messages.Plan][0]
        assert isinstance(plan, messages.Plan)
        return st.integers(0, 2**64 - 1).map(lambda number: replace(plan.context, round=number))
    return st.fixed_dictionaries({name: values(kind) for name, kind in fields.kinds(cls)}).map(lambda told: cls(**told))


@pytest.mark.parametrize("cls", [*PROTOCOL, *records.KINDS.values()], ids=lambda cls: cls.__name__)
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_round_trip(cls: type[Wire], data: st.DataObject) -> None:
    value = data.draw(instances(cls))
    raw = value.to_bytes()
    assert cls.from_bytes(raw) == value
    for broken in (raw + b"\0", raw[:-1]):
        with pytest.raises(CodecError):
            cls.from_bytes(broken)
    if cls in PROTOCOL:
        direction = FROM_SITE if cls in relay.FROM_SITE else FROM_COORDINATOR
        parcel = Parcel(message=value, sequence=1, log_head=None if cls in relay.FRAMES else HEAD)
        assert direction.decode(direction.encode(parcel)) == parcel
    else:
        assert records.decode(records.encode(value)) == value


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_garbage_is_refused_or_means_exactly_itself(data: st.DataObject) -> None:
    """Flip bytes of a real parcel: it is refused, or it is the one encoding of another one."""
    message, raw = data.draw(st.sampled_from(sorted(examples().values(), key=lambda pair: pair[1][:4])))
    direction = FROM_SITE if type(message) in relay.FROM_SITE else FROM_COORDINATOR
    changed = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, min(len(changed), 400) - 1))] = data.draw(st.integers(0, 255))
    for bent in (bytes(changed), bytes(changed[:2000])):
        try:
            parcel = direction.decode(bent)
        except CodecError:
            continue
        assert direction.encode(parcel) == bent


def test_unknown_kinds_and_long_heads() -> None:
    sequence = tag(100, 1) + (1).to_bytes(8, "little")
    with pytest.raises(CodecError, match="no message or no sequence number"):
        FROM_SITE.decode(tag(99, 2) + varint(0) + sequence)
    lines = (relay.HeadSignature(name="a" * relay.MAX_LOG_NAME, key_id=bytes(4), value=bytes(72)),)
    with pytest.raises(CodecError, match=r"SignedHead\.signatures: expected a tuple of at most 64"):
        replace(HEAD, signatures=lines * (relay.MAX_SIGNATURES + 1))
    with pytest.raises(CodecError, match=r"SignedHead\.origin: expected a log name of at most"):
        replace(HEAD, origin="a" * (relay.MAX_LOG_NAME + 1))
    with pytest.raises(CodecError, match="unknown record kind"):
        records.decode(encoding.u32(999))


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: messages.Ready(site="", round=1), "expected a name"),
        (lambda: messages.Ready(site="a/b", round=1), "expected a name"),
        (lambda: messages.Ready(site="a" * 65, round=1), "expected a name"),
        (lambda: messages.Ready(site="a", round=-1), "whole number"),
        (lambda: messages.Ready(site="a", round=True), "whole number"),
        (lambda: messages.Refusal(site="a", ctx=bytes(31)), "expected 32 bytes"),
        (lambda: messages.UploadFrame(kx=bytes(32), index=0, data=bytes(256 * 1024 + 1)), "at most"),
        (lambda: messages.DealtShare(b_hash=bytes(32), s_hash=bytes(32), box=b"x", pair=b""), "boxes are empty"),
        (lambda: messages.Rollback(advert="x"), "expected a Advert"),  # type: ignore[arg-type]
        (lambda: messages.AuditOrder(result=bytes(32), absent=["a"]), "tuple"),  # type: ignore[arg-type]
    ],
)
def test_a_message_is_checked_when_it_is_made(build: Callable[[], Any], text: str) -> None:
    with pytest.raises(CodecError, match=text):
        build()


def test_members_are_sorted_distinct_and_counted() -> None:
    plan = examples()[messages.Plan][0]
    assert isinstance(plan, messages.Plan)
    members = plan.context.members
    for broken in (members[::-1], members[:-1], (members[0], *members[:-1])):
        with pytest.raises(CodecError, match="members"):
            replace(plan.context, members=broken)


def test_ids_that_run_together_sign_different_bytes() -> None:
    """ "1" + "23" and "12" + "3" are not the same: every field has its length."""
    advert = examples()[Advert][0]
    assert isinstance(advert, Advert)
    bodies = {replace(advert, site=site).body() for site in ("1", "12", "23", "123")}
    assert len(bodies) == 4


def subclasses(cls: type[Wire]) -> set[type[Wire]]:
    return {inner for found in cls.__subclasses__() for inner in (found, *subclasses(found))}


def test_the_length_prefixed_form_is_read_from_disks_only() -> None:
    """The journal, two columns of the coordinator's database, the evidence file, the newest verified result at a site
    and the file of it that an operator carries; nothing that a peer has sent."""
    root = Path(security.__file__).parents[1]
    known = "|".join(sorted({"cls", *(cls.__name__ for cls in subclasses(Wire))}))
    read = re.compile(rf"\b({known})\.(from_bytes|read)\(")
    found: dict[str, set[str]] = {}
    for package in ("lazaret", "security", "protos", "npr", "site_agent", "coordinator"):
        for path in (root / package).rglob("*.py"):
            text = path.read_text()
            if "security.secagg" in text and (names := {match[1] for match in read.finditer(text)}):
                found[path.relative_to(root).as_posix()] = names
    assert found == {
        "coordinator/round_history.py": {"Result", "CheckCertificate"},
        "security/secagg/handover.py": {"Jump"},
        "security/secagg/records.py": {"cls"},
        "security/secagg/site/results.py": {"cls"},
        "site_agent/state_dir.py": {"Jump"},
    }
    assert re.search(r"\bReader\b", (root / "protos" / "parse.py").read_text()) is None


def test_messages_of_sites_are_those_that_sites_send() -> None:
    for sender, _, data in recorded():
        message = sent_message(sender, data)
        assert (type(message) in relay.FROM_SITE) == (sender != COORDINATOR)
