"""Whose fault it is when something fails: a site's ends its stream, the line's too, ours the whole service."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from coordinator import send_queue
from coordinator import service as module
from coordinator.phases import RunPhase
from coordinator.service import Service, Stopping
from lazaret.errors import AuditLogError, CodecError, ConfigError, ToolkitError
from protos.parse import FROM_COORDINATOR, FROM_SITE, Parcel
from security.log.reader import LogReader
from security.secagg.context import PROTOCOL_VERSION
from security.secagg.fields import Wire
from security.secagg.relay import CloseReason, Goodbye, Open, Ping, Pong, SignedHead
from tests.support.hub_world import Hub

import grpc  # isort: skip  # after protos.tls, as everywhere

SITE, OTHER = "graz", "linz"
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    hub = Hub.make(tmp_path)
    yield hub
    hub.close()


class Line:
    """A call as gRPC shows it to a server, and the site on its other end."""

    def __init__(self, service: Service, site: str) -> None:
        self._service, self.site = service, site
        self._sequence = 0
        self._coming: asyncio.Queue[Any] = asyncio.Queue()
        self.written: list[Wire] = []
        self.broken = False
        self.aborted: grpc.StatusCode | None = None

    def open(self, session: int = 1) -> asyncio.Task[None]:
        manifest = self._service.manifest
        told = Open(
            protocol=PROTOCOL_VERSION,
            federation=manifest.federation,
            site=self.site,
            session=session,
            manifest_version=manifest.version,
            manifest_hash=manifest.digest,
        )
        self.say(told)
        return asyncio.create_task(self._service.converse(self._first(), self))

    async def _first(self) -> AsyncIterator[bytes]:
        yield await self._coming.get()

    def say(self, message: Wire, head_size: int = 1) -> None:
        self._sequence += 1
        head = SignedHead(origin=f"{self.site}.lesions/audit", size=head_size, root=bytes(32), signatures=())
        self.bytes(FROM_SITE.encode(Parcel(message=message, sequence=self._sequence, log_head=head)))

    def bytes(self, data: bytes) -> None:
        self._coming.put_nowait(data)

    # What the service calls.

    async def send_initial_metadata(self, _: object) -> None: ...

    async def read(self) -> Any:
        return await self._coming.get()

    async def write(self, data: bytes) -> None:
        if self.broken:
            raise grpc.aio.InternalError("the line is gone")
        self.written.append(FROM_COORDINATOR.decode(data).message)

    async def abort(self, code: grpc.StatusCode, _: str) -> None:
        self.aborted = code
        raise grpc.aio.AbortError("aborted")


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def play(hub: Hub, monkeypatch: pytest.MonkeyPatch, scene: Callable[[Service], Awaitable[None]]) -> Service:
    """A scene with a service that is not on the network; whoever calls is who it says."""

    async def who(_: Service, line: Line) -> tuple[str, str]:
        return line.site, "ab" * 32

    async def run() -> Service:
        monkeypatch.setattr(Service, "_who", who)
        service = Service(hub.ready.shell, hub.ready.identity, hub.ready.seat)
        await scene(service)
        return service

    return asyncio.run(run())


def fails(error: Exception) -> Callable[..., Any]:
    def work(*_: object, **__: object) -> None:
        raise error

    return work


# Streams.


@pytest.mark.parametrize(
    "error", [FULL, ToolkitError("the database failed"), AuditLogError("cannot write"), KeyError("a bug")]
)
def test_a_fault_of_ours_ends_the_service_and_nothing_follows_from_it(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    shell = hub.ready.shell
    taken: list[str] = []

    def received(stream: Any, _: object) -> None:
        taken.append(stream.site)
        raise error

    async def scene(service: Service) -> None:
        lines = [Line(service, site) for site in (SITE, OTHER)]
        streams = [line.open() for line in lines]
        await settled()
        monkeypatch.setattr(shell, "received", received)
        monkeypatch.setattr(shell.engine, "gone", fails(AssertionError("memory is not what the disk holds")))
        lines[0].say(Pong(number=1))
        await settled()
        said = [len(line.written) for line in lines]
        lines[1].say(Pong(number=1))
        shell.streams[OTHER].put([Ping(number=1)])
        late = Line(service, "vienna")
        streams.append(late.open())
        await asyncio.gather(*streams, return_exceptions=True)
        assert [line.aborted for line in (*lines, late)] == [grpc.StatusCode.UNAVAILABLE] * 3
        assert taken == [SITE], "nothing is taken any more"
        assert [len(line.written) for line in lines] == said and late.written == [], "nothing is sent any more"
        with pytest.raises(type(error)) as raised:
            await service._run()
        assert raised.value is error

    play(hub, monkeypatch, scene)


@pytest.mark.parametrize("where", ["connected", "disconnected"])
def test_coming_and_going_are_our_work_too(hub: Hub, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    name = "note_session" if where == "connected" else "note_seen"
    monkeypatch.setattr(hub.storage, name, fails(ToolkitError("the database failed")))

    async def scene(service: Service) -> None:
        line = Line(service, SITE)
        stream = line.open()
        await settled()
        line.bytes(grpc.aio.EOF)
        await asyncio.gather(stream, return_exceptions=True)
        with pytest.raises(ToolkitError, match="database failed"):
            await service._run()

    play(hub, monkeypatch, scene)


def test_a_message_that_cannot_be_made_ends_the_service(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def frames() -> Iterator[Wire]:
        yield Ping(number=1)
        raise FULL

    async def scene(service: Service) -> None:
        line = Line(service, SITE)
        stream = line.open()
        await settled()
        hub.ready.shell.streams[SITE].put(frames())
        await asyncio.gather(stream, return_exceptions=True)
        assert line.aborted is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(OSError, match="No space left"):
            await service._run()

    play(hub, monkeypatch, scene)


def test_the_first_fault_is_the_one_that_is_told(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that was waiting when another one failed may fail as well, and for a reason that follows from it."""

    def both(service: Service) -> None:
        with service._own_work():
            with suppress(Stopping), service._own_work():
                raise FULL
            raise ToolkitError("what followed")

    async def scene(service: Service) -> None:
        with pytest.raises(Stopping):
            both(service)
        with pytest.raises(OSError, match="No space left"):
            service._check()

    play(hub, monkeypatch, scene)


def test_a_fault_of_a_site_ends_its_stream_only(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(service: Service) -> None:
        line, other = Line(service, SITE), Line(service, OTHER)
        streams = [line.open(), other.open()]
        await settled()
        line.bytes(b"?")
        await asyncio.gather(streams[0], return_exceptions=True)
        assert line.aborted is grpc.StatusCode.INVALID_ARGUMENT
        service._check()
        assert set(hub.ready.shell.streams) == {OTHER} and not streams[1].done()
        streams[1].cancel()
        await asyncio.gather(streams[1], return_exceptions=True)
        service._check()

    play(hub, monkeypatch, scene)


def _partial(hub: Hub) -> list[int]:
    return [record.body["bytes"] for record in LogReader(hub.ready.shell.books.log.folder).records("ingress.partial")]


@pytest.mark.parametrize("kept", [True, False], ids=["", "twin"])
def test_bytes_that_end_a_stream_have_an_entry(hub: Hub, monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    """No message at all, a message out of order, and a first one that is no greeting: each names its bytes."""
    if not kept:
        monkeypatch.setattr(hub.ready.shell.books, "refused", lambda *_: None)

    head = SignedHead(origin=f"{SITE}.lesions/audit", size=1, root=bytes(32), signatures=())
    stray = FROM_SITE.encode(Parcel(message=Pong(number=1), sequence=9, log_head=head))

    async def scene(service: Service) -> None:
        for session, junk in enumerate((b"\xff" * 190_000, stray), start=1):
            line = Line(service, SITE)
            stream = line.open(session)
            await settled()
            line.bytes(junk)
            await asyncio.gather(stream, return_exceptions=True)
            assert line.aborted is grpc.StatusCode.INVALID_ARGUMENT
        line = Line(service, SITE)
        line.bytes(stray)
        with suppress(grpc.aio.AbortError):
            await service.converse(line._first(), line)

    play(hub, monkeypatch, scene)
    assert _partial(hub) == ([190_000, len(stray), len(stray)] if kept else [])


def test_a_broken_line_is_nobodys_fault(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(service: Service) -> None:
        line = Line(service, SITE)
        stream = line.open()
        await settled()
        line.broken = True
        hub.ready.shell.streams[SITE].put([Ping(number=1)])
        (ended,) = await asyncio.gather(stream, return_exceptions=True)
        # As if gRPC had cancelled the call already: of anything else it prints a traceback.
        assert isinstance(ended, asyncio.CancelledError) and hub.ready.shell.streams == {}
        service._check()

    play(hub, monkeypatch, scene)


def test_a_stream_that_is_closed_ends_when_its_last_word_is_said(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(service: Service) -> None:
        line = Line(service, SITE)
        stream = line.open()
        await settled()
        hub.ready.shell.streams[SITE].close(Goodbye(code=CloseReason.STOPPING))
        await asyncio.wait_for(stream, 5)
        assert line.written[-1] == Goodbye(code=CloseReason.STOPPING) and hub.ready.shell.streams == {}

    play(hub, monkeypatch, scene)


@pytest.mark.parametrize("session", [2**63, 2**64 - 1])
def test_a_session_that_no_database_can_hold_is_turned_away(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, session: int
) -> None:
    async def scene(service: Service) -> None:
        line = Line(service, SITE)
        await line.open(session)
        assert line.written == [Goodbye(code=CloseReason.OUT_OF_ORDER)]
        service._check()

    play(hub, monkeypatch, scene)


def test_a_head_that_no_log_can_have_is_refused(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(service: Service) -> None:
        line = Line(service, SITE)
        stream = line.open()
        await settled()
        line.say(Pong(number=1), head_size=10**15)
        await asyncio.gather(stream, return_exceptions=True)
        assert line.aborted is grpc.StatusCode.INVALID_ARGUMENT
        service._check()

    play(hub, monkeypatch, scene)


# From its start to its end.


def test_the_port_is_the_one_that_was_bound_and_comes_before_the_round(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "coordinator")
    bound: list[int] = []

    async def scene(service: Service) -> None:
        service.stop()
        await service.serve("127.0.0.1:0", lambda: bound.append(service.port))
        assert bound == [service.port] and service.port > 0
        assert f"listening on 127.0.0.1:{service.port}" in caplog.text

    play(hub, monkeypatch, scene)


def test_nothing_is_begun_without_a_port(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(service: Service) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            with pytest.raises(ConfigError, match="cannot listen"):
                await service.serve(f"127.0.0.1:{taken.getsockname()[1]}", fails(AssertionError("a round")))

    play(hub, monkeypatch, scene)


@pytest.mark.parametrize("where", ["in a stream", "in the loop"])
def test_what_fails_on_the_way_out_does_not_hide_why(hub: Hub, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    async def scene(service: Service) -> None:
        monkeypatch.setattr(service.traffic, "close", fails(AuditLogError("cannot write an entry")))
        if where == "in the loop":
            monkeypatch.setattr(service.shell, "tick", fails(ToolkitError("the database failed")))
        else:
            with pytest.raises(Stopping), service._own_work():
                raise ToolkitError("the database failed")
        with pytest.raises(ToolkitError, match="the database failed"):
            await service.serve("127.0.0.1:0")
        with pytest.raises(Stopping), service._own_work():
            pytest.fail("no stream may go on")

    play(hub, monkeypatch, scene)


def test_a_fault_while_leaving_is_told_too(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that comes in the last moment is still taken, and may be what does not fit on the disk."""

    async def scene(service: Service) -> None:
        def close() -> None:
            service._failure = FULL

        monkeypatch.setattr(service.traffic, "close", close)
        service.stop()
        with pytest.raises(OSError, match="No space left"):
            await service.serve("127.0.0.1:0")

    play(hub, monkeypatch, scene)


def test_calls_that_were_cut_off_end_before_the_loop_does(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC prints a traceback for every call that is cancelled together with the loop."""

    async def scene(service: Service) -> None:
        call = asyncio.create_task(asyncio.sleep(0.2))
        service.stop()
        await service.serve("127.0.0.1:0")
        assert call.done() and not call.cancelled()

    play(hub, monkeypatch, scene)


async def seconds_of(work: Awaitable[None]) -> float:
    started = asyncio.get_running_loop().time()
    await asyncio.wait_for(work, 20)
    return asyncio.get_running_loop().time() - started


def test_an_aggregation_that_does_not_end_is_left_after_a_while(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "STOP_SECONDS", 1.0)

    async def scene(service: Service) -> None:
        service.shell.engine.phase = RunPhase.AGGREGATION
        service.stop()
        assert 1.0 <= await seconds_of(service._run()) < 5.0

    play(hub, monkeypatch, scene)
    assert caplog.text.count("continues at the next start") == 1


def test_told_twice_it_leaves_at_once(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(service: Service) -> None:
        service.shell.engine.phase = RunPhase.AGGREGATION
        service.stop()
        service.stop()
        assert await seconds_of(service._run()) < 1.0

    play(hub, monkeypatch, scene)
    assert caplog.text.count("continues at the next start") == 1


def test_between_aggregations_it_leaves_at_once_and_says_nothing(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(service: Service) -> None:
        service.stop()
        assert await seconds_of(service._run()) < 1.0

    play(hub, monkeypatch, scene)
    assert "aggregation" not in caplog.text


def test_nothing_new_begins_while_the_last_witnesses_are_waited_for(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum that was made meanwhile would be left unchecked, under a manifest that may be replaced."""
    stopped: list[bool] = []

    async def witness_end(service: Service) -> None:
        stopped.append(service.shell.engine._stopping)

    async def scene(service: Service) -> None:
        monkeypatch.setattr(Service, "_witness_end", witness_end)
        service.stop()
        await seconds_of(service._run())

    play(hub, monkeypatch, scene)
    assert stopped == [True]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/data/secret"), "OSError: no space left on device"),
        (OSError("secret"), "OSError"),
        (ConfigError("cannot listen", where="secret"), "config"),
        (CodecError("secret"), "codec"),
        (KeyError("secret"), "KeyError"),
    ],
)
def test_the_reason_for_the_log_is_coarse(error: Exception, reason: str) -> None:
    assert module.coarse(error) == reason


# What a listed site may keep open.


def test_a_site_that_never_reads_loses_its_stream(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_queue, "MOST_QUEUED", 5)

    async def scene(service: Service) -> None:
        deaf, other = Line(service, SITE), Line(service, OTHER)
        monkeypatch.setattr(deaf, "write", lambda _: asyncio.Event().wait())
        streams = [deaf.open(), other.open()]
        await settled()
        stream = service.shell.streams[SITE]
        for number in range(20):
            stream.put([Ping(number=number)])
        await settled()
        assert streams[0].done() and deaf.aborted is grpc.StatusCode.INVALID_ARGUMENT
        assert set(service.shell.streams) == {OTHER}
        streams[1].cancel()
        with suppress(asyncio.CancelledError):
            await streams[1]
        with suppress(grpc.aio.AbortError):
            await streams[0]

    play(hub, monkeypatch, scene)


def test_a_stream_that_never_begins_is_closed(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OPEN_SECONDS", 0.05)

    async def scene(service: Service) -> None:
        line = Line(service, SITE)
        with pytest.raises(grpc.aio.AbortError):
            await asyncio.wait_for(service.converse(line._first(), line), 5)
        assert line.aborted is grpc.StatusCode.INVALID_ARGUMENT and not service.shell.streams

    play(hub, monkeypatch, scene)
