"""The agent's client over real gRPC on loopback: through a proxy, to a coordinator that is late, breaks or says no."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from lazaret.errors import ToolkitError
from protos import tls
from protos.parse import FROM_COORDINATOR, FROM_SITE, Parcel
from security.clock import SystemClock
from security.rng import SystemRandomness
from security.secagg import relay
from site_agent.assembly import assemble
from site_agent.client import Client
from site_agent.config import CoordinatorTable, SiteConfig
from site_agent.run import Agent
from tests.integration.test_federation_tls import federation
from tests.support.consortium_world import World
from tests.support.site_world import Counting, write_config
from tests.support.stand_in import standing_in

import grpc  # isort: skip

SITE = "graz"
Talk = Callable[["Coordinator", AsyncIterator[bytes], Any], Awaitable[None]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = federation(tmp_path_factory.mktemp("client"))
    for member in ("hub", SITE):
        world.identity(member).install_manifest(world.published(), now_ms=world.now)
    return world


@pytest.fixture
def agent(world: World, tmp_path: Path) -> Agent:
    model = world.authority.folder / "initial.safetensors"
    path = write_config(tmp_path / "agent", world.identity(SITE).folder, model)
    config = SiteConfig.read(path)
    learner = Counting(1)
    return assemble(config, clock=SystemClock(), rng=SystemRandomness(), make_learner=standing_in(learner, None))


async def greet(coordinator: Coordinator, requests: AsyncIterator[bytes], context: Any) -> None:
    """Welcome, then a ping that must be answered; the stream stays open."""
    async for data in requests:
        message = FROM_SITE.decode(data).message
        coordinator.heard.append(message)
        if isinstance(message, relay.Open):
            manifest = coordinator.manifest
            welcome = relay.Welcome(protocol=1, manifest_version=manifest.version, manifest_hash=manifest.digest)
            await coordinator.say(context, welcome, 1)
            await coordinator.say(context, relay.Ping(number=5), 2)
        if isinstance(message, relay.Pong):
            coordinator.done.set()


class Coordinator:
    """A server that talks as it is told."""

    def __init__(self, world: World, talk: Talk) -> None:
        self.world, self.talk = world, talk
        self.manifest = world.authority.latest(now_ms=world.now)
        self.heard: list[Any] = []
        self.streams = 0
        self.done = asyncio.Event()
        self.server = grpc.aio.server(options=tls.OPTIONS)
        service, _, method = tls.METHOD.strip("/").partition("/")
        handler = grpc.stream_stream_rpc_method_handler(self._converse)
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))

    async def _converse(self, requests: AsyncIterator[bytes], context: Any) -> None:
        self.streams += 1
        await self.talk(self, requests, context)

    async def start(self, port: int = 0) -> int:
        bound = self.server.add_secure_port(f"127.0.0.1:{port}", tls.server_credentials(self.world.identity("hub")))
        await self.server.start()
        return int(bound)

    async def say(self, context: Any, message: Any, sequence: int) -> None:
        line = relay.HeadSignature(name="hub.lesions/audit", key_id=bytes(4), value=bytes(64))
        head = relay.SignedHead(origin="hub.lesions/audit", size=1, root=bytes(32), signatures=(line,))
        await context.write(FROM_COORDINATOR.encode(Parcel(message=message, sequence=sequence, log_head=head)))


def table(port: int, **more: Any) -> CoordinatorTable:
    return CoordinatorTable(address=f"localhost:{port}", least_wait=0.1, most_wait=0.2, **more)


async def until(client: Client, event: asyncio.Event, seconds: float = 30) -> None:
    """Run the client until something has happened, then stop it in order."""
    running = asyncio.create_task(client.run())
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait([running, waiting], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    client.stopped.set()
    await running


async def two_hours_behind(coordinator: Coordinator, requests: AsyncIterator[bytes], context: Any) -> None:
    await context.send_initial_metadata(((tls.TIME_KEY, str(SystemClock().now_ms() - 7_200_000)),))
    if coordinator.streams > 2:
        coordinator.done.set()
    await greet(coordinator, requests, context)


def test_an_agent_whose_clock_is_wrong_does_not_take_part(
    world: World, agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so, tries again, and has said nothing but Open: no Hello, no training, no cosignature."""

    async def scenario() -> Coordinator:
        coordinator = Coordinator(world, two_hours_behind)
        port = await coordinator.start()
        await until(Client(agent, table(port)), coordinator.done)
        await coordinator.server.stop(0)
        return coordinator

    coordinator = asyncio.run(scenario())
    assert {type(message) for message in coordinator.heard} == {relay.Open}
    assert "this machine's clock is 7200 s ahead of the coordinator's" in caplog.text


class SetClock(SystemClock):
    """A clock that somebody sets while the agent runs."""

    ahead_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms


def test_a_clock_that_is_set_while_a_stream_stands_is_noticed_with_the_next_message(
    world: World, agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    clock = agent.clock = SetClock()

    async def ping_twice(coordinator: Coordinator, requests: AsyncIterator[bytes], context: Any) -> None:
        await context.send_initial_metadata(((tls.TIME_KEY, str(SystemClock().now_ms())),))
        if coordinator.streams > 2:
            coordinator.done.set()
        manifest = coordinator.manifest
        async for data in requests:
            coordinator.heard.append(FROM_SITE.decode(data).message)
            match coordinator.heard[-1]:
                case relay.Open():
                    welcome = relay.Welcome(
                        protocol=1, manifest_version=manifest.version, manifest_hash=manifest.digest
                    )
                    await coordinator.say(context, welcome, 1)
                    await coordinator.say(context, relay.Ping(number=5), 2)
                case relay.Pong(number=5):
                    clock.ahead_ms = 7_200_000
                    await coordinator.say(context, relay.Ping(number=6), 3)
                case relay.Pong():
                    coordinator.done.set()

    async def scenario() -> Coordinator:
        coordinator = Coordinator(world, ping_twice)
        port = await coordinator.start()
        await until(Client(agent, table(port)), coordinator.done)
        await coordinator.server.stop(0)
        return coordinator

    coordinator = asyncio.run(scenario())
    assert [message.number for message in coordinator.heard if isinstance(message, relay.Pong)] == [5]
    assert "this machine's clock was moved by 7200 s" in caplog.text
    assert "s ahead of the coordinator's: set it" in caplog.text, "it comes back when the clock is right"


def test_open_welcome_hello_ping(world: World, agent: Agent) -> None:
    async def scenario() -> Coordinator:
        coordinator = Coordinator(world, greet)
        port = await coordinator.start()
        await until(Client(agent, table(port)), coordinator.done)
        await coordinator.server.stop(0)
        return coordinator

    coordinator = asyncio.run(scenario())
    assert [type(message).__name__ for message in coordinator.heard] == ["Open", "Hello", "Pong"]
    assert coordinator.heard[0].session == 1


def test_a_coordinator_that_comes_late_or_dies_is_dialled_again(world: World, agent: Agent) -> None:
    async def scenario() -> list[Any]:
        first = Coordinator(world, greet)
        port = await first.start()
        await first.server.stop(0)
        client = Client(agent, table(port))
        running = asyncio.create_task(client.run())
        await asyncio.sleep(0.5)
        heard = []
        for _ in range(2):
            coordinator = Coordinator(world, greet)
            await coordinator.start(port)
            await asyncio.wait_for(coordinator.done.wait(), 30)
            heard.append(coordinator.heard[0])
            await coordinator.server.stop(0)
        client.stopped.set()
        await running
        return heard

    heard = asyncio.run(scenario())
    assert [message.session for message in heard] == sorted({message.session for message in heard})


def test_through_a_connect_proxy_and_never_around_it(world: World, agent: Agent) -> None:
    """Nobody answers at the address itself: there is no way but the proxy's, for the look before and for the stream."""

    async def scenario() -> tuple[Coordinator, list[str]]:
        coordinator = Coordinator(world, greet)
        port = await coordinator.start()
        asked: list[str] = []

        async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.close()

        async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            request = (await reader.readuntil(b"\r\n\r\n")).decode()
            asked.append(request.splitlines()[0])
            out_reader, out_writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await asyncio.gather(pipe(reader, out_writer), pipe(out_reader, writer), return_exceptions=True)

        server = await asyncio.start_server(proxy, "127.0.0.1", 0)
        proxy_port = server.sockets[0].getsockname()[1]
        client = Client(agent, table(9, proxy=f"http://127.0.0.1:{proxy_port}"))
        await until(client, coordinator.done)
        await coordinator.server.stop(0)
        server.close()
        return coordinator, asked

    coordinator, asked = asyncio.run(scenario())
    assert coordinator.done.is_set()
    assert len(asked) >= 2 and {line.split()[1] for line in asked} == {"localhost:9"}


def test_a_proxy_in_the_environment_is_not_obeyed(world: World, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """What leaves, leaves by the configured way; a variable of some shell does not change it."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def scenario() -> Coordinator:
        coordinator = Coordinator(world, greet)
        port = await coordinator.start()
        await until(Client(agent, table(port)), coordinator.done)
        await coordinator.server.stop(0)
        return coordinator

    assert asyncio.run(scenario()).done.is_set()


async def turn_away_at_first(coordinator: Coordinator, requests: AsyncIterator[bytes], context: Any) -> None:
    if coordinator.streams < 3:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "certificate is not accepted here")
    await greet(coordinator, requests, context)


def test_a_site_that_is_turned_away_waits_for_the_operator_and_says_why(
    world: World, agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    """A new hospital may be started before the operator has the manifest that lists it."""

    async def scenario() -> Coordinator:
        coordinator = Coordinator(world, turn_away_at_first)
        port = await coordinator.start()
        await until(Client(agent, table(port)), coordinator.done)
        await coordinator.server.stop(0)
        return coordinator

    assert asyncio.run(scenario()).done.is_set()
    assert "refused by the coordinator: certificate is not accepted here" in caplog.text


async def say_goodbye(coordinator: Coordinator, requests: AsyncIterator[bytes], context: Any) -> None:
    await anext(requests)
    code = relay.CloseReason.STOPPING if coordinator.streams == 1 else relay.CloseReason.REPLACED
    await coordinator.say(context, relay.Goodbye(code=code), 1)
    await asyncio.sleep(5)


def test_goodbye_for_now_is_followed_by_another_try_and_goodbye_for_good_is_not(world: World, agent: Agent) -> None:
    async def scenario() -> int:
        coordinator = Coordinator(world, say_goodbye)
        port = await coordinator.start()
        try:
            with pytest.raises(ToolkitError, match="another process has connected as this site"):
                await asyncio.wait_for(Client(agent, table(port)).run(), 30)
        finally:
            await coordinator.server.stop(0)
        return coordinator.streams

    assert asyncio.run(scenario()) == 2


async def babble(coordinator: Coordinator, requests: AsyncIterator[bytes], context: Any) -> None:
    await anext(requests)
    if coordinator.streams == 1:
        await context.write(b"\x00 not a message")
    else:
        coordinator.done.set()
    await asyncio.sleep(5)  # the stream stays open: whoever ends it is the agent


def test_rubbish_breaks_the_stream_and_not_the_agent(world: World, agent: Agent) -> None:
    async def scenario() -> Coordinator:
        coordinator = Coordinator(world, babble)
        port = await coordinator.start()
        await until(Client(agent, table(port)), coordinator.done)
        await coordinator.server.stop(0)
        return coordinator

    assert asyncio.run(scenario()).streams == 2


def test_work_that_fails_in_the_training_thread_ends_the_agent_with_its_error(world: World, agent: Agent) -> None:
    def broken() -> Any:
        raise MemoryError("no memory for this model")

    async def scenario() -> None:
        coordinator = Coordinator(world, greet)
        port = await coordinator.start()
        client = Client(agent, table(port))
        agent.submit(broken)
        try:
            await asyncio.wait_for(client.run(), 30)
        finally:
            await coordinator.server.stop(0)

    with pytest.raises(MemoryError):
        asyncio.run(scenario())
