"""The thin server over a real socket: bounds, keep-alive, and nobody else's thread."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from http import HTTPStatus
from threading import current_thread

import pytest

from lazaret.errors import ConfigError, DataError
from lazaret.web.access import Address, Guard
from lazaret.web.http import MAX_HEAD, Response
from lazaret.web.pages import Pages, assets
from lazaret.web.server import MOST_CONNECTIONS, WebServer

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
    assert raw(server, b"PUT / HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 405 ")


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
