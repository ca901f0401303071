"""The agent believes nothing that a trainer says, and starts it again when it is gone."""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lazaret.errors import BudgetExhausted, CodecError, ConfigError, DataError, PolicyViolation, WorkerLost
from security.dp.accountant import Mechanism, MechanismEvent
from security.dp.ledger import Reservation
from security.dp.noise import NoiseSource
from site_agent import supervisor as module
from site_agent.supervisor import Supervisor
from site_agent.trainer.channel import (
    RECEIVED_BY_TRAINER,
    Channel,
    DataReady,
    EvaluatedRound,
    EvaluateRound,
    ReserveRefused,
    ReserveRound,
    RoundReserved,
    SideScores,
    TrainedRound,
    TrainerAlive,
    TrainerSetup,
    TrainerStop,
    TrainRound,
    failed,
)
from tests.support.isolated import ISOLATED

WORDS = 5
STATE = np.arange(WORDS, dtype=np.float32)
EVENT = MechanismEvent(kind=Mechanism.DP_SGD, sigma=1.0, sensitivity=1.0, rate=100, steps=2)
READY = DataReady(fingerprint="ab" * 32, version="ab" * 32, subjects=2, class_names=("a",), counts={"train": (3,)})
Script = Callable[[Channel, Any], None]


def trained(number: int) -> TrainedRound:
    return TrainedRound(round=number, samples=7, loss_sum=0.5, hits=2, steps=4, wall_ms=9, artefacts=())


class Scripted:
    """A trainer whose answers a test writes; a thread in the place of a process."""

    def __init__(self, script: Script, *, first: Any = ISOLATED, ready: Any = READY, asked: bool = False) -> None:
        self.asked, self._stopped = asked, Event()
        self.connection, theirs = socket.socketpair()
        self._channel = Channel(theirs, RECEIVED_BY_TRAINER)
        self._script, self._first, self._ready = script, first, ready
        Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            if self._first is None:
                return
            self._channel.send(self._first)
            setup = self._channel.receive()
            module.release(None if setup is None else setup[1])
            if self._ready is None:
                self._stopped.wait(30)  # as one that loads torch, and reads nothing
                return
            self._channel.send(self._ready)
            while (order := self._channel.receive()) is not None and not isinstance(order[0], TrainerStop):
                module.release(order[1])
                self._script(self._channel, order[0])
        except (WorkerLost, CodecError, ConnectionError):
            pass
        finally:
            self._channel.close()

    def stop(self) -> None:
        self._stopped.set()

    def end(self) -> str:
        self._stopped.wait(module.STOP_SECONDS if self._ready is None else 0)
        return "it ended"


class Books:
    """A budget that is written down."""

    shares_noise = False

    def __init__(self, error: Exception | None = None) -> None:
        self.booked: list[tuple[int, tuple[MechanismEvent, ...]]] = []
        self.committed: list[int] = []
        self._error = error

    def reserve_planned(self, round_number: int, events: tuple[MechanismEvent, ...]) -> Reservation:
        if self._error is not None:
            raise self._error
        self.booked.append((round_number, events))
        return Reservation(seq=len(self.booked), events=events, noise=NoiseSource())

    def commit(self, reservation: Reservation) -> None:
        self.committed.append(reservation.seq)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_PAUSE", 0.01)


@contextmanager
def supervised(*lives: Callable[[], Any], budget: Any = None, **more: Any) -> Iterator[Supervisor]:
    """One trainer after the other; the last one again and again."""
    started = iter([*lives, *[lives[-1]] * 20])
    found = Supervisor(
        lambda: next(started)(),
        lambda: (TrainerSetup(site="graz", data_key="ab" * 32, best=None, terms=None), b"manifest"),
        words=WORDS,
        seconds=30,
        budget=budget,
        **more,
    )
    try:
        found.start()
        yield found
    finally:
        found.close()


def honest(channel: Channel, order: Any) -> None:
    channel.send(TrainerAlive(processor_ms=1))
    if isinstance(order, TrainRound):
        channel.send(trained(order.round), STATE + order.round)
    if isinstance(order, EvaluateRound):
        channel.send(EvaluatedRound(round=order.round, predictor="own", test=SideScores(bacc=0.5, bauc=None, images=3)))


def test_a_round_and_a_look_at_the_model() -> None:
    told: list[object] = []
    with supervised(lambda: Scripted(honest), isolated=told.append, opened=told.append) as found:
        result = found.train(3, STATE)
        assert np.array_equal(result.update, STATE + 3) and (result.samples, result.steps) == (7, 4)
        sides = {"bacc": 0.5, "bauc": None, "images": 3}
        assert found.evaluate(3, STATE) == {"round": 3, "kind": "own", "test": sides}
    assert told == [ISOLATED, READY], "isolation is known before the data are opened"


def test_an_error_of_the_trainer_is_the_rounds_error_and_the_trainer_goes_on() -> None:
    answers = iter([lambda channel, _: channel.send(failed(DataError("NaN"))), honest])
    with supervised(lambda: Scripted(lambda channel, order: next(answers)(channel, order))) as found:
        with pytest.raises(DataError, match="NaN"):
            found.train(1, STATE)
        assert found.train(2, STATE).steps == 4


def lost(channel: Channel, _: Any) -> None:
    channel.close()


def test_a_trainer_that_is_gone_is_started_again_and_the_round_trained() -> None:
    lives: list[int] = []

    def second() -> Scripted:
        lives.append(1)
        return Scripted(honest)

    with supervised(lambda: Scripted(lost), second) as found:
        assert found.train(1, STATE).samples == 7
        assert found.evaluate(1, STATE)["round"] == 1
    assert len(lives) == 1


def test_a_trainer_that_floods_the_channel_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    def flood(channel: Channel, order: Any) -> None:
        for _ in range(2 * module.MOST_MESSAGES):
            channel.send(TrainerAlive(processor_ms=1))
        honest(channel, order)

    with supervised(lambda: Scripted(flood), lambda: Scripted(honest)) as found:
        assert found.train(1, STATE).samples == 7
    assert "the trainer sends too many messages" in caplog.text


def vectors_open() -> int:
    gc.collect()
    names = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    return sum("memfd:lazaret" in os.readlink(name) for name in names if os.path.lexists(name))  # not the listing's own


def test_answers_that_nobody_has_asked_for_do_not_use_up_descriptors(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each brings one, slowly enough to be no flood: at a thousand of them the agent would lose its connection."""
    before, done = vectors_open(), Event()

    def unasked(channel: Channel, order: Any) -> None:
        honest(channel, order)
        try:
            for _ in range(50):
                channel.send(trained(1), STATE)
        finally:
            done.set()

    with supervised(lambda: Scripted(unasked), lambda: Scripted(honest)) as found:
        found.train(1, STATE)
        assert done.wait(10)
        wait_for(lambda: "answers that nobody has asked for" in caplog.text)
        assert found.train(2, STATE).samples == 7
    wait_for(lambda: vectors_open() <= before)
    # The twin: without the limit they stay, all of them.
    monkeypatch.setattr(module, "MOST_WAITING", 10_000)
    done.clear()
    with supervised(lambda: Scripted(unasked)) as found:
        found.train(1, STATE)
        life = found._life
        assert done.wait(10) and life is not None
        wait_for(lambda: life.answers.qsize() == 50)
        assert vectors_open() >= before + 50


def test_memory_that_comes_before_the_beginning_is_closed() -> None:
    before = vectors_open()

    class Eager(Scripted):
        def _run(self) -> None:
            self._channel.send(trained(1), STATE)
            self._stopped.wait(5)

    with pytest.raises(CodecError, match="how it is isolated"), supervised(lambda: Eager(honest)):
        pass
    wait_for(lambda: vectors_open() <= before)


@pytest.mark.parametrize("what", ["another round", "two answers"])
def test_memory_of_an_answer_that_is_not_taken_is_closed(what: str) -> None:
    before = vectors_open()
    with supervised(lambda: Scripted(WRONG[what]), lambda: Scripted(honest)) as found:
        found.train(1, STATE)
        found.train(2, STATE)
    wait_for(lambda: vectors_open() <= before)


def test_a_trainer_that_never_stays_costs_the_round_and_not_the_agent() -> None:
    with supervised(lambda: Scripted(lost)) as found, pytest.raises(WorkerLost):
        found.train(1, STATE)


def test_a_trainer_that_is_told_to_end_again_and_again_has_not_failed() -> None:
    """As by signals while it starts, and while it trains. The twin: one that ends by itself has, the third time."""

    def leaving(asked: bool) -> Callable[[], Scripted]:
        return lambda: Scripted(lost, first=None, asked=asked)

    with supervised(*[leaving(True)] * 5, lambda: Scripted(honest)) as found:
        assert found.train(1, STATE).samples == 7
    with pytest.raises(WorkerLost), supervised(*[leaving(False)] * 5, lambda: Scripted(honest)):
        pass
    with supervised(*[lambda: Scripted(lost, asked=True)] * 5, lambda: Scripted(honest)) as found:
        assert found.train(1, STATE).samples == 7


def test_what_it_cannot_do_at_its_first_start_ends_the_agent_with_its_reason() -> None:
    error = ConfigError("no such folder", where="[data] source")
    started: list[int] = []

    def start() -> Scripted:
        started.append(1)
        return Scripted(honest, ready=failed(error))

    with pytest.raises(ConfigError, match="no such folder"), supervised(start):
        pass
    assert len(started) == 1, "trying again does not mend a configuration"
    with pytest.raises(WorkerLost), supervised(lambda: Scripted(honest, ready=failed(WorkerLost("x")))):
        pass


WRONG: dict[str, Script] = {
    "another round": lambda channel, order: channel.send(trained(order.round + 1), STATE),
    "another message": lambda channel, order: channel.send(EvaluatedRound(round=order.round)),
    "a longer vector": lambda channel, order: channel.send(trained(order.round), np.zeros(WORDS + 1, np.float32)),
    "a reservation": lambda channel, order: channel.send(ReserveRound(round=order.round, events=(EVENT,))),
    "two answers": lambda channel, order: [channel.send(trained(order.round), STATE) for _ in range(200)] and None,
}


@pytest.mark.parametrize("what", [*WRONG])
def test_what_was_not_asked_for_ends_the_trainer(what: str) -> None:
    """One life that does it, then an honest one: the round is trained by the second."""
    with supervised(lambda: Scripted(WRONG[what]), lambda: Scripted(honest)) as found:
        found.train(1, STATE)
        result = found.train(2, STATE)
        assert np.array_equal(result.update, STATE + 2), "an honest trainer's"


def paying(channel: Channel, order: Any) -> None:
    channel.send(ReserveRound(round=order.round, events=(EVENT,)))
    answer = channel.receive()
    assert answer is not None
    if isinstance(answer[0], RoundReserved):
        channel.send(trained(order.round), STATE)
    else:
        assert isinstance(answer[0], ReserveRefused)
        channel.send(failed(module.error_of(answer[0])))


def test_a_private_round_is_booked_before_and_committed_after() -> None:
    books = Books()
    with supervised(lambda: Scripted(paying), budget=books) as found:
        found.train(2, STATE)
    assert books.booked == [(2, (EVENT,))] and books.committed == [1]
    for error in (BudgetExhausted("spent"), PolicyViolation("not the plan")):
        refusing = Books(error)
        with supervised(lambda: Scripted(paying), budget=refusing) as found, pytest.raises(type(error)):
            found.train(2, STATE)
        assert refusing.committed == []


def test_an_update_that_was_not_paid_for_is_not_taken() -> None:
    books = Books()
    with supervised(lambda: Scripted(honest), budget=books) as found, pytest.raises(WorkerLost, match="not paid"):
        found.train(1, STATE)
    assert books.booked == books.committed == []


def test_a_round_that_was_paid_for_is_not_paid_for_again_by_itself() -> None:
    def half(channel: Channel, order: Any) -> None:
        channel.send(ReserveRound(round=order.round, events=(EVENT,)))
        channel.receive()
        channel.close()

    books = Books()
    with supervised(lambda: Scripted(half), lambda: Scripted(paying), budget=books) as found:
        with pytest.raises(WorkerLost, match="not paid for again"):
            found.train(1, STATE)
        assert len(books.booked) == 1 and books.committed == []
        found.train(2, STATE)
    assert [number for number, _ in books.booked] == [1, 2] and books.committed == [2]


@pytest.mark.parametrize(("asked", "booked"), [((1, 1), 1), ((2,), 0)], ids=["a second one", "of another round"])
def test_a_reservation_out_of_turn_ends_the_trainer(asked: tuple[int, ...], booked: int) -> None:
    def greedy(channel: Channel, order: Any) -> None:
        for number in asked:
            channel.send(ReserveRound(round=number, events=(EVENT,)))
            channel.receive()
        channel.send(trained(order.round), STATE)

    books = Books()
    with supervised(lambda: Scripted(greedy), budget=books) as found, pytest.raises(WorkerLost):
        found.train(1, STATE)
    assert len(books.booked) == booked


def test_a_silent_trainer_is_taken_to_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENCE_SECONDS", 0.2)
    with supervised(lambda: Scripted(lambda *_: None), lambda: Scripted(honest)) as found:
        assert found.train(1, STATE).samples == 7


def test_a_trainer_that_says_it_is_alive_and_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with supervised(lambda: Scripted(lambda *_: None), lambda: Scripted(honest)) as found:
        found._patience = 0.3
        with pytest.raises(WorkerLost):
            found.train(1, STATE)
        found._patience = 30
        assert found.train(2, STATE).samples == 7, "the next round has another trainer"


class Idle(Scripted):
    """Says that it is alive, again and again, and never opens its data.

    :param pace: milliseconds of processor that it claims to have used since it spoke last.
    """

    def __init__(self, pace: int) -> None:
        self._pace = pace
        super().__init__(honest, ready=None)

    def _run(self) -> None:
        self._channel.send(self._first)
        module.release(self._channel.receive()[1])
        for spoken in range(1000):
            try:
                self._channel.send(TrainerAlive(processor_ms=spoken * self._pace))
            except WorkerLost:
                return
            if self._stopped.wait(0.02):
                return


def test_a_trainer_that_does_nothing_and_opens_no_data_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    with supervised(lambda: Idle(1), lambda: Scripted(honest), idle=0.1) as found:
        assert found.train(1, STATE).samples == 7
    assert "opens no data, and did nothing" in caplog.text


def test_a_trainer_that_works_for_long_before_its_data_are_open_is_left_alone() -> None:
    lives: list[Idle] = []
    found = Supervisor(
        lambda: lives.append(Idle(module.LEAST_WORK_MS)) or lives[-1],  # type: ignore[func-returns-value]
        lambda: (TrainerSetup(site="graz", data_key="ab" * 32, best=None, terms=None), b"m"),
        words=WORDS,
        seconds=30,
        idle=0.1,
    )
    Thread(target=found.start, daemon=True).start()
    time.sleep(0.5)
    found.close()
    assert len(lives) == 1


def newer(words: int = WORDS) -> Any:
    return SimpleNamespace(
        aggregation=SimpleNamespace(layout=SimpleNamespace(state_words=words)), timing=SimpleNamespace(train=30)
    )


def test_a_newer_manifest_that_matters_to_a_trainer_replaces_it_between_orders() -> None:
    lives: list[Scripted] = []

    def life() -> Scripted:
        lives.append(Scripted(honest))
        return lives[-1]

    matters: list[bool] = []
    with supervised(life, outdates=lambda _: matters.pop()) as found:
        found.train(1, STATE)
        matters.append(False)
        found.adopted(newer())
        found.train(2, STATE)
        assert len(lives) == 1, "who takes part is nothing to a trainer"
        matters.append(True)
        found.adopted(newer())
        wait_for(lambda: len(lives) == 2)  # at once: nobody has to ask for a round first
        assert found.train(3, STATE).samples == 7
        assert len(lives) == 2


def test_a_trainer_finishes_its_order_before_a_newer_manifest_replaces_it() -> None:
    ordered, go, lives = Event(), Event(), []

    def slow(channel: Channel, order: Any) -> None:
        ordered.set()
        go.wait(10)
        honest(channel, order)

    def life() -> Scripted:
        lives.append(Scripted(slow))
        return lives[-1]

    with supervised(life) as found:
        done: list[int] = []
        training = Thread(target=lambda: done.append(found.train(1, STATE).samples))
        training.start()
        assert ordered.wait(10)
        found.adopted(newer())
        go.set()
        training.join(10)
        assert done == [7] and len(lives) == 1
        wait_for(lambda: len(lives) == 2)


def test_a_manifest_that_comes_while_a_trainer_begins_replaces_it_too() -> None:
    opened: list[DataReady] = []
    lives: list[Scripted] = []

    def life() -> Scripted:
        lives.append(Scripted(honest))
        return lives[-1]

    def told(ready: DataReady) -> None:
        opened.append(ready)
        if len(opened) == 2:  # the second one begins, as the first was lost
            found.adopted(newer())

    with supervised(life, opened=told) as found:
        found.adopted(newer())
        wait_for(lambda: len(lives) == 3)
        assert found.train(1, STATE).samples == 7
        assert len(lives) == 3


def test_closing_ends_a_trainer_that_is_still_starting_at_once() -> None:
    """As on a signal while torch is loaded; otherwise the agent would wait for it."""
    begun = Event()
    found = Supervisor(
        lambda: Scripted(honest, ready=None),
        lambda: (begun.set(), (TrainerSetup(site="graz", data_key="ab" * 32, best=None, terms=None), b"m"))[1],
        words=WORDS,
        seconds=30,
    )
    starting = Thread(target=found.start, daemon=True)
    starting.start()
    assert begun.wait(10)
    started = time.monotonic()
    found.close()
    assert time.monotonic() - started < 0.5 * module.STOP_SECONDS


def test_closing_ends_an_order_that_is_open() -> None:
    with supervised(lambda: Scripted(lambda *_: None)) as found:
        caught: list[Exception] = []

        def order() -> None:
            try:
                found.train(1, STATE)
            except WorkerLost as error:
                caught.append(error)

        thread = Thread(target=order)
        thread.start()
        found.close()
        thread.join(10)
        assert len(caught) == 1 and not thread.is_alive()
