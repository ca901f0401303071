"""Bytes that left, by data class, and whether the kernel's own count agrees.

A reading covers one run of the agent since its start. It may be behind the log, since an entry is written before its
bytes leave, but not behind what the coordinator has acknowledged; and it is above the log by what TLS and HTTP/2
add, which is known well enough to leave no room for anything worth hiding.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from lazaret.kernel_bytes import NAMESPACE, PROCESS
from security.audit.facts import LogHistory
from security.audit.findings import Findings

# What the transport adds to the messages, about half as much again as measured with gRPC over TLS 1.3: a share of what
# is sent (records and frames of 16 kB) and of what is received (windows are opened anew), headers and prefix of each
# message, the handshake of each connection with both certificates, and pings.
FRAMING_OUT: Final = 0.003
FRAMING_IN: Final = 0.0003
PER_MESSAGE: Final = 100
PER_CONNECTION: Final = 4096
PER_SECOND: Final = 4
# At a coordinator: probes of its health, and whoever else connects to its port without a certificate.
PROBES_PER_SECOND: Final = 64
# Attempts to connect that failed leave no entry. An agent waits longer after each, up to a minute.
FEW_ATTEMPTS: Final = 8
ATTEMPT_SECONDS: Final = 15
# What a connection carries between the meter's last look and its sudden end is not counted.
UNSEEN_PER_CONNECTION: Final = 256 * 1024
# In a network namespace of its own, beside its connections: names are resolved, neighbours found (ARP, NDP, and the
# first packets of IPv6), and the last packets of a connection follow the last look at it.
BESIDE_AT_START: Final = 2048
BESIDE_PER_CONNECTION: Final = 1024
BESIDE_PER_SECOND: Final = 4


class EgressLedger:
    """Totals of what was logged as sent, and the comparison with what was counted."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.messages: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.counted = 0
        self.readings = 0
        self.covered: Counter[str] = Counter()  # bytes that left with a reading after them, by what it covers
        self.bounded = True  # not so at a coordinator: it logs what arrives, and anybody can connect to its port
        self._waiting: dict[str, int] = {}  # messages of this connection without a receipt
        self.started(0)

    def started(self, mono: int) -> None:
        """The agent has started: the kernel counts from zero, and what was under way before is nobody's business."""
        self._since = mono
        self._out = self._in = self._opened = self._connections = self._beside = self._lost = 0
        self._logged = self._sent = self._acknowledged = self._read = 0
        self._coverage = ""
        self._waiting.clear()

    def reconnected(self) -> None:
        """A new connection; nothing of the one before will be acknowledged any more."""
        self._connections += 1
        self._lost += self._unsettled
        self._waiting.clear()

    @property
    def _unsettled(self) -> int:
        """What a connection that broke may have carried after the last look at it: it is logged, without a receipt."""
        return min(sum(self._waiting.values()), UNSEEN_PER_CONNECTION)

    def add(self, data_class: str, size: int, msg_id: str) -> None:
        """One message."""
        self.messages[data_class] += 1
        self.bytes[data_class] += size
        self._logged += size
        self._sent += 1
        self._waiting[msg_id] = size

    def receipt(self, match: re.Match[str], seq: int) -> str:
        """The coordinator has a message; returns its id."""
        size = self._waiting.pop(match["body_msg_id"], None)
        if size is None:
            self.findings.add("ReceiptInvalid", f"entry {seq}: for a message that did not leave just before", seq)
        else:
            self._acknowledged += size
        return match["body_msg_id"]

    def counter(self, match: re.Match[str], seq: int) -> None:
        """Compare the totals since the start at one reading of the network's counter."""
        out, into, opened, mono = match.group("body_bytes_out", "body_bytes_in", "body_connections", "mono_ms")
        coverage, beside = match.group("body_coverage", "body_beside_out")
        self.counted += int(out)
        self.readings += 1
        self._cover(PROCESS if beside == "null" else coverage[1:-1], seq)
        self._out, self._in, self._opened = self._out + int(out), self._in + int(into), self._opened + int(opened)
        # Section 8, Kernel byte counters: what the coordinator has acknowledged has left; what is logged may still
        # wait.
        least = self._acknowledged - self._connections * UNSEEN_PER_CONNECTION
        most = self._logged + self._overhead(int(mono) - self._since)
        if beside != "null":
            self._beside += int(beside)
            self._check_beside(int(mono) - self._since, seq)
        if self.bounded and not least <= self._out <= most:
            self.findings.add(
                "UnloggedTraffic",
                f"at entry {seq} the network counted {self._out} bytes out since the start; the log explains "
                f"{self._logged}, which with TLS and HTTP/2 is at most {most}",
                seq,
            )

    def _cover(self, coverage: str, seq: int) -> None:
        self.covered[coverage] += self._logged - self._read
        self._read = self._logged
        # What is counted follows from where the agent runs, which does not change while it runs.
        if self.bounded and self._coverage not in ("", coverage):
            self.findings.add("CounterCoverage", f"entry {seq} covers the {coverage}, others the {self._coverage}", seq)
        self._coverage = coverage

    def _check_beside(self, mono: int, seq: int) -> None:
        """What left the network namespace, and is in no connection of the process."""
        room = BESIDE_AT_START + BESIDE_PER_CONNECTION * self._attempts(mono) + BESIDE_PER_SECOND * mono / 1000
        room += self._lost + self._unsettled
        if self.bounded and self._beside > room:
            self.findings.add(
                "UnloggedTraffic",
                f"at entry {seq} {self._beside} bytes had left the network namespace beside the agent's connections; "
                f"names, neighbours and ends of connections explain at most {int(room)}",
                seq,
            )

    def _attempts(self, mono: int) -> float:
        # A connection begins with a logged Open, or it failed before that; attempts are at least so far apart.
        return self._connections + FEW_ATTEMPTS + mono / 1000 / ATTEMPT_SECONDS

    def _overhead(self, mono: int) -> int:
        shares = FRAMING_OUT * self._logged + FRAMING_IN * self._in
        opened = min(self._opened, self._attempts(mono))
        return int(shares + PER_MESSAGE * self._sent + PER_CONNECTION * opened + PER_SECOND * mono / 1000)

    @property
    def coverage(self) -> str:
        """The widest that a reading of this log has."""
        return NAMESPACE if NAMESPACE in self.covered else PROCESS

    @property
    def share(self) -> float:
        """Of the bytes that left, the share with a reading of that coverage after them."""
        return self.covered[self.coverage] / self.total if self.total else 1.0

    @property
    def total(self) -> int:
        """All bytes logged as sent."""
        return self.bytes.total()

    @property
    def count(self) -> int:
        """All messages logged as sent."""
        return self.messages.total()


def join_counts(hub: LogHistory, sites: int, joint: Findings) -> None:
    """What the coordinator's kernel counted as received, against what its log explains.

    Less means that entries name bytes that never came; more, beyond what TLS, probes and failed handshakes add, that
    bytes came for which there is no entry. Anybody may connect to its port, so it cannot be decided whose they are. A
    process that was killed takes its count since the last reading with it: what was logged after that is compared with
    nothing.
    """
    readings = list(hub.of("net.counter"))
    if not readings:
        return
    read_up_to = {record.boot: record.seq for record in readings}
    arrived = list(hub.of("ingress", "ingress.partial"))
    everything = sum(record.body["bytes"] for record in arrived)
    logged = sum(record.body["bytes"] for record in arrived if record.seq < read_up_to.get(record.boot, 0))
    counted = sum(record.body["bytes_in"] for record in readings)
    sent = sum(record.body["bytes_out"] for record in readings)
    opened = sum(record.body["connections"] for record in readings)
    if counted + (opened + len(hub.boots)) * UNSEEN_PER_CONNECTION < logged:
        joint.add("UnloggedTraffic", f"{hub.name} logged {logged} bytes in, and its kernel counted {counted}")
    seconds = sum(last - first for first, last in hub.boots.values()) / 1000
    most = everything * (1 + FRAMING_OUT) + FRAMING_IN * sent + PER_MESSAGE * len(arrived) + PER_CONNECTION * opened
    most += (PROBES_PER_SECOND + PER_SECOND * sites) * seconds
    if counted > most:
        detail = f"its kernel counted {counted} bytes in, its log explains {everything}, with TLS at most {int(most)}"
        joint.add("IngressSurplus", f"{hub.name}: {detail}")


# Which numbers a message may state. Its length follows from them, so that large ones would make room for anything.

MOST_HEAD_SIGNATURES: Final = 2  # two at the change of an epoch


def possible(message: str, numbers: Mapping[str, Any], sites: int, epoch: int) -> bool:
    """Whether a message can have these numbers.

    :param sites: how many the largest manifest lists.
    :param epoch: that of the entry. Of its own log a site shows no more keys than it has.
    """
    of_a_log = message in ("Head", "Cosignature", "Held")
    return (
        numbers["cohort"] <= sites
        and (of_a_log or numbers["path"] < sites)
        and numbers["head_signatures"] <= MOST_HEAD_SIGNATURES
        and (message != "Head" or numbers["epochs"] <= epoch + 2)
    )
