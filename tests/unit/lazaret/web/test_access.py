"""Who may look, and who may not; each check with a twin in which it is off and the stranger gets in."""

from __future__ import annotations

import base64
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path

import pytest

from lazaret.errors import ConfigError
from lazaret.web.access import Address, Guard, read_token, require_loopback
from lazaret.web.http import Request, Response
from lazaret.web.server import Pages

TOKEN = "s3cret-token-of-sufficient-length"
SECRET = Response.of(b"what is shown", "text/plain")


def ask(guard: Guard, path: str = "/", **fields: str) -> HTTPStatus:
    told = {"host": "127.0.0.1:7480", **fields}
    return Pages({"/": lambda: SECRET}, guard).answer(Request(method="GET", path=path, fields=told)).status


# A name that was made to resolve to this machine.


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7480", "", "127.0.0.1.evil.example", "[::2]:7480"])
def test_another_name_gets_nothing(host: str) -> None:
    assert ask(Guard(), host=host) is HTTPStatus.MISDIRECTED_REQUEST


@pytest.mark.parametrize("host", ["127.0.0.1:7480", "localhost:7480", "[::1]:7480", "LOCALHOST", "hub.example:443"])
def test_names_of_this_machine_and_of_the_certificate_are_fine(host: str) -> None:
    assert ask(Guard(names=["hub.example"]), host=host) is HTTPStatus.OK


def test_a_rebound_name_gets_in_where_any_name_will_do_twin() -> None:
    assert ask(Guard(names=["evil.example"]), host="evil.example") is HTTPStatus.OK


# Tokens.


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"operator:{password}".encode()).decode()


@pytest.mark.parametrize("told", [f"Bearer {TOKEN}", basic(TOKEN)])
def test_the_token_opens(told: str) -> None:
    assert ask(Guard(token=TOKEN), authorization=told) is HTTPStatus.OK


@pytest.mark.parametrize(
    "told",
    ["", "Bearer", "Bearer ", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", basic(""), "Basic ???", f"Token {TOKEN}"],
)
def test_anything_else_does_not(told: str) -> None:
    answer = Pages({"/": lambda: SECRET}, Guard(token=TOKEN)).answer(
        Request(method="GET", path="/", fields={"host": "localhost", "authorization": told})
    )
    assert answer.status is HTTPStatus.UNAUTHORIZED
    assert SECRET.body not in answer.body
    assert not [value for _, value in answer.headers() if SECRET.body in value]
    assert "Basic" in answer.fields["WWW-Authenticate"]


def test_without_a_token_asked_for_anybody_gets_in_twin() -> None:
    assert ask(Guard(token=None)) is HTTPStatus.OK


def test_a_folder_is_a_token_too() -> None:
    guard = Guard(folder=TOKEN)
    assert ask(guard, f"/{TOKEN}/") is HTTPStatus.OK
    for path in ("/", f"/{TOKEN}", f"/{TOKEN}x/", f"//{TOKEN}/", "/state.json", f"/{TOKEN}/nothing"):
        assert ask(guard, path) is HTTPStatus.NOT_FOUND
    assert ask(replace(guard, folder=None), "/") is HTTPStatus.OK  # the twin: without it the bare path is enough


def test_a_guard_does_not_print_its_tokens() -> None:
    assert TOKEN not in repr(Guard(token=TOKEN, folder=TOKEN))


def test_a_token_is_read_from_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    assert read_token(path) == TOKEN
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="open to others"):
        read_token(path)


@pytest.mark.parametrize("text", ["short", "", "with a space in the middle of it", "ünicode-is-not-a-header-value"])
def test_a_token_that_could_be_guessed_or_not_be_sent_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="at least 22"):
        read_token(path)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:80", "localhost:1", "127.9.9.9:1"])
def test_addresses_of_this_machine(listen: str) -> None:
    assert require_loopback(listen, where="x").is_loopback


@pytest.mark.parametrize("listen", ["0.0.0.0:80", "[::]:80", "192.168.0.1:80", "hub.example:80", "127.0.0.1.nip.io:80"])
def test_addresses_that_others_reach(listen: str) -> None:
    assert not Address.parse(listen, where="x").is_loopback
    with pytest.raises(ConfigError, match="for the machine it runs on"):
        require_loopback(listen, where="x")


@pytest.mark.parametrize("listen", ["", "127.0.0.1", ":80", "127.0.0.1:http", "127.0.0.1:70000"])
def test_what_is_no_address(listen: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        Address.parse(listen, where="x")
