"""The trainer's loop: orders of the agent in, updates and figures out.

The main thread works; another one reads the channel, so that its end is seen while a round is trained. The process ends
by itself, with exit code 0, when the agent is gone or says so; `stopping` has the signals.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Final, get_args, get_type_hints

from lazaret import process
from lazaret.errors import LocalProtocolError, PolicyViolation, ToolkitError
from lazaret.process import end
from security.crypto import encoding
from security.dp.accountant import MechanismEvent
from security.dp.ledger import LedgerState, Reservation, Terms
from security.dp.noise import NoiseSource
from security.identity.manifest import Manifest
from security.identity.pinned_files import pinned_model
from security.secagg.layout import Vector
from site_agent.config import SiteConfig
from site_agent.contribution import LocalResult
from site_agent.trainer.channel import (
    SHOWN_CLASSES,
    Artefact,
    Channel,
    EvaluatedRound,
    EvaluateRound,
    Message,
    OutwardAttempt,
    Received,
    ReserveRefused,
    ReserveRound,
    RoundReserved,
    SideScores,
    TrainedRound,
    TrainerSetup,
    TrainerStop,
    TrainRound,
    error_of,
    failed,
)
from site_agent.trainer.personal_state import PersonalState
from site_agent.trainer.shared_memory import shared_document, shared_vector
from site_agent.trainer.training import Trainer, make_trainer

log = logging.getLogger("site-agent")
REST_SECONDS: Final = 10.0


class OrderLoop:
    """One agent's orders, one after the other."""

    def __init__(self, config: SiteConfig, channel: Channel) -> None:
        self._config, self._channel = config, channel
        self._received: SimpleQueue[Received] = SimpleQueue()
        self._words = 0

    def run(self) -> None:
        """For ever: the process ends from another thread."""
        Thread(target=self._read, name="channel", daemon=True).start()
        trainer: Trainer | None = None
        while True:
            order = self._next()
            try:
                if trainer is None:
                    trainer = self._begin(*order)
                else:
                    self._obey(trainer, *order)
            except ToolkitError as error:
                self._channel.send(failed(error))

    def _next(self) -> Received:
        """The next order. Between rounds it may wait for long, and gives back what the last one needed; though not at
        once, because training follows evaluation."""
        try:
            return self._received.get(timeout=REST_SECONDS)
        except Empty:
            process.trim_heap()
            return self._received.get()

    def report_attempts(self) -> None:
        """Tell the agent once of each way in which code here asks for a network. Native code can do so unseen: what
        stops an attempt is the kernel, this only makes it known.
        """
        left = set(get_args(get_type_hints(OutwardAttempt)["what"]))

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            del arguments
            if event in left:
                left.discard(event)
                with contextlib.suppress(ToolkitError):
                    self._channel.send(OutwardAttempt(what=event))  # type: ignore[arg-type]

        sys.addaudithook(hook)

    def _read(self) -> None:
        """The end of the channel is the end of the process, whatever it is doing."""
        while True:
            try:
                received = self._channel.receive()
            except ToolkitError as error:
                log.error("trainer: %s", error)
                end(1)
                return
            if received is None or isinstance(received[0], TrainerStop):
                end(0)
                return
            self._received.put(received)

    def ask(self, question: Message) -> Message:
        """A question in the middle of an order: the next message is its answer."""
        self._channel.send(question)
        answer: Message = self._received.get()[0]
        return answer

    # Orders.

    def _begin(self, setup: Message, document: int | None) -> Trainer:
        if not isinstance(setup, TrainerSetup) or document is None:
            raise LocalProtocolError("the first order says how to begin", where="trainer")
        config = self._config
        manifest = Manifest.from_dict(encoding.loads(shared_document(document)), "manifest")
        config.policy.check_federation(manifest)
        state = PersonalState(config.state)
        state.hold()
        state.tidy()
        trainer, ready = make_trainer(
            config,
            manifest,
            pinned_model(config.model_file(manifest.model.initial_file), manifest)[0],
            state,
            site=setup.site,
            data_key=bytes.fromhex(setup.data_key),
            best=setup.best,
            books=None if setup.terms is None else ChannelBooks(self, setup.terms),
        )
        self._words = manifest.aggregation.layout.state_words
        self._channel.send(ready)
        return trainer

    def _obey(self, trainer: Trainer, order: Message, vector: int | None) -> None:
        if not isinstance(order, TrainRound | EvaluateRound) or vector is None:
            raise LocalProtocolError(f"{type(order).__name__} is no order", where="trainer")
        state = shared_vector(vector, self._words)
        if isinstance(order, TrainRound):
            self._channel.send(*_trained(order.round, trainer.train(order.round, state)))
        else:
            self._channel.send(_evaluated(order.round, trainer.evaluate(order.round, state)))


class ChannelBooks:
    """The agent's ledger, seen from here. It is booked there, before data are read here; noise is drawn here.

    A reservation is in this process's memory alone. After a restart of either process the charge stays in the ledger
    and the permission is gone, so that no booking is skipped. The key of a reservation's noise was never written down,
    so that none is repeated (docs/spec/differential-privacy.md, section 5).
    """

    def __init__(self, orders: OrderLoop, terms: Terms) -> None:
        self._orders = orders
        self._state = LedgerState(terms=terms, version="the agent's")

    @property
    def state(self) -> LedgerState:
        return self._state

    def reserve(
        self, *, run: str, round_number: int, events: Sequence[MechanismEvent], noise: NoiseSource
    ) -> Reservation:
        """Ask the agent to book, and wait until it is on disk.

        :raises BudgetExhausted: as the agent's ledger does.
        """
        del run  # the agent knows which it is
        if not noise.secret:
            raise PolicyViolation("noise from a seed cannot be booked", where="privacy ledger")
        answer = self._orders.ask(ReserveRound(round=round_number, events=tuple(events)))
        if isinstance(answer, ReserveRefused):
            raise error_of(answer)
        if not isinstance(answer, RoundReserved):
            raise LocalProtocolError("a reservation has no answer", where="trainer")
        return Reservation(seq=answer.seq, events=events, noise=noise)

    def commit(self, reservation: Reservation) -> None:
        """The agent does, when it has the update: no vector leaves without it."""


def _trained(round_number: int, result: LocalResult) -> tuple[TrainedRound, Vector]:
    kept = tuple(Artefact(kind=kind, elements=count, hmac=keyed.hex()) for kind, count, keyed in result.artefacts)
    message = TrainedRound(
        round=round_number,
        samples=result.samples,
        loss_sum=result.loss_sum,
        hits=result.hits,
        steps=result.steps,
        wall_ms=result.wall_ms,
        artefacts=kept,
    )
    return message, result.update


def _evaluated(round_number: int, figures: dict[str, Any]) -> EvaluatedRound:
    sides: dict[str, Any] = {}
    for side in ("validation", "test"):
        if side in figures:
            found = dict(figures[side])
            rows = found.pop("confusion", None)
            shown = tuple(map(tuple, rows)) if rows is not None and len(rows) <= SHOWN_CLASSES else None
            sides[side] = SideScores(**found, confusion=shown)
    return EvaluatedRound(
        round=round_number,
        predictor=figures.get("kind"),
        private=bool(figures.get("private")),
        best=bool(figures.get("best")),
        **sides,
    )
