"""The server over a real socket: bounds, keep-alive, and nobody else's thread."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import ssl
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from pathlib import Path
from threading import current_thread
from threading import enumerate as enumerate_threads

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from lazaret.errors import ConfigError, DataError
from lazaret.web.access import Address, Guard
from lazaret.web.connection import MOST_REQUESTS
from lazaret.web.http import MAX_HEAD, Response
from lazaret.web.server import MOST_CONNECTIONS, MOST_SOCKETS, Pages, WebServer, assets

HERE = Address(host="127.0.0.1", port=0)


def broken() -> Response:
    raise DataError("a secret path", where="/somewhere")


@pytest.fixture(scope="module")
def server() -> Iterator[WebServer]:
    routes = {
        "/thread": lambda: Response.of(current_thread().name.encode(), "text/plain"),
        "/broken": broken,
        "/wrong": lambda: {}["a secret key"],
        **assets("lazaret.web", "kit.js", "base.css"),
    }
    running = WebServer(Pages(routes, Guard()).answer, HERE)
    running.start()
    yield running
    running.stop()


def get(server: WebServer, path: str, method: str = "GET") -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    connection.request(method, path)
    return connection.getresponse()


def raw(server: WebServer, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as stream:
        stream.sendall(data)
        return stream.recv(1 << 16)


def test_answers_come_from_a_thread_of_its_own(server: WebServer) -> None:
    assert get(server, "/thread").read() == b"web"


def test_one_connection_serves_many_requests(server: WebServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    for _ in range(3):
        connection.request("GET", "/kit.js")
        answer = connection.getresponse()
        assert answer.status == HTTPStatus.OK
        assert answer.getheader("Content-Type") == "text/javascript; charset=utf-8"
        assert answer.read()


def test_answers_are_not_held_back(server: WebServer) -> None:
    """Without TCP_NODELAY each answer on a kept connection waits 40 ms for an acknowledgement."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    taken = []
    for _ in range(31):
        started = time.perf_counter()
        connection.request("GET", "/kit.js")
        connection.getresponse().read()
        taken.append(time.perf_counter() - started)
    assert statistics.median(taken) < 0.03


def test_head_has_the_length_and_no_body(server: WebServer) -> None:
    answer = get(server, "/base.css", "HEAD")
    assert int(answer.getheader("Content-Length") or 0) > 1000
    assert answer.read() == b""


def test_what_goes_wrong_inside_is_not_told_outside(server: WebServer) -> None:
    for path, status in (("/broken", HTTPStatus.SERVICE_UNAVAILABLE), ("/wrong", HTTPStatus.INTERNAL_SERVER_ERROR)):
        answer = get(server, path)
        assert answer.status == status
        assert b"secret" not in answer.read()


def test_unknown_paths_and_ways_out_of_the_folder(server: WebServer) -> None:
    for path in ("/nothing", "/../http.py", "/assets/kit.js", "/kit.js/", "/%2e%2e/http.py"):
        assert get(server, path).status == HTTPStatus.NOT_FOUND


def test_too_long_a_head_and_bytes_that_are_no_request(server: WebServer) -> None:
    assert raw(server, b"GET / HTTP/1.1\r\nX: " + b"y" * (MAX_HEAD + 10)).startswith(b"HTTP/1.1 431 ")
    assert raw(server, b"\x16\x03\x01\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert raw(server, b"PUT / HTTP/1.1\r\nHost: localhost\r\n\r\n").startswith(b"HTTP/1.1 405 ")


def test_too_many_connections_are_turned_away_and_the_rest_go_on(server: WebServer) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.port), timeout=5) for _ in range(MOST_CONNECTIONS)]
    try:
        assert raw(server, b"GET /thread HTTP/1.1\r\nHost: localhost\r\n\r\n").startswith(b"HTTP/1.1 503 ")
        idle[0].sendall(b"GET /thread HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert idle[0].recv(4096).startswith(b"HTTP/1.1 200 ")
    finally:
        for stream in idle:
            stream.close()


def test_a_port_that_is_taken_is_an_error_with_a_hint(server: WebServer) -> None:
    other = WebServer(Pages({}, Guard()).answer, Address(host="127.0.0.1", port=server.port))
    with pytest.raises(ConfigError, match="cannot listen") as error:
        other.start()
    assert "in use" in (error.value.hint or "")


def test_a_stopped_server_is_gone() -> None:
    short = WebServer(Pages({}, Guard()).answer, HERE)
    short.start()
    short.stop()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", short.port), timeout=1)


# Clients that are slow, deaf or many. Each is cut off, and who asks properly is answered meanwhile.

LARGE = b"x" * (32 << 20)  # more than the kernel takes off our hands
PLAIN = b"GET /thread HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def impatient() -> Iterator[WebServer]:
    routes = {
        "/thread": lambda: Response.of(current_thread().name.encode(), "text/plain"),
        "/large": lambda: Response(body=LARGE),
    }
    running = WebServer(Pages(routes, Guard()).answer, HERE, seconds=1)
    running.start()
    yield running
    running.stop()


def ended(stream: socket.socket) -> bool:
    """Whether the server has closed this connection; what came before is read and thrown away."""
    with contextlib.suppress(ConnectionResetError):
        while stream.recv(1 << 20):
            pass
    return True


def trickle(stream: socket.socket, data: bytes) -> None:
    for byte in data:
        stream.sendall(bytes([byte]))
        time.sleep(0.1)


def test_who_says_nothing_is_cut_off(impatient: WebServer) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=5) as stream:
        started = time.monotonic()
        assert ended(stream)
        assert 0.5 < time.monotonic() - started < 4


def test_a_byte_now_and_then_wins_no_time(impatient: WebServer) -> None:
    """At the first request, and at the second one on a connection that was kept open."""
    for first in (b"", PLAIN):
        with socket.create_connection(("127.0.0.1", impatient.port), timeout=5) as stream:
            stream.sendall(first)
            if first:
                assert stream.recv(4096).startswith(b"HTTP/1.1 200 ")
            started = time.monotonic()
            with pytest.raises((BrokenPipeError, ConnectionResetError)):
                trickle(stream, b"GET /thread HTTP/1.1\r\nX: " + b"y" * 1000)
            assert time.monotonic() - started < 4
            assert get(impatient, "/thread").read() == b"web"


@pytest.mark.parametrize("more", ["", "Connection: close\r\n"])
def test_who_takes_no_bytes_is_cut_off(impatient: WebServer, more: str) -> None:
    stream = socket.socket()
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stream.settimeout(5)
    with stream:
        stream.connect(("127.0.0.1", impatient.port))
        stream.sendall(f"GET /large HTTP/1.1\r\nHost: localhost\r\n{more}\r\n".encode())
        time.sleep(2.5)
        assert get(impatient, "/thread").read() == b"web"
        taken = 0
        with contextlib.suppress(ConnectionResetError):
            while part := stream.recv(1 << 20):
                taken += len(part)
        assert taken < len(LARGE)


def test_one_connection_serves_so_many_requests_and_no_more(server: WebServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as stream:
        stream.sendall(PLAIN * (MOST_REQUESTS + 50))
        parts = []
        with contextlib.suppress(ConnectionResetError):
            while part := stream.recv(1 << 20):
                parts.append(part)
        assert b"".join(parts).count(b"HTTP/1.1 200 ") == MOST_REQUESTS


def test_a_flood_of_connections_leaves_none_behind(impatient: WebServer) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    get(impatient, "/thread").read()  # the loop has its own descriptors by now
    before, started = descriptors(), time.monotonic()
    for _ in range(10):
        streams = [socket.create_connection(("127.0.0.1", impatient.port), timeout=5) for _ in range(50)]
        for stream in streams:
            stream.close()
    assert time.monotonic() - started < 20
    deadline = time.monotonic() + 10
    while descriptors() > before + 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert descriptors() <= before + 2
    assert get(impatient, "/thread").read() == b"web"


def self_signed(folder: Path) -> ssl.SSLContext:
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + timedelta(1))
    kept = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    pem = made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    (folder / "both.pem").write_bytes(pem + key.private_bytes(serialization.Encoding.PEM, *kept))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "both.pem")
    return context


def secure_get(server: WebServer) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection("localhost", server.port, context=context, timeout=5)
    with contextlib.closing(connection):
        connection.request("GET", "/thread")
        return connection.getresponse().read()


def test_handshakes_that_never_end_are_bounded_too(tmp_path: Path) -> None:
    """They are no connections yet for the server, and each holds a file descriptor of the run's process."""
    routes = {"/thread": lambda: Response.of(current_thread().name.encode(), "text/plain")}
    running = WebServer(Pages(routes, Guard()).answer, HERE, tls=self_signed(tmp_path))
    running.start()
    assert secure_get(running) == b"web"  # the loop has its own descriptors by now
    before = len(os.listdir("/proc/self/fd"))
    many = [socket.create_connection(("127.0.0.1", running.port), timeout=5) for _ in range(MOST_SOCKETS + 70)]
    time.sleep(0.5)
    ours = len(os.listdir("/proc/self/fd")) - before - len(many)
    assert ours <= MOST_SOCKETS
    assert ended(many[-1]), "the last ones are turned away"
    for stream in many:
        stream.close()
    deadline = time.monotonic() + 10
    while True:
        try:
            assert secure_get(running) == b"web"
            break
        except OSError:
            assert time.monotonic() < deadline, "the page is there again when they are gone"
            time.sleep(0.1)
    started = time.monotonic()
    running.stop()
    assert time.monotonic() - started < 3


def test_stopping_waits_for_nobody() -> None:
    """An idle client, one in the middle of a head, and one that does not take its answer."""
    running = WebServer(Pages({"/large": lambda: Response(body=LARGE)}, Guard()).answer, HERE)
    running.start()
    heads = (b"", b"GET / HT", b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
    streams = [socket.create_connection(("127.0.0.1", running.port), timeout=5) for _ in heads]
    for stream, head in zip(streams, heads, strict=True):
        stream.sendall(head)
    time.sleep(0.3)
    started = time.monotonic()
    running.stop()
    assert time.monotonic() - started < 3
    assert not [thread for thread in enumerate_threads() if thread is running._thread]
    for stream in streams:
        assert ended(stream)
        stream.close()


def test_a_server_that_never_started_stops() -> None:
    WebServer(Pages({}, Guard()).answer, HERE).stop()


def test_commands_without_a_page_do_not_load_the_server() -> None:
    """Their modules name it, and only `start` imports it."""
    modules = ("coordinator.cli", "site_agent.cli", "coordinator.dashboard.server", "site_agent.page.content")
    modules += ("site_agent.metrics",)
    code = f"import sys, {', '.join(modules)}; print([n for n in ('uvicorn', 'h11') if n in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert told.stdout.strip() == "[]"
