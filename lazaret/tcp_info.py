"""What the kernel has sent and received for this process, over TCP: a ledger that our own code does not write.

Linux keeps the figures of each connection in TCP_INFO, and a process may read those of its own sockets without any
privilege. Every connection that leaves the machine counts, whoever opened it: a library that connects to another
server is visible like a second stream of our own. If the figures are not available, nothing is reported, and the log
says so.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any, Final

# Offsets in `struct tcp_info` (linux/tcp.h): bytes_acked, bytes_received, and from Linux 4.19 on bytes_sent and
# bytes_retrans. What was sent twice left once.
_ACKED: Final = struct.Struct("@120xQQ")
_SENT: Final = struct.Struct("@200xQQ")
_INFO_BYTES: Final = 256
_SO_COOKIE: Final = 57
_DESCRIPTORS: Final = Path("/proc/self/fd")

SOURCE: Final = "TCP_INFO of every connection of this process that leaves the machine or goes to the coordinator"


@dataclass(frozen=True, slots=True)
class Flow:
    """Payload bytes of TCP: TLS included, packet headers not."""

    out: int
    into: int

    def __add__(self, other: Flow) -> Flow:
        return Flow(self.out + other.out, self.into + other.into)

    def __sub__(self, other: Flow) -> Flow:
        return Flow(self.out - other.out, self.into - other.into)


NOTHING: Final = Flow(0, 0)
Flows = Mapping[int, Flow]


def tcp_flows(local_ports: Collection[int] | None = None) -> Flows | None:
    """The flow of each TCP connection of this process, by the kernel's number for the socket; None if not known.

    :param local_ports: of connections that stay on this machine, only those to these ports count; all if not given.
    """
    try:
        names = os.listdir(_DESCRIPTORS)
    except OSError:
        return None
    found: dict[int, Flow] = {}
    for name in names:
        try:
            if os.readlink(_DESCRIPTORS / name).startswith("socket:"):
                found.update(_flow_of(int(name), local_ports))
        except OSError:
            continue  # closed meanwhile, or not of TCP
    return found


def _flow_of(descriptor: int, local_ports: Collection[int] | None) -> Flows:
    # The descriptor belongs to somebody else, who may close it at any time: it is looked at and never closed here, nor
    # duplicated, which would keep a connection open that its owner assumes to be closed.
    borrowed = socket.socket(fileno=descriptor)
    try:
        if borrowed.type != socket.SOCK_STREAM or borrowed.family not in (socket.AF_INET, socket.AF_INET6):
            return {}
        here, there = borrowed.getsockname(), borrowed.getpeername()
        if local_ports is not None and there[1] not in local_ports and _stays(here, there):
            return {}
        before = borrowed.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8)
        info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        if borrowed.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8) != before:
            return {}
    finally:
        borrowed.detach()
    return {int.from_bytes(before, "little"): _read(info)}


def _stays(here: tuple[Any, ...], there: tuple[Any, ...]) -> bool:
    """Whether both ends are this machine: a page of figures, worker processes, a database."""
    address = ip_address(there[0].partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback or here[0] == there[0]


def _read(info: bytes) -> Flow:
    if len(info) < _ACKED.size:
        raise OSError("this kernel does not count the bytes of a connection")
    acknowledged, received = _ACKED.unpack_from(info)
    if len(info) < _SENT.size:
        return Flow(acknowledged, received)
    sent, repeated = _SENT.unpack_from(info)
    return Flow(sent - repeated, received)


@dataclass(frozen=True, slots=True)
class Reading:
    """What was counted since the last one, and how many connections were opened."""

    flow: Flow
    opened: int


class Meter:
    """Adds up the flows of all connections, those that are closed included.

    `poll` is to be called several times a second: what a connection carries after the last look before its end is lost.
    """

    def __init__(self, flows: Callable[[], Flows | None] = tcp_flows) -> None:
        self._flows = flows
        self._open: dict[int, Flow] = {}
        self._counted = NOTHING
        self._opened = 0

    def poll(self) -> None:
        """Look at every connection."""
        flows = self._flows() or {}
        for cookie, flow in flows.items():
            self._counted += flow - self._open.get(cookie, NOTHING)
        self._opened += len(flows.keys() - self._open.keys())
        self._open = dict(flows)

    @property
    def sent(self) -> int:
        """Bytes sent since the last `take`, as of the last look."""
        return self._counted.out

    def take(self) -> Reading:
        """Everything since the last time; counting starts again."""
        self.poll()
        taken = Reading(self._counted, self._opened)
        self._counted, self._opened = NOTHING, 0
        return taken
