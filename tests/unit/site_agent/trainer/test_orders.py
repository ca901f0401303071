"""A trainer obeys its agent as far as the hospital's own policy goes, and opens nothing before."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest

from lazaret.errors import PolicyViolation
from security.dp.accountant import Mechanism, MechanismEvent
from security.dp.ledger import Terms, Unit
from security.dp.noise import NoiseSource
from security.rng import CountedRandomness
from site_agent.policy import SitePolicy
from site_agent.trainer import orders
from site_agent.trainer.channel import (
    RECEIVED_BY_AGENT,
    RECEIVED_BY_TRAINER,
    Channel,
    DataReady,
    EvaluateRound,
    OrderFailed,
    RoundReserved,
    TrainerSetup,
    TrainRound,
)
from site_agent.trainer.orders import ChannelBooks, OrderLoop
from tests.support.consortium_world import PLAN, World

SETUP = TrainerSetup(site="graz", data_key="ab" * 32, best=None, terms=None)
READY = DataReady(fingerprint="ab" * 32, version="ab" * 32, subjects=2, class_names=("a",), counts={"train": (3,)})


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    world = World.make(tmp_path_factory.mktemp("orders"))
    world.write_plan(PLAN)
    return world.publish().to_bytes()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was read of the hospital: the initial model, then the images."""
    found: list[str] = []

    def make(*_: Any, site: str, **__: Any) -> tuple[Any, DataReady]:
        found.append(site)
        return SimpleNamespace(), READY

    monkeypatch.setattr(orders, "pinned_model", lambda path, manifest: found.append("model") or (None, None))
    monkeypatch.setattr(orders, "make_trainer", make)
    return found


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The loop in a thread, and the agent's end of the channel."""
    ended = Event()
    monkeypatch.setattr(orders, "end", lambda code: ended.set())  # the process is that of this test
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    agent = Channel(ours, RECEIVED_BY_AGENT)

    (tmp_path / "memory").mkdir()  # a site's state folder has it

    def begin(policy: SitePolicy) -> Channel:
        config: Any = SimpleNamespace(policy=policy, state=tmp_path, model_file=lambda name: tmp_path / name)
        loop = OrderLoop(config, Channel(theirs, RECEIVED_BY_TRAINER))
        Thread(target=loop.run, daemon=True).start()
        return agent

    yield begin
    agent.close()
    assert ended.wait(10), "without an agent a trainer ends"


def answer(agent: Channel) -> Any:
    received = agent.receive()
    assert received is not None
    return received[0]


def test_a_manifest_against_the_policy_is_refused_before_anything_is_read(
    manifest: bytes, opened: list[str], start: Any
) -> None:
    """The agent has checked it too; but an agent is what an attacker from outside reaches first."""
    agent = start(SitePolicy(methods=("fedavg",)))
    agent.send(SETUP, manifest)
    refusal = answer(agent)
    assert isinstance(refusal, OrderFailed) and refusal.where == "[policy] methods" and opened == []


def test_a_manifest_within_the_policy_opens_the_data(manifest: bytes, opened: list[str], start: Any) -> None:
    agent = start(SitePolicy(methods=("fednpr-per",)))
    agent.send(SETUP, manifest)
    assert answer(agent) == READY and opened == ["model", "graz"]


@pytest.mark.parametrize("order", [TrainRound(round=1), EvaluateRound(round=1)])
def test_nothing_is_done_before_the_beginning(order: Any, opened: list[str], start: Any) -> None:
    agent = start(SitePolicy())
    agent.send(order, b"\0" * 4)
    refusal = answer(agent)
    assert isinstance(refusal, OrderFailed) and "the first order" in refusal.message and opened == []


def test_noise_that_can_be_repeated_is_never_booked() -> None:
    """Nobody would be protected by it; and nothing is asked of the agent then."""
    asked: list[Any] = []
    loop: Any = SimpleNamespace(ask=lambda question: asked.append(question) or RoundReserved(seq=3))
    terms = Terms(population="patients", unit=Unit.PATIENT, delta=1e-5, cap=3.3, order=2.5)
    event = MechanismEvent(kind=Mechanism.DP_SGD, sigma=1.1, sensitivity=0.7, rate=12345, steps=9)
    books = ChannelBooks(loop, terms)
    with pytest.raises(PolicyViolation, match="noise from a seed"):
        books.reserve(run="r", round_number=1, events=[event], noise=NoiseSource(CountedRandomness(b"seed")))
    assert asked == []
    assert books.reserve(run="r", round_number=1, events=[event], noise=NoiseSource()).seq == 3 and len(asked) == 1
