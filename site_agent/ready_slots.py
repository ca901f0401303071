"""When READY is sent: at one of a few public times after the order, so that it reveals little about the amount of data.
Under differential privacy the entries of the log about the training wait for the same time.

The end of training would reveal the number of images. By default the times double: 1, 2, 4,
... seconds, and last the end of what the manifest allows. Once a later one was needed, the earlier ones are used no
more. So the time reveals at most in which doubling a site's longest training is (docs/threat-model.md), and costs at
most as much again. A fixed slot, which a site may choose, reveals nothing as long as training fits into it.
"""

from __future__ import annotations

from typing import Final

from security.clock import Clock
from security.secagg.effects import Send
from security.secagg.messages import Ready
from security.secagg.relay import Decline
from site_agent.effects import Effect, Effects

FIRST_MS: Final = 1000
# The rest of the manifest's time is for the message to arrive before the deadline.
READY_SHARE: Final = 0.9


class ReadySlots:
    """The public times of one site.

    :param fixed_ms: multiples of this and nothing else; None for times that double.
    :param most_ms: the last of the times that double, and from there on their multiples.
    """

    def __init__(self, *, most_ms: int, fixed_ms: int | None = None) -> None:
        self._fixed = max(1, fixed_ms) if fixed_ms is not None else None
        self._most = max(1, most_ms)
        self._reached = 0

    def due(self, elapsed_ms: int) -> int:
        """How long after the order READY goes out, when the work took `elapsed_ms`."""
        step = self._fixed or self._most
        if self._fixed is None and elapsed_ms <= self._most:
            self._reached = max(self._reached, self._doubled(elapsed_ms))
            return self._reached
        return max(1, -(-elapsed_ms // step)) * step

    def _doubled(self, elapsed_ms: int) -> int:
        slot = FIRST_MS
        while slot < elapsed_ms:
            slot *= 2
        return min(slot, self._most)


class OrderAnswers:
    """What this site has to say to an order for training, and the entries about it: each waits for its public time.

    :ivar slots: the times at which an order may be answered.
    """

    def __init__(self, slots: ReadySlots, clock: Clock) -> None:
        self.slots = slots
        self._clock = clock
        self._ordered: tuple[int, int] = (0, 0)  # round, when
        self._answer: tuple[Ready | Decline, int] | None = None  # and when it is due
        self._held: list[tuple[int, Effects]] = []

    @property
    def waiting(self) -> bool:
        """Whether there is an answer that is not due yet."""
        return self._answer is not None

    def ordered(self, number: int) -> None:
        """An order has come; the time of its first arrival counts."""
        if number != self._ordered[0]:
            self._ordered = (number, self._clock.mono_ms())

    def order_time(self, number: int) -> int:
        return self._ordered[1] if self._ordered[0] == number else self._clock.mono_ms()

    def next_slot(self, number: int) -> int:
        start = self.order_time(number)
        return start + self.slots.due(self._clock.mono_ms() - start)

    def give(self, answer: Ready | Decline, due_ms: int) -> None:
        self._answer = (answer, due_ms)

    def drop(self) -> None:
        self._answer = None

    def say(self, answer: Ready | Decline) -> Send:
        """Answer an order now; what waited for a slot is of no use any more."""
        self._answer = None
        return Send(answer, round=answer.round)

    def hold(self, effects: Effects, due_ms: int) -> None:
        self._held.append((due_ms, effects))

    def due(self, *, live: bool) -> list[Effect]:
        """What has its time now, in the order in which it was given: held entries, then the answer.

        :param live: whether there is a stream on which an answer can be sent.
        """
        now = self._clock.mono_ms()
        ready = [effect for due, effects in self._held if due <= now for effect in effects]
        self._held = [(due, effects) for due, effects in self._held if due > now]
        if self._answer is not None and live and now >= self._answer[1]:
            ready.append(self.say(self._answer[0]))
        return ready


def slots_of(train_seconds: float, own_seconds: float | None) -> ReadySlots:
    """The site's own slot, or times that double up to what the manifest allows for training."""
    fixed = int(1000 * own_seconds) if own_seconds is not None else None
    return ReadySlots(most_ms=int(1000 * READY_SHARE * train_seconds), fixed_ms=fixed)
