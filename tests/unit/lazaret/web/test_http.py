"""Requests are read strictly, over a real socket; answers carry the headers that keep a page to itself."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from http import HTTPStatus

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lazaret.web.access import Address
from lazaret.web.http import HEADERS, MAX_HEAD, Request, Response
from lazaret.web.server import WebServer

GRAMMAR = [
    *(b"GET / HTTP/1.1\r\n", b"PUT /x HTTP/1.1\r\n", b"HEAD / HTTP/1.1\r\n", b"CONNECT here HTTP/1.1\r\n"),
    *(b"GET / HTTP/1.0\r\n", b"Host: here\r\n", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n"),
    *(b"Connection: keep-alive, Upgrade\r\n", b"Upgrade: websocket\r\n", b"Upgrade: h2c\r\n"),
    b"Expect: 100-continue\r\n",
    *(b"Connection: close\r\n", b"\r\n", b"\r\n\r\n", b"\n", b"5\r\nhello\r\n0\r\n\r\n", b"hello", b"\x00", b" "),
]
WHOLE = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
GRAMMAR += [WHOLE, WHOLE, WHOLE]


SEEN: list[Request] = []
STATUSES = (
    HTTPStatus.OK,
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.METHOD_NOT_ALLOWED,
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
)


def answer(request: Request) -> Response:
    SEEN.append(request)
    return Response.of(b"hello", "text/plain").for_request(request)


@pytest.fixture(scope="module")
def server() -> Iterator[WebServer]:
    running = WebServer(answer, Address(host="127.0.0.1", port=0))
    running.start()
    yield running
    running.stop()

TOO_LARGE = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE


def head(line: str = "GET / HTTP/1.1", *fields: str, host: str = "Host: here") -> bytes:
    return "\r\n".join([line, host, *fields, "", ""]).encode("latin-1")


def exchange(server: WebServer, data: bytes) -> bytes:
    """Everything that comes back until the server closes; half-closed, so that it does not wait for more."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as stream:
        stream.sendall(data)
        stream.shutdown(socket.SHUT_WR)
        parts = []
        # A connection that is closed on unread bytes is reset, after what was sent has come.
        with contextlib.suppress(ConnectionResetError):
            while part := stream.recv(1 << 16):
                parts.append(part)
        return b"".join(parts)


def status_of(told: bytes) -> HTTPStatus:
    return HTTPStatus(int(told.split(b" ", 2)[1]))


def test_a_plain_request_is_read(server: WebServer) -> None:
    fields = ("If-None-Match:  \"a\" ", "Connection: close")
    exchange(server, head("GET /state.json?x=1 HTTP/1.1", *fields, host="Host: here:1"))
    request = SEEN[-1]
    assert (request.method, request.path) == ("GET", "/state.json")
    assert request.fields == {"host": "here:1", "if-none-match": '"a"', "connection": "close"}


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (head("POST / HTTP/1.1"), HTTPStatus.METHOD_NOT_ALLOWED),
        (head("DELETE /state.json HTTP/1.1"), HTTPStatus.METHOD_NOT_ALLOWED),
        (head("GET / HTTP/1.0"), HTTPStatus.BAD_REQUEST),
        (head("GET http://elsewhere/ HTTP/1.1"), HTTPStatus.BAD_REQUEST),
        (head("GET / HTTP/1.1", "Content-Length: 5"), HTTPStatus.BAD_REQUEST),
        (head("GET / HTTP/1.1", "Transfer-Encoding: chunked"), HTTPStatus.BAD_REQUEST),
        (head("GET / HTTP/1.1", "Host: b"), HTTPStatus.BAD_REQUEST),
        (head("GET / HTTP/1.1", "Bad Name: x"), HTTPStatus.BAD_REQUEST),
        (head("GET / HTTP/1.1", host=" folded: x"), HTTPStatus.BAD_REQUEST),
        (head("GET / HTTP/1.1", " folded: x"), HTTPStatus.BAD_REQUEST),
        (head("GET / HTTP/1.1", "X: a\x01b"), HTTPStatus.BAD_REQUEST),
        (b"GET / HTTP/1.1\nHost: here\n\n", HTTPStatus.BAD_REQUEST),
        (head("GET / HTTP/1.1", "X:" + " " * MAX_HEAD + "y"), TOO_LARGE),
        (head(f"GET /?{'q' * 1500} HTTP/1.1", "X: " + "y" * (MAX_HEAD - 1500)), TOO_LARGE),
        (head("GET / HTTP/1.1", *(f"X{n}: 1" for n in range(64))), HTTPStatus.BAD_REQUEST),
        (head("GET / HTTP/1.1", "X: " + "y" * MAX_HEAD), HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE),
        (head("GET / HTTP/1.1", host="X: no host"), HTTPStatus.BAD_REQUEST),
        (head("GET / HTTP/1.1", "X: \u00fc"), HTTPStatus.BAD_REQUEST),
        (head("GET / HTTP/1.1", "X" * 65 + ": 1"), HTTPStatus.BAD_REQUEST),
        (head(f"GET /{'x' * 2048} HTTP/1.1"), HTTPStatus.BAD_REQUEST),
        (head("GET / HTTP/2.0"), HTTPStatus.BAD_REQUEST),
    ],
)
def test_everything_else_is_refused_and_the_connection_closed(
    server: WebServer, data: bytes, status: HTTPStatus
) -> None:
    before = len(SEEN)
    told = exchange(server, data)
    assert status_of(told) is status
    assert len(SEEN) == before, "no page is asked"
    first, _, body = told.partition(b"\r\n\r\n")
    assert body == f"{status.phrase.lower()}\n".encode()
    assert b"connection: close" in first.lower()
    assert all(f"{name.lower()}: {value}".encode() in first for name, value in HEADERS.items())
    assert b"server:" not in first


def test_the_head_is_measured_however_it_comes(server: WebServer) -> None:
    """In one piece, in many, and without an end."""
    data = head("GET / HTTP/1.1", *(f"X{n}: " + "y" * 1000 for n in range(9)))
    for pieces in (1, 5):
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as stream:
            step = len(data) // pieces
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for start in range(0, len(data), step):
                    stream.sendall(data[start : start + step])
            assert status_of(stream.recv(4096)) is HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE


@given(st.binary(max_size=300))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bytes_do_anything_but_parse_or_be_refused(
    server: WebServer, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    before = len(SEEN)
    told = exchange(server, data)
    assert not told or status_of(told) in STATUSES
    for request in SEEN[before:]:
        assert request.method in ("GET", "HEAD")
        assert request.path.startswith("/")
    assert status_of(exchange(server, head())) is HTTPStatus.OK, "the next request is answered"
    assert not caplog.records


@given(st.lists(st.sampled_from(GRAMMAR), max_size=14))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nor_do_pieces_of_requests_in_any_order(
    server: WebServer, caplog: pytest.LogCaptureFixture, pieces: list[bytes]
) -> None:
    """Random bytes rarely begin like a request; these do, and then go wrong: in a body, or in a second request."""
    told = exchange(server, b"".join(pieces))
    assert not told or status_of(told) in STATUSES
    assert status_of(exchange(server, head())) is HTTPStatus.OK
    assert not caplog.records, [record.getMessage() for record in caplog.records]


def test_the_policy_lets_nothing_in_from_elsewhere_and_nothing_inline() -> None:
    policy = HEADERS["Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert "unsafe" not in policy
    assert "http" not in policy


def test_every_answer_carries_them_and_a_head_has_no_body(server: WebServer) -> None:
    told = exchange(server, head("HEAD / HTTP/1.1")).decode()
    assert all(f"{name.lower()}: {value}\r\n" in told for name, value in HEADERS.items())
    assert told.endswith("\r\n\r\n")
    assert "content-length: 5\r\n" in told
    assert exchange(server, head()).endswith(b"\r\n\r\nhello")


def test_304_goes_out_without_a_body(server: WebServer) -> None:
    etag = Response.of(b"hello", "text/plain").etag
    told = exchange(server, head("GET / HTTP/1.1", f"If-None-Match: {etag}"))
    assert status_of(told) is HTTPStatus.NOT_MODIFIED
    assert told.endswith(b"\r\n\r\n")
    assert b"content-length" not in told
    assert f"etag: {etag}\r\n".encode() in told


def test_who_has_it_already_gets_304() -> None:
    answer = Response.of_json({"a": 1})
    assert answer.etag is not None
    again = answer.for_request(Request(method="GET", path="/", fields={"if-none-match": answer.etag}))
    assert (again.status, again.body) == (HTTPStatus.NOT_MODIFIED, b"")
    assert Response.of_json({"a": 2}).etag != answer.etag


def test_numbers_that_json_has_not_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        Response.of_json({"a": float("nan")})
