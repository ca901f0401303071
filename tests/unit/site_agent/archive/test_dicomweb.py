"""The client against servers that lie, hang, redirect and break off. What they say is repeated to nobody."""

from __future__ import annotations

import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Event, Thread

import pytest

from lazaret.errors import ArchiveError, ArchiveObjectError
from site_agent.archive import dicomweb
from site_agent.archive.access import ArchiveAccess
from site_agent.archive.dicomweb import INSTANCE, SERIES, STUDY, WAITS, ArchiveClient, InstanceName
from tests.support.web_server import Answer, Asked, WebServer

NAME = InstanceName("1.2", "1.3", "1.4")
SECRET = "Meier^Anna"
Serve = Callable[[Callable[[Asked], Answer]], tuple[WebServer, ArchiveClient]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    made = []

    def start(answer: Callable[[Asked], Answer]) -> tuple[WebServer, ArchiveClient]:
        server = WebServer(answer)
        made.append(server)
        access = ArchiveAccess(
            host="127.0.0.1", port=server.port, root="/web", tls=None, authorization="Bearer s3cret", timeout=5
        )
        return server, ArchiveClient(access, sleep=lambda seconds: None)

    yield start
    for server in made:
        server.stop()


def row(study: str = "1.2", series: str = "1.3", instance: str = "1.4", **more: str) -> dict[str, object]:
    values = {STUDY: study, SERIES: series, INSTANCE: instance, **more}
    return {tag: {"vr": "UI", "Value": [value]} for tag, value in values.items()}


def listed(*rows: dict[str, object]) -> Answer:
    return Answer(json.dumps(rows).encode())


def image(content: bytes = b"image", **more: object) -> Answer:
    body = b"--e\r\n\r\n" + content + b"\r\n--e--\r\n"
    return Answer(body, kind='multipart/related; type="application/dicom"; boundary=e', **more)  # type: ignore[arg-type]


def retrieved(client: ArchiveClient) -> bytes:
    kept = bytearray()

    def begin() -> Callable[[bytes], None]:
        kept.clear()
        return kept.extend

    client.retrieve(NAME, begin)
    return bytes(kept)


def test_a_search_goes_on_until_nothing_new_comes(serve: Serve) -> None:
    def answer(asked: Asked) -> Answer:
        offset = int(asked.path.rpartition("offset=")[2])
        return listed(*[row(instance=f"1.{n}") for n in range(offset, min(offset + 3, 7))])  # its own, smaller pages

    server, client = serve(answer)
    assert [name.instance for name in client.instances("1.2")] == [f"1.{n}" for n in range(7)]
    assert server.asked[0].headers["authorization"] == "Bearer s3cret"
    assert len(server.asked) == 4


def test_a_server_that_ignores_the_offset_is_asked_twice(serve: Serve) -> None:
    server, client = serve(lambda asked: listed(row(), row(instance="1.5")))
    assert len(list(client.instances("1.2"))) == 2 and len(server.asked) == 2


def test_a_server_without_an_end_is_stopped(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dicomweb, "MOST_ROWS", 10)
    count = iter(range(10_000))
    _, client = serve(lambda asked: listed(*[row(instance=f"1.{next(count)}") for _ in range(5)]))
    with pytest.raises(ArchiveError, match="more than 10 images"):
        list(client.instances("1.2"))


def test_images_of_other_studies_are_not_taken(serve: Serve) -> None:
    _, client = serve(lambda asked: listed(row(study="9.9"), row(instance="1.7")))
    assert [name.instance for name in client.instances("1.2")] == ["1.7"]


@pytest.mark.parametrize("uid", ["../../etc/passwd", "", "1.2/..", SECRET, "1" * 65])
def test_a_uid_that_is_none_is_refused(serve: Serve, uid: str) -> None:
    _, client = serve(lambda asked: listed(row(instance=uid)))
    with pytest.raises(ArchiveError, match="without a valid UID") as caught:
        list(client.instances("1.2"))
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "answer",
    [
        Answer(b"<html>" + SECRET.encode(), kind="text/html"),
        Answer(SECRET.encode()),
        Answer(json.dumps({"name": SECRET}).encode()),
        Answer(json.dumps([SECRET]).encode()),
        Answer(b"[" * 200_000),
        Answer(b'"' + b"x" * 5000 + b'"'),
    ],
    ids=["html", "text", "object", "list of text", "deep", "long"],
)
def test_answers_that_are_no_search_result(serve: Serve, answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dicomweb, "MOST_ANSWER", 4000 if answer.content[:1] == b'"' else 10**6)
    _, client = serve(lambda asked: answer)
    with pytest.raises(ArchiveError) as caught:
        list(client.instances("1.2"))
    assert SECRET not in f"{caught.value} {caught.value.hint}" and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "message"), [(401, "does not let us in"), (403, "does not let us in"), (404, "404"), (409, "409")]
)
def test_refusals_have_a_number_and_no_text(serve: Serve, status: int, message: str) -> None:
    server, client = serve(lambda asked: Answer(SECRET.encode(), status=status))
    with pytest.raises(ArchiveError, match=message) as caught:
        retrieved(client)
    assert SECRET not in f"{caught.value} {caught.value.hint}" and len(server.asked) == 1


def test_a_redirection_does_not_carry_the_token_elsewhere(serve: Serve) -> None:
    thief, _ = serve(lambda asked: listed())
    target = {"Location": f"http://127.0.0.1:{thief.port}/web"}
    _, client = serve(lambda asked: Answer(status=302, headers=target))
    with pytest.raises(ArchiveError, match="elsewhere"):
        list(client.instances("1.2"))
    assert not thief.asked


def test_an_answer_that_breaks_off_is_asked_for_again(serve: Serve) -> None:
    whole = image(b"x" * 1000)
    half = Answer(whole.content[:500], kind=whole.kind, promised=len(whole.content))
    answers = iter([half, Answer(status=503), whole])
    server, client = serve(lambda asked: next(answers))
    assert retrieved(client) == b"x" * 1000 and len(server.asked) == 3


def test_an_image_without_its_end_is_no_image(serve: Serve) -> None:
    """By its length the answer is whole: a gate before the archive may have counted what broke off behind it."""
    whole, cut = image(b"x" * 5000), image(b"x" * 3000)
    cut = Answer(cut.content[: -len("\r\n--e--\r\n")], kind=cut.kind)
    answers = iter([cut, cut, whole])
    server, client = serve(lambda asked: next(answers))
    assert retrieved(client) == b"x" * 5000 and len(server.asked) == 3


def test_after_some_tries_it_is_given_up(serve: Serve) -> None:
    waited = list[float]()
    server, client = serve(lambda asked: Answer(status=503))
    client._sleep = waited.append
    with pytest.raises(ArchiveError, match="does not answer"):
        retrieved(client)
    assert tuple(waited) == WAITS and len(server.asked) == len(WAITS) + 1


def test_nobody_there() -> None:
    access = ArchiveAccess(host="127.0.0.1", port=9, root="", tls=None, authorization="Bearer s3cret", timeout=1)
    with pytest.raises(ArchiveError, match="does not answer"):
        list(ArchiveClient(access, sleep=lambda seconds: None).instances("1.2"))
    assert "s3cret" not in repr(access)


def test_an_answer_that_trickles_has_a_longest_time(serve: Serve) -> None:
    seconds = iter(range(0, 10**6, 1000))
    _, client = serve(lambda asked: image(b"x" * 10**6))
    client._clock = lambda: float(next(seconds))
    with pytest.raises(ArchiveError, match="took more than"):
        retrieved(client)


@pytest.mark.parametrize(
    ("first", "tls"),
    [(b"", False), (b"HTTP/1.1 200 OK\r\n", False), (bytes.fromhex("1603030100020000fc"), True)],
    ids=["no status", "headers", "a handshake"],
)
def test_an_archive_that_never_begins_its_answer_has_one_too(first: bytes, tls: bool) -> None:
    """A byte at a time: each one would begin the socket's timeout anew."""
    stop = Event()

    def trickle(link: socket.socket) -> None:
        with link, suppress(OSError):
            link.recv(65_536)
            link.sendall(first)
            while not stop.wait(0.05):
                link.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = Thread(target=lambda: trickle(listener.accept()[0]), daemon=True)
        serving.start()
        access = ArchiveAccess(
            host="127.0.0.1",
            port=listener.getsockname()[1],
            root="",
            tls=ssl.create_default_context() if tls else None,
            authorization="",
            timeout=30,
        )
        began = time.monotonic()
        with pytest.raises(ArchiveError, match="took more than"):
            list(ArchiveClient(access, sleep=lambda seconds: None, longest=0.5).instances("1.2"))
        assert time.monotonic() - began < 20
        stop.set()
        serving.join(10)


def test_two_images_for_one_are_refused(serve: Serve) -> None:
    two = image()
    two.content = two.content.replace(b"--e--", b"--e\r\n\r\nother\r\n--e--")
    _, client = serve(lambda asked: two)
    with pytest.raises(ArchiveObjectError, match="more than the one image"):
        retrieved(client)


def stored(instance: str, *, failed: bool = False) -> Answer:
    told: dict[str, object] = {"00081199": {"vr": "SQ", "Value": [{"00081155": {"vr": "UI", "Value": [instance]}}]}}
    if failed:
        told["00081198"] = {"vr": "SQ", "Value": [{"00081155": {"vr": "UI", "Value": [instance]}}]}
    return Answer(json.dumps(told).encode())


def test_a_report_is_stored_when_the_archive_says_so(serve: Serve) -> None:
    server, client = serve(lambda asked: stored("1.5"))
    client.store("1.5", b"report")
    (asked,) = server.asked
    assert asked.method == "POST" and asked.path == "/web/studies" and b"\r\n\r\nreport\r\n--" in asked.body


@pytest.mark.parametrize(
    "answer", [stored("1.6"), stored("1.5", failed=True), Answer(b"{}"), Answer(b"[]"), Answer(b'{"00081199": 1}')]
)
def test_anything_else_is_not_stored(serve: Serve, answer: Answer) -> None:
    _, client = serve(lambda asked: answer)
    with pytest.raises(ArchiveObjectError, match="did not store"):
        client.store("1.5", b"report")
