"""The network of a federation in one process. It moves every byte, and counts them for each party as a kernel does.

So logs have readings without sockets: of connections that this network has carried, under a source that says so. What a
kernel counts besides messages is not there: no TLS, no frames of HTTP/2, no pings.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import count

from lazaret.kernel_bytes import NOTHING, Flow, LinkBytes, Meter


class MemoryMeter(Meter):
    """Reads the counters of this network, and does not claim to have asked a kernel."""

    @property
    def source(self) -> str:
        return "every byte that the network in memory has carried for this party"


class MemoryNetwork:
    """Connections between two parties by name, and what each party has sent in all."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._lines: dict[frozenset[str], int] = {}
        self._flows: defaultdict[str, dict[int, Flow]] = defaultdict(dict)
        self._sent: Counter[str] = Counter()

    def meter(self, party: str) -> Meter:
        """For a process that starts: connections of the one before it are not its own, its interface is the same."""
        self._flows[party].clear()
        return MemoryMeter(lambda: self._shown(party), lambda: LinkBytes(self._sent[party], 0))

    def open(self, caller: str, called: str) -> None:
        self._lines[frozenset((caller, called))] = next(self._numbers)
        for party in (caller, called):
            self._flows[party][self._number(caller, called)] = NOTHING

    def close(self, one: str, other: str) -> None:
        self._lines.pop(frozenset((one, other)), None)

    def carry(self, sender: str, receiver: str, size: int) -> None:
        """One message, all of it."""
        number = self._number(sender, receiver)
        self._flows[sender][number] = self._flows[sender].get(number, NOTHING) + Flow(size, 0, link=size)
        self._flows[receiver][number] = self._flows[receiver].get(number, NOTHING) + Flow(0, size)
        self._sent[sender] += size

    def _number(self, one: str, other: str) -> int:
        return self._lines[frozenset((one, other))]

    def _shown(self, party: str) -> dict[int, Flow]:
        """All open connections, and once more those that were closed since the last look."""
        shown, still = self._flows[party], set(self._lines.values())
        self._flows[party] = {number: flow for number, flow in shown.items() if number in still}
        return shown
