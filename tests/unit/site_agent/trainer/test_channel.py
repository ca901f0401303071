"""The channel between agent and trainer: typed, bounded, sealed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from lazaret.errors import BudgetExhausted, CodecError, DataError, WorkerLost
from security.dp.accountant import Mechanism, MechanismEvent
from security.dp.ledger import Terms, Unit
from security.log.events import TrainDone
from security.log.schema import MAX_COUNT
from site_agent.trainer import shared_memory as module
from site_agent.trainer.channel import (
    MAX_CLASSES,
    MAX_MESSAGE,
    RECEIVED_BY_AGENT,
    RECEIVED_BY_TRAINER,
    SHOWN_CLASSES,
    Artefact,
    Channel,
    CheckLine,
    EvaluatedRound,
    IsolationReport,
    OrderFailed,
    ReserveRound,
    SideScores,
    TrainedRound,
    TrainerAlive,
    TrainerSetup,
    TrainerStop,
    TrainRound,
    error_of,
    failed,
)
from site_agent.trainer.shared_memory import share, shared_document, shared_vector

TRAINED = TrainedRound(round=3, samples=7, loss_sum=0.1, hits=2, steps=4, wall_ms=9, artefacts=())


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel, socket.socket]]:
    """The agent's end, the trainer's end, and the trainer's bare socket."""
    ours, theirs = socket.socketpair()
    ours.settimeout(5)
    theirs.settimeout(5)
    agent, trainer = Channel(ours, RECEIVED_BY_AGENT), Channel(theirs, RECEIVED_BY_TRAINER)
    yield agent, trainer, theirs
    agent.close()
    trainer.close()


def test_a_vector_crosses_without_a_copy_and_cannot_be_changed(pair: tuple[Channel, Channel, socket.socket]) -> None:
    agent, trainer, _ = pair
    state = np.linspace(-1, 1, 100_000, dtype=np.float32)
    agent.send(TrainRound(round=3), state)
    received = trainer.receive()
    assert received is not None and received[0] == TrainRound(round=3) and received[1] is not None
    seals = fcntl.fcntl(received[1], fcntl.F_GET_SEALS)
    assert seals & fcntl.F_SEAL_WRITE
    with pytest.raises(PermissionError):
        os.write(received[1], b"x")
    found = shared_vector(received[1], len(state))
    assert np.array_equal(found, state) and not found.flags.writeable and not found.flags.owndata
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(received[1])  # the mapping keeps the memory; the descriptor is not kept


def test_messages_come_back_as_they_were(pair: tuple[Channel, Channel, socket.socket]) -> None:
    agent, trainer, _ = pair
    terms = Terms(population="patients", unit=Unit.PATIENT, delta=1e-5, cap=3.3, order=2.5)
    event = MechanismEvent(kind=Mechanism.DP_SGD, sigma=1.1, sensitivity=0.7, rate=12345, steps=9)
    side = SideScores(bacc=0.1 + 0.2, bauc=None, images=3, confusion=((1, 2), (3, 4)))
    setup = TrainerSetup(site="graz", data_key="ab" * 32, best=0.3, terms=terms)
    agent.send(setup, b"manifest")
    received = trainer.receive()
    assert received is not None and received[0] == setup and shared_document(received[1] or 0) == b"manifest"
    assert "abab" not in repr(setup)
    for message in (ReserveRound(round=1, events=(event,)), EvaluatedRound(round=2, best=True, test=side)):
        trainer.send(message)
        assert agent.receive() == (message, None)
    agent.send(TrainerStop())
    assert trainer.receive() == (TrainerStop(), None)
    trainer.close()
    assert agent.receive() is None
    with pytest.raises(WorkerLost):
        agent.send(TrainerStop())


GOOD = b'{"kind":"alive","processor_ms":3}'


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"kind":"nothing"}',
        b'{"kind":"alive"}',
        b'{"kind":"alive","processor_ms":-1}',
        b'{"kind":"alive","processor_ms":"3"}',
        b'{"kind":"alive","processor_ms":3,"prototypes":[1.0]}',
        b'{"kind":"stop"}',  # the agent's
        b'{"kind":"failed","code":"x","message":"' + b"m" * 2001 + b'"}',
        b'{"kind":"evaluated","round":1,"test":{"bacc":1.5,"bauc":null,"images":1}}',
        b'{"kind":"evaluated","round":1,"test":{"bacc":NaN,"bauc":null,"images":1}}',
        b'{"kind":"reserve","round":1,"events":[{"kind":"dp-sgd","sigma":-1.0,"sensitivity":1.0,"rate":1,"steps":1}]}',
        b'{"kind":"ready","fingerprint":"00","class_names":[],"counts":{}}',
        # More than an entry of the privacy log can hold: it would be refused there, and end the agent.
        b'{"kind":"alive","processor_ms":1000000000000000}',
    ],
)
def test_what_is_no_message_is_refused(pair: tuple[Channel, Channel, socket.socket], body: bytes) -> None:
    agent, _, theirs = pair
    theirs.sendall(struct.pack("<IB", len(GOOD), 0) + GOOD)
    assert agent.receive() == (TrainerAlive(processor_ms=3), None)
    theirs.sendall(struct.pack("<IB", len(body), 0) + body)
    with pytest.raises(CodecError):
        agent.receive()


EVENT = {"kind": "dp-sgd", "sigma": 1.0, "sensitivity": 1.0, "rate": 1, "steps": 1}
ARTEFACT = {"kind": "prototypes", "elements": 3, "hmac": "ab" * 32}
SIDE = {"bacc": 0.5, "bauc": None, "images": 3, "confusion": [[1, 2], [0, 3]]}
# One of each message that an agent reads and that has bounds, as an honest trainer could send it.
HONEST: dict[str, dict[str, Any]] = {
    "isolation": {
        "network_namespace": True, "seccomp": True, "landlock": True, "connection_possible": False,
        "keys_readable": False, "exception": "", "attempts": {"TCP": "refused"}, "missing": {}, "sentence": "isolated",
    },
    "ready": {
        "fingerprint": "ab" * 32, "version": "cd" * 32, "subjects": 2, "class_names": ["a", "b"],
        "counts": {"train": [3, 4]},
    },
    "attempt": {"what": "socket.connect"},
    "reserve": {"round": 1, "events": [EVENT]},
    "trained": {
        "round": 1, "samples": 7, "loss_sum": 0.5, "hits": 2, "steps": 4, "wall_ms": 9, "artefacts": [ARTEFACT],
    },
    "evaluated": {"round": 1, "predictor": "head", "test": SIDE},
    "check-line": {"verdict": "ok", "what": "w", "hint": "h"},
    "failed": {"code": "x", "message": "m"},
}  # fmt: skip
LONG = "n" * 2001


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("isolation", {"attempts": {str(at): "x" for at in range(17)}}),
        ("isolation", {"missing": {str(at): "x" for at in range(17)}}),
        ("isolation", {"attempts": {"n" * 201: "x"}}),
        ("isolation", {"exception": "e" * 65}),
        ("isolation", {"sentence": LONG}),
        ("isolation", {"seccomp": 1}),
        ("ready", {"fingerprint": "AB" * 32}),
        ("ready", {"version": "ab" * 31}),
        ("ready", {"subjects": -1}),
        ("ready", {"class_names": ["a"] * (MAX_CLASSES + 1)}),
        ("ready", {"counts": {"train": [1] * (MAX_CLASSES + 1)}}),
        ("ready", {"counts": {"train": [-1]}}),
        ("ready", {"counts": {"patients": [1]}}),
        ("attempt", {"what": "prototype 0.25"}),
        ("reserve", {"round": 0}),
        ("reserve", {"round": 2**53}),
        ("reserve", {"events": []}),
        ("reserve", {"events": [EVENT] * 65}),
        ("trained", {"round": 0}),
        ("trained", {"samples": MAX_COUNT + 1}),
        ("trained", {"samples": -1}),
        ("trained", {"hits": 0.5}),
        ("trained", {"steps": "4"}),
        ("trained", {"loss_sum": float("nan")}),
        ("trained", {"loss_sum": float("inf")}),
        ("trained", {"artefacts": [ARTEFACT] * 65}),
        ("trained", {"artefacts": [ARTEFACT | {"hmac": "prototype"}]}),
        ("evaluated", {"predictor": "n" * 201}),
        ("evaluated", {"test": SIDE | {"bacc": -0.1}}),
        ("evaluated", {"test": SIDE | {"bauc": 1.1}}),
        ("evaluated", {"test": SIDE | {"confusion": [[1]] * (SHOWN_CLASSES + 1)}}),
        ("check-line", {"verdict": "good"}),
        ("check-line", {"what": LONG}),
        ("failed", {"where": LONG}),
        ("failed", {"hint": LONG}),
        ("failed", {"code": ""}),
    ],
)
def test_every_bound_of_a_message_holds(
    pair: tuple[Channel, Channel, socket.socket], kind: str, wrong: dict[str, Any]
) -> None:
    """The same message goes through as an honest trainer sends it, and is refused with one thing wrong in it."""
    agent, _, theirs = pair

    def say(message: dict[str, Any]) -> None:
        body = json.dumps({"kind": kind} | message).replace("Infinity", "1e999").encode()
        memory = [share(b"four")] if kind == "trained" else []
        socket.send_fds(theirs, [struct.pack("<IB", len(body), len(memory))], memory)
        theirs.sendall(body)
        for descriptor in memory:
            os.close(descriptor)

    say(HONEST[kind])
    received = agent.receive()
    assert received is not None and received[0].kind == kind
    if received[1] is not None:
        os.close(received[1])
    say(HONEST[kind] | wrong)
    with pytest.raises(CodecError):
        agent.receive()


def test_two_pieces_of_memory_are_one_too_many(pair: tuple[Channel, Channel, socket.socket]) -> None:
    """The kernel gives what there is room for, and drops the rest without a word."""
    agent, _, theirs = pair
    before = len(os.listdir("/proc/self/fd"))
    body = json.dumps({"kind": "trained"} | HONEST["trained"]).encode()
    memory = [share(b"four") for _ in range(2)]
    socket.send_fds(theirs, [struct.pack("<IB", len(body), 1)], memory)
    theirs.sendall(body)
    for descriptor in memory:
        os.close(descriptor)
    with pytest.raises(CodecError, match="more than one"):
        agent.receive()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("seal", [fcntl.F_SEAL_WRITE, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW])
def test_memory_that_lacks_one_seal_is_refused(seal: int) -> None:
    """One that can still shrink would end the reader with a bus error."""
    seals = (fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL) & ~seal
    descriptor = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.write(descriptor, bytes(40))
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(CodecError, match="not sealed"):
        shared_vector(descriptor, 10)


@pytest.mark.parametrize(("length", "announced", "sent"), [(MAX_MESSAGE + 1, 0, 0), (33, 1, 0), (33, 0, 1), (33, 1, 1)])
def test_lengths_and_memory_are_bounded(
    pair: tuple[Channel, Channel, socket.socket], length: int, announced: int, sent: int
) -> None:
    """Too long; memory that did not come; memory that was not announced; memory that this message does not have."""
    agent, _, theirs = pair
    before = len(os.listdir("/proc/self/fd"))
    memory = [share(b"x") for _ in range(sent)]
    socket.send_fds(theirs, [struct.pack("<IB", length, announced)], memory)
    theirs.sendall(GOOD)
    with pytest.raises(CodecError):
        agent.receive()
    for descriptor in memory:
        os.close(descriptor)
    assert len(os.listdir("/proc/self/fd")) == before, "what was refused is not kept open"


def test_a_vector_is_never_sent_without_its_memory(pair: tuple[Channel, Channel, socket.socket]) -> None:
    with pytest.raises(CodecError, match="cannot be sent"):
        pair[1].send(TRAINED)


def test_memory_of_another_length_or_without_seals_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.zeros(10, dtype=np.float32)
    for words in (9, 11):
        with pytest.raises(CodecError, match="bytes"):
            shared_vector(share(values), words)
    kept = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.write(kept, values.tobytes())
    with pytest.raises(CodecError, match="not sealed"):
        shared_vector(os.dup(kept), 10)
    # The twin: without the check, the sender changes the vector after it was looked at.
    monkeypatch.setattr(module, "_SEALS", 0)
    seen = shared_vector(os.dup(kept), 10)
    assert not seen.any()
    os.pwrite(kept, np.float32(7).tobytes(), 0)
    assert seen[0] == 7
    os.close(kept)


def test_memory_that_cannot_be_mapped_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large pages of which the machine has none left, for instance: no reason for the agent to end."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr("mmap.mmap", full)
    with pytest.raises(CodecError, match="cannot be mapped"):
        shared_vector(share(np.zeros(10, dtype=np.float32)), 10)


def test_whole_numbers_cross_as_they_are() -> None:
    """The noisy units of shared noise have more digits than a float of four bytes."""
    units = np.array([2**30 + 1, -(2**30) - 1, 0], dtype="<i4")
    assert shared_vector(share(units), 3, whole=True).tolist() == units.tolist()
    assert units.astype("<f4").astype(np.int64).tolist() != units.tolist()


def test_an_error_crosses_as_what_it_is() -> None:
    error = BudgetExhausted("spent", where="patients", hint="stop")
    again = error_of(failed(error))
    assert type(again) is BudgetExhausted and (again.message, again.where, again.hint) == ("spent", "patients", "stop")
    assert type(error_of(failed(DataError("x")))) is DataError
    invented = error_of(OrderFailed(code="prototype 0.25", message="red"))
    assert type(invented) is WorkerLost and invented.message == "red"


def test_texts_arrive_without_control_characters(pair: tuple[Channel, Channel, socket.socket]) -> None:
    """They go to terminals, and to logs where a line is an entry."""
    agent, trainer, _ = pair
    evil = "\x1b[2Jred\n2026-01-01 all is well\x9b\u202e"
    report = {"network_namespace": True, "seccomp": True, "landlock": True, "connection_possible": False,
              "keys_readable": False, "exception": ""}  # fmt: skip
    trainer.send(IsolationReport(**report, attempts={evil: evil}, missing={evil: evil}, sentence=evil))  # type: ignore[arg-type]
    trainer.send(OrderFailed(code=evil, message=evil, where=evil, hint=evil))
    trainer.send(CheckLine(verdict="ok", what=evil, hint=evil))
    for _ in range(3):
        received = agent.receive()
        assert received is not None and "red" in str(received[0])
        texts = str(asdict(received[0]))
        assert "\\" not in texts and texts.isprintable()


@pytest.mark.parametrize("kind", ["a b", "\x1b[2J", "", "a" * 129, "patient\n"])
def test_the_kind_of_an_artefact_is_one_that_the_privacy_log_takes(
    pair: tuple[Channel, Channel, socket.socket], kind: str
) -> None:
    agent, trainer, _ = pair
    most = Artefact(kind="a" * 128, elements=MAX_COUNT, hmac="ab" * 32)
    trainer.send(replace(TRAINED, steps=MAX_COUNT, wall_ms=MAX_COUNT, artefacts=(most,) * 64), np.zeros(1, np.float32))
    received = agent.receive()
    assert received is not None
    os.close(received[1])
    kept = tuple({"disposition": "local-only", **asdict(one)} for one in received[0].artefacts)
    TrainDone(method="m", steps=received[0].steps, wall_ms=received[0].wall_ms, artefacts=kept)  # raises otherwise
    trainer.send(replace(TRAINED, artefacts=(replace(most, kind=kind),)), np.zeros(1, np.float32))
    with pytest.raises(CodecError):
        agent.receive()
