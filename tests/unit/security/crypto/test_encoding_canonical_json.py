"""Our short road to RFC 8785 against the long one, and the schema's expressions against both."""

from __future__ import annotations

import json
import string
from typing import Any

import pytest
import rfc8785
from hypothesis import given, settings
from hypothesis import strategies as st

from lazaret.errors import CodecError, LocalProtocolError
from security.crypto import encoding
from security.log import schema
from security.log.machine import Heartbeat, LogMachine, Moment, Scope
from security.log.schema import (
    COUNT,
    DECIMAL,
    DIGEST,
    INTEGER,
    SCHEMAS,
    TEXT,
    TOKEN,
    VKEY,
    Event,
    decimal,
    event_from,
    event_type,
    explain,
    match_line,
    read_line,
    type_of,
)

KEYS = st.text(string.ascii_letters + string.digits + '._- /\\"', max_size=8)
LEAVES = st.none() | st.booleans() | st.integers(-encoding.MAX_INT, encoding.MAX_INT) | st.text(max_size=20)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)


@given(VALUES)
def test_same_bytes_as_rfc8785(value: object) -> None:
    assert encoding.dumps(value) == rfc8785.dumps(value)  # type: ignore[arg-type]  # any JSON value
    assert encoding.loads(encoding.dumps(value)) == value


@pytest.mark.parametrize(
    "value", [1.5, float("nan"), 2**53, -(2**53), "\ud800", {"ü": 1}, {1: 2}, b"x", object(), {"a": [0.0]}]
)
def test_refuses_what_is_not_in_the_subset(value: object) -> None:
    with pytest.raises(CodecError):
        encoding.dumps(value)


@pytest.mark.parametrize(
    "data", [b'{"a":1,"a":1}', b'{"b":1,"a":1}', b"[1, 2]", b"1.0", b"NaN", b'"\\u0041"', b"\xff", b""]
)
def test_refuses_other_spellings(data: bytes) -> None:
    with pytest.raises(CodecError):
        encoding.loads(data)


def test_depth_is_bounded() -> None:
    with pytest.raises(CodecError):
        encoding.loads(b"[" * 100 + b"]" * 100)
    with pytest.raises(CodecError):
        encoding.parse(b"[" * 100_000 + b"]" * 100_000)


# One value of each kind, good and bad

GOOD: dict[schema.ValueKind, list[Any]] = {
    TEXT: ["", "plain", 'with "quotes" and \\', "Zürich", "結果", "x" * 500],
    TOKEN: ["a", "site-a.example/audit", "9", "a:b"],
    DIGEST: ["ab" * 32],
    DECIMAL: ["0", "-1.5", "1e-05", "3.0", "inf", "1e22"],
    COUNT: [0, 1, 10**15 - 1],
    INTEGER: [-5, 0, 7],
    VKEY: ["a.b/c+01234567+" + "A" * 44],
}
BAD: dict[schema.ValueKind, list[Any]] = {
    TEXT: ["a\nb", "\u202e", "\x7f", "\ud800", "x" * 501, 1, None, ["a"], "\ufeff", "\u00ad"],
    TOKEN: ["", " ", "-a", "a b", "a+b", "ü", "a" * 129, 1],
    DIGEST: ["ab" * 31, "AB" * 32, 1, None],
    DECIMAL: ["", "01", "1.", ".5", "nan", "1e", "+1", 1.5, "--1"],
    COUNT: [-1, 10**15, True, 1.0, "1", None],
    INTEGER: [True, -0.0, 10**15, "-1"],
    VKEY: ["a+0+A", "a b+01234567+" + "A" * 44],
}


@pytest.mark.parametrize("kind", GOOD, ids=lambda kind: kind.name)
def test_kinds(kind: schema.ValueKind) -> None:
    for value in GOOD[kind]:
        assert kind.accepts(value), value
    for value in BAD[kind]:
        assert not kind.accepts(value), value


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_decimals_read_back(value: float) -> None:
    assert float(decimal(value)) == value
    assert DECIMAL.accepts(decimal(value))


# Whole lines


MECHANISM = {"kind": "dp-sgd", "rate": 9, "sensitivity": "1.0", "sigma": "1.1", "steps": 4}
BASE: dict[str, st.SearchStrategy[Any]] = {
    TEXT.name: st.text('ab "\\\\/<>&üß結', max_size=12),
    TOKEN.name: st.sampled_from(["a", "run-1", "site-a.example/audit", "Z:9"]),
    DIGEST.name: st.binary(min_size=32, max_size=32).map(bytes.hex),
    schema.IDENT.name: st.binary(min_size=16, max_size=16).map(bytes.hex),
    DECIMAL.name: st.floats(allow_nan=False, allow_infinity=False).map(decimal),
    VKEY.name: st.just("a.b/c+01234567+" + "A+/" * 14 + "Az"),
    COUNT.name: st.integers(0, schema.MAX_COUNT),
    INTEGER.name: st.integers(-schema.MAX_COUNT, schema.MAX_COUNT),
    schema.FLAG.name: st.booleans(),
    "a local artefact": st.just({"disposition": "local-only", "elements": 3, "hmac": "0" * 64, "kind": "prototypes"}),
    "the numbers of the size equation": st.fixed_dictionaries(
        {
            name: st.integers(0, 99)
            for name in ["cohort", "cosigned", "epochs", "frame", "frames", "head_signatures", "path"]
        }
        | {"named": st.none() | st.just("linz"), "vector_bytes": st.integers(0, 10**9)}
    ),
    "a mechanism": st.just(MECHANISM),
    "a plan": st.fixed_dictionaries(
        {"epsilon": st.sampled_from(["8.0", "0.5", "1e-05"]), "events": st.lists(st.just(MECHANISM), max_size=3)}
    ),
}


def _values(name: str) -> st.SearchStrategy[Any]:
    """Values of a kind, by its words."""
    if name in BASE:
        return BASE[name]
    if name.endswith(" or null"):
        return st.none() | _values(name.removesuffix(" or null"))
    if name.startswith("a list of "):
        return st.lists(_values(name.removeprefix("a list of ")), max_size=3)
    assert name.startswith("one of "), f"no strategy makes {name}"  # a new record needs its own, above
    return st.sampled_from(name.removeprefix("one of ").split(", "))


BODIES = st.sampled_from(sorted(SCHEMAS)).flatmap(
    lambda name: st.tuples(
        st.just(name), st.fixed_dictionaries({key: _values(kind.name) for key, kind in SCHEMAS[name].kinds.items()})
    )
)
NOW = Moment(wall_ms=1_800_000_000_000, mono_ms=5, boot="ab" * 16)


def _line(name: str, body: dict[str, Any]) -> bytes:
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in body.items()}
    event = SCHEMAS[name].cls(**fields)
    machine = LogMachine("site-a.example/audit")
    entries: list[Any] = []
    machine._emit(entries, event, NOW, Scope(run="run-1", round=3, actor='the "operator"'))
    return bytes(entries[-1].line)


@settings(max_examples=150, deadline=None)
@given(BODIES)
def test_every_event_type_makes_lines_that_match(case: tuple[str, dict[str, Any]]) -> None:
    name, body = case
    line = _line(name, body)
    assert rfc8785.dumps(json.loads(line)) == line
    assert type_of(line) == name.encode()
    entry = read_line(line)
    assert entry["body"] == json.loads(json.dumps(body))
    assert event_from(entry).body() == SCHEMAS[name].cls(**event_from(entry).body()).body()


@settings(max_examples=150, deadline=None)
@given(BODIES, st.data())
def test_what_matches_is_canonical(case: tuple[str, dict[str, Any]], data: st.DataObject) -> None:
    """The expression never accepts bytes that are not the one encoding of their value."""
    line = bytearray(_line(*case))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(line) - 1))
        match data.draw(st.sampled_from(["flip", "delete", "insert"])):
            case "flip":
                line[at] ^= 1 << data.draw(st.integers(0, 7))
            case "delete":
                del line[at]
            case _:
                line.insert(at, data.draw(st.sampled_from(b'"\\,:{}[]0179eE+-. u')))
    try:
        text = bytes(line).decode()
    except UnicodeDecodeError:
        return
    if match_line(text) is not None:
        assert rfc8785.dumps(json.loads(text)) == bytes(line)
    else:
        assert explain(bytes(line))


def test_registry_refuses_a_second_of_a_name() -> None:
    with pytest.raises(LocalProtocolError):
        event_type("heartbeat")(type("Again", (Event,), {"__annotations__": {}}))


def test_unknown_type_names_near_ones() -> None:
    line = _line("heartbeat", {"size": 1}).replace(b'"heartbeat"', b'"heartbeet"')
    with pytest.raises(CodecError, match="did it mean heartbeat"):
        read_line(line)


def test_events_are_frozen_and_checked() -> None:
    beat = Heartbeat(size=1)
    with pytest.raises(AttributeError):
        beat.size = 2  # type: ignore[misc]  # that is the point
    with pytest.raises(LocalProtocolError, match="size is not an integer"):
        Heartbeat(size=-1)
    with pytest.raises(TypeError):
        Heartbeat(1)  # type: ignore[misc]  # keyword only
