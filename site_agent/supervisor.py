"""The agent's side of the trainer: starts its process, watches it, starts it again, and believes nothing it says.

The trainer sees images and has no network; the agent has the network and sees no image. What crosses is in
`site_agent.trainer.channel`. A thread of its own starts the process, reads what it says and waits for its end; the
training thread gives orders and waits for answers. A trainer that was killed, hangs or sends what it may not is ended
and started again after a pause that grows. The order it had is given again, unless its round was paid for already under
differential privacy: then training again would cost the patients a second time, and the site declines.

Checked of an answer: that an order is open and this is its answer; the length and seal of the vector (`channel`); that
every number is finite and within its bounds; under differential privacy, that exactly what the plan says was booked,
before and once. Clips are checked by `contribution`, as ever.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Condition, Event, Thread
from typing import Any, Final, TypeVar

from lazaret.errors import CodecError, ToolkitError, WorkerLost
from security.dp.ledger import Reservation
from security.identity.manifest import Manifest
from security.secagg.layout import Vector
from site_agent.budget import Budget
from site_agent.contribution import LocalResult
from site_agent.trainer.channel import (
    RECEIVED_BY_AGENT,
    Channel,
    DataReady,
    EvaluatedRound,
    EvaluateRound,
    IsolationReport,
    Message,
    OrderFailed,
    OutwardAttempt,
    Received,
    ReserveRound,
    RoundReserved,
    SideScores,
    TrainedRound,
    TrainerAlive,
    TrainerSetup,
    TrainerStop,
    TrainRound,
    error_of,
    refused,
)
from site_agent.trainer.shared_memory import shared_vector
from site_agent.trainer_process import SILENCE_SECONDS, STOP_SECONDS, Launched

log = logging.getLogger("site-agent")
LEAST_PAUSE: Final = 0.5
MOST_PAUSE: Final = 60.0
# A trainer that lived this long was well: the next pause is short again.
WELL_SECONDS: Final = 120.0
TRIES: Final = 3
# Beside training itself: loading, starting again.
SLACK_SECONDS: Final = 120.0
# Before its data are open: one that uses less processor than this in so long hangs. Slow reading uses more.
IDLE_SECONDS: Final = 600.0
LEAST_WORK_MS: Final = 1000
# A trainer that floods the channel is at fault; an honest one says that it is alive every five seconds.
MOST_MESSAGES: Final = 100
# Each may hold a descriptor open here. An order has one answer at a time.
MOST_WAITING: Final = 4
Answer = TypeVar("Answer")


@dataclass(eq=False, kw_only=True)
class Life:
    """One trainer from its start to its end.

    :ivar outdated: it began under another manifest than the one in force; it finishes its order, and gets no other.
    """

    launched: Launched
    channel: Channel
    asked: bool = False
    outdated: bool = False
    answers: SimpleQueue[Received | WorkerLost] = field(default_factory=SimpleQueue)

    def __del__(self) -> None:
        """An answer may be taken after the end of its trainer; what nobody can take any more is closed."""
        while not self.answers.empty():
            left = self.answers.get()
            if not isinstance(left, WorkerLost):
                release(left[1])


def release(descriptor: int | None) -> None:
    """Memory that came with a message which is not taken."""
    if descriptor is not None:
        os.close(descriptor)


class TrainerGone(Exception):
    """This trainer cannot finish the order; another one may."""

    def __init__(self, error: WorkerLost) -> None:
        super().__init__(str(error))
        self.error = error


class Supervisor:
    """What trains, as the agent sees it.

    :param launch: starts a trainer.
    :param setup: how it begins, and the manifest that goes with it.
    :param words: how many values a vector has.
    :param seconds: how long the manifest lets a round train.
    :param idle: how long a trainer may do nothing before it has opened its data.
    :param outdates: told of a newer manifest; whether a trainer that began before has to begin anew.
    :param isolated: told what holds in a trainer that has started, before it sees an image.
    :param opened: told what data it has opened.
    """

    def __init__(
        self,
        launch: Callable[[], Launched],
        setup: Callable[[], tuple[TrainerSetup, bytes]],
        *,
        words: int,
        seconds: float,
        budget: Budget | None = None,
        idle: float = IDLE_SECONDS,
        outdates: Callable[[Manifest], bool] = lambda _: True,
        isolated: Callable[[IsolationReport], None] = lambda _: None,
        opened: Callable[[DataReady], None] = lambda _: None,
    ) -> None:
        self._launch, self._setup, self._words, self._budget = launch, setup, words, budget
        self._patience = 2 * seconds + SLACK_SECONDS
        self._idle, self._outdates, self._isolated, self._opened = idle, outdates, isolated, opened
        self._changed = Condition()
        self._begun: Life | None = None
        self._life: Life | None = None
        self._first: ToolkitError | None = None
        self._never_ready, self._working = True, False
        self._closing = Event()
        self._thread = Thread(target=self._watch, name="trainer", daemon=True)

    # The life of a trainer.

    def start(self) -> None:
        """Start it, and wait until it has opened its data.

        :raises ToolkitError: if it says that it cannot, or ends several times in a row.
        """
        self._thread.start()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._life is not None or self._first is not None)
            if self._first is not None:
                raise self._first
        except BaseException:  # also a signal
            self.close()
            raise

    def close(self) -> None:
        """End it for good, also while it is starting: it does not read orders yet."""
        self._closing.set()
        with self._changed:
            life, ready, self._life = self._begun, self._life is not None, None
            self._changed.notify_all()
        if life is None:
            return  # nobody to wait for: one that is being launched is ended there
        if ready:
            with contextlib.suppress(ToolkitError):
                life.channel.send(TrainerStop())
        life.channel.close()
        life.launched.stop()
        if self._thread.is_alive():
            self._thread.join(2 * STOP_SECONDS)

    def adopted(self, manifest: Manifest) -> None:
        """A newer manifest is in force. If it matters to a trainer, the next order goes to one that began under it."""
        if not self._outdates(manifest):
            return
        self._words = manifest.aggregation.layout.state_words
        self._patience = 2 * manifest.timing.train + SLACK_SECONDS
        with self._changed:
            if self._begun is not None:
                self._begun.outdated = True
            self._retire()

    def _retire(self) -> None:
        """End a trainer that is outdated and has no order; by who holds `_changed`."""
        if self._life is not None and self._life.outdated and not self._working:
            self._life.channel.close()
            self._life = None

    def _watch(self) -> None:
        pause, failures = LEAST_PAUSE, 0
        while not self._closing.is_set():
            begun = time.monotonic()
            problem, asked = self._one_life()
            if self._closing.is_set():
                return
            if not asked:
                failures = failures + 1 if time.monotonic() - begun < WELL_SECONDS else 1
            pause = LEAST_PAUSE if failures <= 1 else min(2 * pause, MOST_PAUSE)
            if self._never_ready and (failures >= TRIES or not isinstance(problem, WorkerLost)):
                with self._changed:
                    self._first = problem
                    self._changed.notify_all()
                return
            log.warning("%s; it is started again in %.1f s", problem, pause)
            self._closing.wait(pause)

    def _one_life(self) -> tuple[ToolkitError, bool]:
        """From start to end; returns why it ended, and whether it was told to."""
        try:
            launched = self._launch()
        except OSError as error:
            reason = "none has connected" if isinstance(error, TimeoutError) else error.strerror
            return WorkerLost(f"there is no trainer: {reason}", where="trainer"), False
        launched.connection.settimeout(SILENCE_SECONDS)
        life = Life(launched=launched, channel=Channel(launched.connection, RECEIVED_BY_AGENT))
        problem: ToolkitError | None = None
        with self._changed:
            self._begun = life
        if self._closing.is_set():
            launched.stop()
            life.channel.close()
        try:
            self._begin(life)
            self._listen(life)
        except TimeoutError:
            problem = WorkerLost(f"the trainer has said nothing for {SILENCE_SECONDS:.0f} s", where="trainer")
        except ToolkitError as error:
            problem = error
        with self._changed:
            self._life = None
        life.channel.close()
        how = launched.end()
        with self._changed:
            self._begun = None
        problem = problem or WorkerLost(f"the trainer is gone: {how}", where="trainer")
        if life.outdated:
            problem = WorkerLost("the trainer began under an older manifest", where="trainer")
        life.asked = life.outdated or (launched.asked and isinstance(problem, WorkerLost))
        life.answers.put(problem if isinstance(problem, WorkerLost) else WorkerLost(str(problem), where="trainer"))
        return problem.with_traceback(None), life.asked  # its frames would keep this life, and what it holds open

    def _begin(self, life: Life) -> None:
        """Isolation, then data, and nothing else before them."""
        report = self._next(life)
        if not isinstance(report, IsolationReport):
            raise CodecError("the trainer has not said how it is isolated", where="trainer")
        self._isolated(report)
        life.channel.send(*self._setup())
        ready = self._next(life)
        if not isinstance(ready, DataReady):
            raise CodecError("the trainer has not said what data it has", where="trainer")
        self._opened(ready)
        with self._changed:
            self._life, self._never_ready = (None if self._closing.is_set() else life), False
            self._retire()
            self._changed.notify_all()

    def _next(self, life: Life) -> Message:
        since, worked = time.monotonic(), 0
        while True:
            received = life.channel.receive()
            if received is None:
                raise WorkerLost(f"the trainer is gone: {life.launched.end()}", where="trainer")
            message: Message = received[0]
            release(received[1])  # no message that begins a life brings memory
            if isinstance(message, OrderFailed):
                raise error_of(message)
            if isinstance(message, TrainerAlive) and message.processor_ms >= worked + LEAST_WORK_MS:
                since, worked = time.monotonic(), message.processor_ms
            if time.monotonic() - since > self._idle:
                raise WorkerLost(f"the trainer opens no data, and did nothing for {self._idle:.0f} s", where="trainer")
            if not isinstance(message, TrainerAlive | OutwardAttempt):
                return message

    def _listen(self, life: Life) -> None:
        """Until its end. An answer waits for whoever has asked."""
        window, counted = time.monotonic(), 0
        while (received := life.channel.receive()) is not None:
            if time.monotonic() - window > 1:
                window, counted = time.monotonic(), 0
            counted += 1
            if counted > MOST_MESSAGES:
                raise CodecError("the trainer sends too many messages", where="trainer")
            match received[0]:
                case TrainerAlive():
                    continue
                case OutwardAttempt(what=what):
                    log.error("the trainer tried to reach a network (%s): do not trust the code it runs", what)
                case _ if life.answers.qsize() >= MOST_WAITING:
                    release(received[1])
                    raise CodecError("the trainer sends answers that nobody has asked for", where="trainer")
                case _:
                    life.answers.put(received)

    # Orders.

    def train(self, round_number: int, state: Vector) -> LocalResult:
        """One local round, by whatever trainer there is.

        :raises ToolkitError: what the trainer says, or that there is none that can finish.
        """
        return self._order(round_number, lambda order: order.train(state))

    def evaluate(self, round_number: int, state: Vector) -> dict[str, Any]:
        """This hospital's own figures of the model after a round."""
        return self._order(round_number, lambda order: order.evaluate(state))

    def _order(self, round_number: int, carry_out: Callable[[Order], Answer]) -> Answer:
        try:
            return self._carried_out(round_number, carry_out)
        finally:
            with self._changed:
                self._working = False
                self._retire()

    def _carried_out(self, round_number: int, carry_out: Callable[[Order], Answer]) -> Answer:
        end = time.monotonic() + self._patience
        attempt = 1
        while True:
            order = Order(self._current(end), round_number, end, words=self._words, budget=self._budget)
            try:
                return carry_out(order)
            except TrainerGone as gone:
                self._drop(order.life)
                if order.reservation is not None:
                    reason = f"{gone.error.message}; the round was paid for, and is not paid for again"
                    raise WorkerLost(reason, where="trainer") from gone
                if attempt == TRIES or self._closing.is_set():
                    raise gone.error from gone
                log.warning("round %d: %s; it is given to the next one", round_number, gone.error)
                attempt += not order.life.asked  # a trainer that was told to end has not failed

    def _drop(self, life: Life) -> None:
        """No more orders for this one; the thread that watches it starts the next."""
        with self._changed:
            self._working = False
            if self._life is life:
                self._life = None

    def _current(self, end: float) -> Life:
        with self._changed:
            self._changed.wait_for(
                lambda: self._life is not None or self._closing.is_set(), max(0.0, end - time.monotonic())
            )
            if self._life is None:
                raise WorkerLost("there is no trainer", where="trainer", hint="its own messages say why")
            self._working = True
            return self._life


class Order:
    """One order to one trainer, and the conversation about it."""

    def __init__(self, life: Life, round_number: int, end: float, *, words: int, budget: Budget | None) -> None:
        self.life, self._round, self._end = life, round_number, end
        self._words, self._budget = words, budget
        self.reservation: Reservation | None = None

    def train(self, state: Vector) -> LocalResult:
        message, descriptor = self._ask(TrainRound(round=self._round), state, TrainedRound)
        try:
            whole = self._budget is not None and self._budget.shares_noise
            update = shared_vector(descriptor, self._words, whole=whole)
        except CodecError as error:
            raise self._fault(error.message) from error
        if self._budget is not None:
            if self.reservation is None:
                raise self._fault("an update that was not paid for")
            self._budget.commit(self.reservation)
        return LocalResult(
            update=update,
            samples=message.samples,
            loss_sum=message.loss_sum,
            hits=message.hits,
            steps=message.steps,
            wall_ms=message.wall_ms,
            artefacts=tuple((kept.kind, kept.elements, bytes.fromhex(kept.hmac)) for kept in message.artefacts),
        )

    def evaluate(self, state: Vector) -> dict[str, Any]:
        message, _ = self._ask(EvaluateRound(round=self._round), state, EvaluatedRound)
        figures: dict[str, Any] = {"round": message.round}
        figures |= {"kind": message.predictor} if message.predictor else {}
        figures |= {name: True for name in ("private", "best") if getattr(message, name)}
        sides = {"validation": message.validation, "test": message.test}
        figures |= {name: _scores(side) for name, side in sides.items() if side is not None}
        return figures if len(figures) > 1 else {}

    def _ask(self, order: Message, state: Vector, answer: type[Any]) -> Any:
        """Give the order and wait for its answer, paying for what it asks meanwhile."""
        if not self.life.answers.empty():
            # Either its end, or something that nobody has asked for.
            left = self.life.answers.get()
            if isinstance(left, WorkerLost):
                raise TrainerGone(left)
            release(left[1])
            raise self._fault("an answer without an order")
        self._send(order, state)
        while True:
            try:
                received = self.life.answers.get(timeout=max(0.0, self._end - time.monotonic()))
            except Empty:
                raise self._fault("nothing for too long: it is taken to hang") from None
            if isinstance(received, WorkerLost):
                raise TrainerGone(received)
            message = received[0]
            match message:
                case OrderFailed():
                    raise error_of(message)
                case ReserveRound() if isinstance(order, TrainRound):
                    self._send(self._reserve(message))
                case _ if isinstance(message, answer) and message.round == self._round:
                    return received
                case _:
                    release(received[1])
                    raise self._fault(f"{type(message).__name__} to {type(order).__name__}")

    def _reserve(self, asked: ReserveRound) -> Message:
        if self._budget is None or self.reservation is not None or asked.round != self._round:
            raise self._fault("a reservation out of turn")
        try:
            self.reservation = self._budget.reserve_planned(self._round, asked.events)
        except ToolkitError as error:
            return refused(error)
        return RoundReserved(seq=self.reservation.seq)

    def _send(self, message: Message, state: Vector | None = None) -> None:
        try:
            self.life.channel.send(message, state)
        except WorkerLost as error:
            raise TrainerGone(error) from error

    def _fault(self, what: str) -> TrainerGone:
        """Whatever the trainer is doing, it is not what was agreed: this one is ended."""
        self.life.channel.close()
        return TrainerGone(WorkerLost(f"the trainer has answered with {what}", where="trainer"))


def _scores(side: SideScores) -> dict[str, Any]:
    scores: dict[str, Any] = {"bacc": side.bacc, "bauc": side.bauc, "images": side.images}
    scores |= {} if side.loss is None else {"loss": side.loss}
    return scores if side.confusion is None else scores | {"confusion": [list(row) for row in side.confusion]}
