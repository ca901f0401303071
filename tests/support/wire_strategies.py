"""Hypothesis strategies for any message, derived from the kinds of its fields."""

from __future__ import annotations

from functools import partial
from typing import Any

from hypothesis import strategies as st

from security.secagg import relay
from security.secagg.context import CohortMember, RoundContext
from security.secagg.fields import Bounded, FieldKind, Fixed, Many, Maybe, Name, Nested, Number, Wire, kinds
from security.secagg.messages import BOX_BYTES, PAIR_BYTES, DealtShare
from security.secagg.relay import HeadSignature, SignedHead

SOME = 3  # how many elements lists and how many bytes free fields have at most: bounds are tested elsewhere
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
log_names = st.from_regex(r"[a-z0-9][a-z0-9._/-]{0,40}", fullmatch=True)
digests = st.binary(min_size=32, max_size=32)


def values(kind: FieldKind) -> st.SearchStrategy[Any]:
    if isinstance(kind, Number):
        edges = st.sampled_from([kind.least, kind.limit])
        return edges | st.integers(kind.least, kind.limit)
    if isinstance(kind, Fixed):
        return st.binary(min_size=kind.length, max_size=kind.length)
    if isinstance(kind, Bounded):
        return st.binary(max_size=min(kind.limit, 40))
    if isinstance(kind, Name):
        return names
    if isinstance(kind, relay.LogName):
        return log_names
    if isinstance(kind, Nested):
        return messages(kind.type)
    if isinstance(kind, Many):
        return st.lists(values(kind.item), max_size=SOME).map(tuple)
    if isinstance(kind, Maybe):
        return st.none() | values(kind.item)
    raise TypeError(kind)


def _repeated(data: bytes, length: int) -> bytes:
    return (data * (length // len(data) + 1))[:length]


def messages(cls: type[Wire]) -> st.SearchStrategy[Any]:
    """Any valid message of a type."""
    fields = {name: values(kind) for name, kind in kinds(cls)}
    if cls is RoundContext:
        return _contexts(fields)
    if cls is DealtShare:
        # Whether a box is there is drawn, and what is in it: a thousand random bytes would use up the generator.
        for name, length in (("box", BOX_BYTES), ("pair", PAIR_BYTES)):
            fields[name] = st.just(b"") | st.binary(min_size=8, max_size=8).map(partial(_repeated, length=length))
    if cls is HeadSignature:
        fields["value"] = st.binary(min_size=64, max_size=64) | st.binary(min_size=72, max_size=72)
    return st.builds(cls, **fields)


@st.composite
def _contexts(draw: st.DrawFn, fields: dict[str, st.SearchStrategy[Any]]) -> RoundContext:
    """Members are distinct, sorted, each with a certificate of its own, and n in number."""
    ids = draw(st.lists(names, max_size=SOME, unique=True))
    certs = draw(st.lists(digests, min_size=len(ids), max_size=len(ids), unique=True))
    drawn = {name: draw(strategy) for name, strategy in fields.items() if name not in ("members", "n")}
    listed = zip(sorted(ids, key=str.encode), certs, strict=True)
    members = tuple(CohortMember(site=name, cert=cert) for name, cert in listed)
    return RoundContext(**drawn, members=members, n=len(ids))


heads = messages(SignedHead)
