"""Requests are read strictly, answers carry the headers that keep a page to itself."""

from __future__ import annotations

from http import HTTPStatus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazaret.web.http import HEADERS, MAX_HEAD, BadRequest, Request, Response


def head(line: str = "GET / HTTP/1.1", *fields: str) -> bytes:
    return "\r\n".join([line, *fields, "", ""]).encode("latin-1")


def test_a_plain_request_is_read() -> None:
    request = Request.parse(head("GET /state.json?x=1 HTTP/1.1", "Host: here:1", "If-None-Match:  \"a\" "))
    assert (request.method, request.path) == ("GET", "/state.json")
    assert request.fields == {"host": "here:1", "if-none-match": '"a"'}


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (head("POST / HTTP/1.1"), HTTPStatus.METHOD_NOT_ALLOWED),
        (head("DELETE /state.json HTTP/1.1"), HTTPStatus.METHOD_NOT_ALLOWED),
        (head("GET / HTTP/1.0"), HTTPStatus.BAD_REQUEST),
        (head("GET http://elsewhere/ HTTP/1.1"), HTTPStatus.BAD_REQUEST),
        (head("GET / HTTP/1.1", "Content-Length: 5"), HTTPStatus.BAD_REQUEST),
        (head("GET / HTTP/1.1", "Transfer-Encoding: chunked"), HTTPStatus.BAD_REQUEST),
        (head("GET / HTTP/1.1", "Host: a", "Host: b"), HTTPStatus.BAD_REQUEST),
        (head("GET / HTTP/1.1", "Bad Name: x"), HTTPStatus.BAD_REQUEST),
        (head("GET / HTTP/1.1", " folded: x"), HTTPStatus.BAD_REQUEST),
        (head("GET / HTTP/1.1", *(f"X{n}: 1" for n in range(65))), HTTPStatus.BAD_REQUEST),
        (head("GET / HTTP/1.1", "X: " + "y" * MAX_HEAD), HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE),
    ],
)
def test_everything_else_is_refused(data: bytes, status: HTTPStatus) -> None:
    with pytest.raises(BadRequest) as refused:
        Request.parse(data)
    assert refused.value.status is status


@given(st.binary(max_size=300))
def test_no_bytes_do_anything_but_parse_or_be_refused(data: bytes) -> None:
    try:
        request = Request.parse(data)
    except BadRequest:
        return
    assert request.method in ("GET", "HEAD")
    assert request.path.startswith("/")


def test_the_policy_lets_nothing_in_from_elsewhere_and_nothing_inline() -> None:
    policy = HEADERS["Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert "unsafe" not in policy
    assert "http" not in policy


def test_every_answer_carries_them_and_a_head_has_no_body() -> None:
    answer = Response.of(b"hello", "text/plain")
    told = answer.encode(head_only=True).decode()
    assert all(f"{name}: {value}\r\n" in told for name, value in HEADERS.items())
    assert told.endswith("\r\n\r\n")
    assert "Content-Length: 5\r\n" in told
    assert answer.encode().endswith(b"\r\n\r\nhello")


def test_who_has_it_already_gets_304() -> None:
    answer = Response.of_json({"a": 1})
    assert answer.etag is not None
    again = answer.for_request(Request(method="GET", path="/", fields={"if-none-match": answer.etag}))
    assert (again.status, again.body) == (HTTPStatus.NOT_MODIFIED, b"")
    assert Response.of_json({"a": 2}).etag != answer.etag


def test_numbers_that_json_has_not_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        Response.of_json({"a": float("nan")})
