"""What the kernel has sent and received: a ledger that our own code does not write.

Linux keeps the figures of each connection in TCP_INFO, and a process may read those of its own sockets without any
privilege. Every connection that leaves the machine counts, whoever opened it: a library that connects to another
server is visible like a second stream of our own. If the figures are not available, nothing is reported, and the log
says so.

What another process sends, or what is not TCP, is in no TCP_INFO of ours. Where the service has a network namespace
of its own (a container, or `NetworkNamespacePath=` of systemd), the interfaces of that namespace count every byte of
it, and what is beyond our own connections is reported beside them.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any, Final

# Offsets in `struct tcp_info` (linux/tcp.h): bytes_acked, bytes_received, segs_out, and from Linux 4.19 on bytes_sent
# and bytes_retrans. What was sent twice left once.
_ACKED: Final = struct.Struct("@120xQQI")
_SENT: Final = struct.Struct("@200xQQ")
_INFO_BYTES: Final = 256
_SO_COOKIE: Final = 57
_DESCRIPTORS: Final = "/proc/self/fd"

# What each segment carries besides its payload: Ethernet 14, IP 20 or 40, TCP 20 with 12 of timestamps.
_HEADERS: Final = {socket.AF_INET: 66, socket.AF_INET6: 86}
_LOOPBACK: Final = "lo"
# Settings of the whole machine: the kernel shows them in its first network namespace and in no other.
_EVERYWHERE: Final = Path("/proc/sys/net/core/somaxconn")
_FIRST_ONLY: Final = Path("/proc/sys/net/core/netdev_max_backlog")
_NET: Final = Path("/proc/self/net")
_INTERFACES: Final = _NET / "dev"
_DATAGRAMS: Final = (("Udp:", "OutDatagrams"), ("UdpLite:", "OutDatagrams"), ("Icmp:", "OutMsgs"))
_DATAGRAMS_SIX: Final = frozenset({"Udp6OutDatagrams", "UdpLite6OutDatagrams", "Icmp6OutMsgs"})

PROCESS: Final = "process"
NAMESPACE: Final = "network namespace"
SOURCES: Final = {
    PROCESS: "TCP_INFO of every connection of this process that leaves the machine or goes to the coordinator",
    NAMESPACE: "TCP_INFO of every connection of this process, and every byte that left its network namespace",
}


@dataclass(frozen=True, slots=True)
class Flow:
    """Payload bytes of TCP: TLS included, packet headers not.

    :ivar link: what of it went over an interface, repetitions included.
    :ivar segments: how many there went, acknowledgements included.
    :ivar headers: what their headers add, if each goes alone.
    """

    out: int
    into: int
    link: int = 0
    segments: int = 0
    headers: int = 0

    def __add__(self, other: Flow) -> Flow:
        return Flow(
            self.out + other.out,
            self.into + other.into,
            self.link + other.link,
            self.segments + other.segments,
            self.headers + other.headers,
        )

    def __sub__(self, other: Flow) -> Flow:
        return Flow(
            self.out - other.out,
            self.into - other.into,
            self.link - other.link,
            self.segments - other.segments,
            self.headers - other.headers,
        )


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
            # Several times a second, in every agent: no path is looked up for it.
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
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
        stays = _stays(here, there)
        if local_ports is not None and there[1] not in local_ports and stays:
            return {}
        before = borrowed.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8)
        info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        if borrowed.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8) != before:
            return {}
    finally:
        borrowed.detach()
    return {int.from_bytes(before, "little"): _read(info, 0 if stays else _headers(borrowed.family, there[0]))}


def _stays(here: tuple[Any, ...], there: tuple[Any, ...]) -> bool:
    """Whether both ends are this machine: a page of figures, worker processes, a database."""
    return here[0] == there[0] or _is_loopback(there[0])


@lru_cache(maxsize=256)  # of the peers of one process
def _is_loopback(host: str) -> bool:
    address = ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


@lru_cache(maxsize=256)
def _headers(family: int, host: str) -> int:
    mapped = family == socket.AF_INET6 and IPv6Address(host.partition("%")[0]).ipv4_mapped is not None
    return _HEADERS[socket.AF_INET if mapped else socket.AddressFamily(family)]


def _read(info: bytes, headers: int) -> Flow:
    """:param headers: of a segment; 0 of a connection that stays, which is on no interface that counts."""
    if len(info) < _ACKED.size:
        raise OSError("this kernel does not count the bytes of a connection")
    acknowledged, received, segments = _ACKED.unpack_from(info)
    sent, repeated = _SENT.unpack_from(info) if len(info) >= _SENT.size else (acknowledged, 0)
    on_link = (sent, segments, segments * headers) if headers else (0, 0, 0)
    return Flow(sent - repeated, received, *on_link)


# The whole network namespace


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """What the interfaces of a network namespace have sent, with headers.

    :ivar packets: those of TCP at most: all, but as many as UDP and ICMP have sent.
    """

    out: int
    packets: int

    def __sub__(self, other: LinkBytes) -> LinkBytes:
        return LinkBytes(self.out - other.out, self.packets - other.packets)


def is_own_namespace() -> bool:
    """Whether this service has a network namespace to itself: not the machine's, and we are its main program.

    The main program of a container has number 1, or a small init of number 1 as its parent; a unit of systemd has
    systemd as its parent. Somebody who tries things out in a container has a shell there.
    """
    return 1 in (os.getpid(), os.getppid()) and _EVERYWHERE.exists() and not _FIRST_ONLY.exists()


def namespace_link() -> LinkBytes | None:
    """What all interfaces but the loopback have sent; None if that is not known."""
    try:
        lines = _INTERFACES.read_text().splitlines()[2:]
        datagrams = _datagrams()
    except OSError:
        return None
    columns = {name.strip(): numbers.split() for name, _, numbers in (line.partition(":") for line in lines)}
    sent = [(int(numbers[8]), int(numbers[9])) for name, numbers in columns.items() if name != _LOOPBACK]
    return LinkBytes(sum(out for out, _ in sent), sum(packets for _, packets in sent) - datagrams)


def _datagrams() -> int:
    """How many packets UDP and ICMP have sent, on all interfaces."""
    tables = [line.split() for line in (_NET / "snmp").read_text().splitlines()]
    found = sum(
        int(dict(zip(names, numbers, strict=True)).get(counted, 0))
        for names, numbers in zip(tables[::2], tables[1::2], strict=True)
        for protocol, counted in _DATAGRAMS
        if names[0] == protocol
    )
    six = _NET / "snmp6"  # absent where IPv6 is off
    rows = (line.split() for line in six.read_text().splitlines()) if six.exists() else ()
    return found + sum(int(row[1]) for row in rows if row[0] in _DATAGRAMS_SIX)


@dataclass(frozen=True, slots=True)
class Reading:
    """What was counted since the last one, and how many connections were opened.

    :ivar beside: what left the network namespace beside these connections; None where only the process is counted.
    """

    flow: Flow
    opened: int
    beside: int | None


class Meter:
    """Adds up the flows of all connections, those that are closed included.

    `poll` is to be called several times a second: what a connection carries after the last look before its end is not
    in its flow.

    :param link: counts the whole network namespace, if it is this service's own.
    """

    def __init__(
        self, flows: Callable[[], Flows | None] = tcp_flows, link: Callable[[], LinkBytes | None] | None = None
    ) -> None:
        self._flows = flows
        self._open: dict[int, Flow] = {}
        self._counted = self._total = NOTHING
        self._opened = 0
        self._beside = self._reported = 0
        self._link = link
        self._began = link() if link is not None else None

    @property
    def coverage(self) -> str:
        """What is counted."""
        return PROCESS if self._began is None else NAMESPACE

    @property
    def source(self) -> str:
        """Where the figures come from, for who reads the log."""
        return SOURCES[self.coverage]

    def poll(self) -> None:
        """Look at every connection."""
        # The interfaces first: they are behind the connections, so that what is on its way is not taken for another's.
        link = self._link() if self._began is not None and self._link is not None else None
        flows = self._flows() or {}
        for cookie, flow in flows.items():
            more = flow - self._open.get(cookie, NOTHING)
            self._counted, self._total = self._counted + more, self._total + more
        self._opened += len(flows.keys() - self._open.keys())
        self._open = dict(flows)
        if link is not None and self._began is not None:
            self._compare(link - self._began)

    def _compare(self, link: LinkBytes) -> None:
        # A large packet may pass an interface whole, with one header for many segments.
        own = self._total
        headers = own.headers * max(0, min(own.segments, link.packets)) // max(1, own.segments)
        self._beside = max(self._beside, link.out - own.link - headers)

    @property
    def sent(self) -> int:
        """Bytes sent since the last `take`, as of the last look."""
        return self._counted.out + self._beside - self._reported

    def take(self) -> Reading:
        """Everything since the last time; counting starts again."""
        self.poll()
        beside = None if self._began is None else self._beside - self._reported
        taken = Reading(self._counted, self._opened, beside)
        self._counted, self._opened, self._reported = NOTHING, 0, self._beside
        return taken


def meter(flows: Callable[[], Flows | None] = tcp_flows, *, alone: bool = True) -> Meter:
    """Counts as much as can be told to be this service's: its network namespace, or else its process.

    :param alone: the service has no traffic of its own that is not in `flows`.
    """
    return Meter(flows, namespace_link if alone and is_own_namespace() else None)
