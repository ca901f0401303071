"""What the client tells people: why there is no connection, and in the log why the agent has ended."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lazaret.checks import CheckVerdict
from lazaret.errors import BudgetExhausted
from protos.tls import TIME_KEY
from site_agent import client as clients
from site_agent.checks.run import compared
from site_agent.client import Client, serve
from site_agent.config import CoordinatorTable
from tests.support.consortium_world import World
from tests.support.proxies import listening
from tests.support.site_world import SiteWorld

SITE = "linz"


@pytest.fixture
def world(tmp_path: Path) -> SiteWorld:
    return SiteWorld(tmp_path / "ours")


def table(port: int) -> CoordinatorTable:
    return CoordinatorTable(address=f"127.0.0.1:{port}", least_wait=0.1, most_wait=0.1)


# The end of the log is offered to witnesses, also if an upload is before it in the queue.


@pytest.mark.parametrize("expected", [True, False], ids=["", "twin"])
def test_the_last_checkpoint_waits_for_an_upload_before_it(
    world: SiteWorld, monkeypatch: pytest.MonkeyPatch, expected: bool
) -> None:
    """While the queue stands still nothing is settled, and the agent has the patience that it has for witnesses."""
    monkeypatch.setattr(clients, "WITNESS_SECONDS", 1.0)
    monkeypatch.setattr(clients, "LINGER_SECONDS", 0.01)
    agent = world.start(SITE)
    if not expected:
        monkeypatch.setattr(agent.witnessing, "expect_last", lambda: None)

    async def stop() -> float:
        client = Client(agent, table(1))
        client._call = object()
        began = asyncio.get_running_loop().time()
        await client._last_head()
        assert client._events.qsize() == 1, "nobody has taken it out of the queue"
        return asyncio.get_running_loop().time() - began

    assert (asyncio.run(stop()) >= 1.0) is expected
    list(agent.last_head())
    assert agent.witnessing._last == agent.log.size, "offered: what was expected is known"


# Clocks that are apart.


class Answered:
    """A stream on which the coordinator has said its time."""

    def __init__(self, time_ms: int) -> None:
        self._time_ms = time_ms

    async def initial_metadata(self) -> tuple[tuple[str, str], ...]:
        return ((TIME_KEY, str(self._time_ms)),)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(299, None), (-299, None), (301, "301 s ahead of the coordinator's"), (-301, "301 s behind the coordinator's")],
)
def test_clocks_may_be_five_minutes_apart_and_no_more(world: SiteWorld, seconds: int, words: str | None) -> None:
    agent = world.start(SITE)

    async def look() -> str | None:
        return await Client(agent, table(1))._clocks_apart(Answered(agent.clock.now_ms() - 1000 * seconds))

    apart = asyncio.run(look())
    assert apart is None if words is None else words in (apart or "")


@pytest.mark.parametrize("way", [1, -1])
def test_check_has_a_problem_with_a_clock_that_the_agent_would_not_work_with(way: int) -> None:
    now = 1_800_000_000_000
    found = [compared(now + way * 1000 * seconds, now).verdict for seconds in (119, 120, 300, 301)]
    assert found == [CheckVerdict.OK, CheckVerdict.WARNING, CheckVerdict.WARNING, CheckVerdict.PROBLEM]


# Why an agent has ended.


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/data/Huber_Maria"), "OSError: no space left on device"),
        (PermissionError(errno.EACCES, "Huber_Maria"), "PermissionError: permission denied"),
        (OSError("Huber_Maria"), "OSError"),
        (MemoryError("Huber_Maria"), "MemoryError"),
        (BudgetExhausted("Huber_Maria"), "budget"),
    ],
)
def test_the_log_ends_with_the_coarse_reason(
    world: SiteWorld, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    async def run(_: Client) -> None:
        raise error

    monkeypatch.setattr(Client, "run", run)
    agent = world.start(SITE)
    with pytest.raises(type(error)):
        asyncio.run(serve(agent, table(1), until=lambda stopped: None))
    assert [entry["reason"] for entry in world.entries(SITE, "agent.stop")] == [reason]


def test_an_agent_that_was_told_to_stop_says_so(world: SiteWorld) -> None:
    agent = world.start(SITE)
    asyncio.run(serve(agent, table(1), until=lambda stopped: stopped.set()))
    assert [entry["reason"] for entry in world.entries(SITE, "agent.stop")] == ["stopped by a signal"]


# Why there is no connection.


@contextmanager
def mute() -> Iterator[int]:
    """A port that takes connections and never answers: its queue is not even read."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield int(taken.getsockname()[1])


def said(world: SiteWorld, port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> str:
    """The first line about a connection that does not come to be."""
    monkeypatch.setattr(clients, "CONNECT_SECONDS", 1.0)
    agent = world.start(SITE)
    own = lambda self, served: clients.tls.channel_credentials(self.agent.identity)  # noqa: E731
    monkeypatch.setattr(Client, "_credentials", own)
    caplog.set_level(logging.INFO, logger="site-agent")

    async def scenario() -> None:
        client = Client(agent, table(port))
        running = asyncio.create_task(client.run())
        while not caplog.messages:
            await asyncio.sleep(0.05)
        client.stopped.set()
        await running

    asyncio.run(asyncio.wait_for(scenario(), 20))
    return caplog.messages[0]


def test_a_coordinator_of_another_federation_is_told_from_no_network(
    world: SiteWorld, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = World.make(tmp_path / "theirs").identity("hub")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(other.tls_path, other.tls_key_path())
    context.set_alpn_protocols(["h2"])
    with listening(context) as port:
        line = said(world, port, caplog, monkeypatch)
    assert "something answers, but TLS with it fails" in line and "another federation" in line
    assert "`site-agent check`" in line and f"trying 127.0.0.1:{port} again" in line


def test_who_cannot_reach_the_coordinator_is_told_what_to_do(
    world: SiteWorld, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = said(world, 1, caplog, monkeypatch)
    why = "the coordinator cannot be reached (`site-agent check` finds out why)"
    assert line.startswith(f"{why}; trying 127.0.0.1:1 again")


def test_who_gets_no_answer_is_told_the_same(
    world: SiteWorld, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mute() as port:
        assert "cannot be reached (`site-agent check`" in said(world, port, caplog, monkeypatch)


def test_the_wait_doubles_as_long_as_nobody_answers(
    world: SiteWorld, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a dial takes longer to give up than a connection must last to count as good."""
    monkeypatch.setattr(clients, "CONNECT_SECONDS", 0.1)
    monkeypatch.setattr(clients.random, "uniform", lambda _low, high: high)
    caplog.set_level(logging.INFO, logger=clients.log.name)

    async def run(port: int) -> None:
        client = Client(world.start(SITE), CoordinatorTable(address=f"127.0.0.1:{port}", least_wait=0.1, most_wait=0.5))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(client._stay_connected(), 8.0)

    with mute() as port:
        asyncio.run(run(port))
    waits = [float(text.rpartition(" in ")[2].removesuffix(" s")) for text in caplog.messages if " again in " in text]
    assert waits[:3] == [0.1, 0.2, 0.4]
