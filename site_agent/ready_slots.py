"""When READY is sent: at one of a few public times after the order, so that it reveals little about the amount of data.
Under differential privacy the entries of the log about the training wait for the same time.

The end of training would reveal the number of images. By default the times double: 1, 2, 4,
... seconds, and last the end of what the manifest allows. Once a later one was needed, the earlier ones are used no
more. So the time reveals at most in which doubling a site's longest training is (docs/threat-model.md), and costs at
most as much again. A fixed slot, which a site may choose, reveals nothing as long as training fits into it.
"""

from __future__ import annotations

from typing import Final

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


class HeldEffects:
    """Effects that wait for their public time."""

    def __init__(self) -> None:
        self._held: list[tuple[int, Effects]] = []

    def hold(self, effects: Effects, due_ms: int) -> None:
        self._held.append((due_ms, effects))

    def due(self, now_ms: int) -> list[Effect]:
        """Those whose time has come, in the order in which they were given; they are held no longer."""
        ready = [effect for due, effects in self._held if due <= now_ms for effect in effects]
        self._held = [(due, effects) for due, effects in self._held if due > now_ms]
        return ready


def slots_of(train_seconds: float, own_seconds: float | None) -> ReadySlots:
    """The site's own slot, or times that double up to what the manifest allows for training."""
    fixed = int(1000 * own_seconds) if own_seconds is not None else None
    return ReadySlots(most_ms=int(1000 * READY_SHARE * train_seconds), fixed_ms=fixed)
