"""Bytes that leave past the log: the kernel's count beside ours, on real connections and at every kind of reading."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest

from lazaret import kernel_bytes
from lazaret.kernel_bytes import Flow, Flows, Meter, tcp_flows
from security.audit import egress_ledger
from security.audit.agreement import keys_for
from security.audit.egress_ledger import UNSEEN_PER_CONNECTION, EgressLedger
from security.audit.findings import Severity
from security.audit.verify import verify
from security.clock import SystemClock
from security.log import events as ev
from security.log.egress import KernelByteLog
from security.rng import SystemRandomness
from site_agent.assembly import assemble
from site_agent.client import meter_for, serve
from site_agent.config import SiteConfig
from site_agent.run import Agent
from tests.integration.test_federation_tls import federation as tls_federation
from tests.integration.test_site_client import Coordinator, greet, table
from tests.support import own_namespace
from tests.support.audit_attacks import Lonely
from tests.support.audit_messages import PROTOTYPES, VECTOR, Site
from tests.support.consortium_world import World
from tests.support.site_world import Counting, write_config
from tests.support.stand_in import standing_in


@pytest.fixture
def site(lonely: Lonely) -> Site:
    return Site(lonely)


def test_honest_readings_agree(lonely: Lonely, site: Site) -> None:
    site.round()
    site.read()
    site.log.append(ev.AgentStop(reason="end"))
    lonely.log.close()
    restarted = Site(lonely)
    restarted.log = lonely.reopen()  # a new boot counts from zero
    restarted.number = 100
    restarted.round()
    restarted.number -= 100
    restarted.read()
    assert lonely.codes() == set()


def test_prototypes_beside_a_round_are_found(lonely: Lonely, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.round()
    site.read(smuggled=PROTOTYPES)
    assert lonely.codes() == {"UnloggedTraffic"}
    monkeypatch.setattr(egress_ledger, "FRAMING_OUT", 1.0)
    assert lonely.codes() == set(), "twin: any overhead is believed"


def test_what_an_earlier_boot_did_not_send_is_no_cover_for_the_next(lonely: Lonely, site: Site) -> None:
    """A kill leaves a logged vector unsent; its sixteen megabytes must not excuse anything afterwards."""
    site.send("Open")
    site.send("UploadFrame", receipt=False, frames=-(-VECTOR // (256 * 1024)))
    lonely.log._writer.close()
    after = Site(lonely)
    after.log = lonely.reopen()
    after.number = 100
    after.send("Open")
    after.number -= 100
    after.read(smuggled=PROTOTYPES)
    assert lonely.codes() == {"UnloggedTraffic", "CounterCoverage"}


def test_a_counter_that_missed_the_upload_counts_something_else(
    lonely: Lonely, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.round()
    site.read(lost=VECTOR // 2)
    assert lonely.codes() == {"UnloggedTraffic"}
    monkeypatch.setattr(egress_ledger, "UNSEEN_PER_CONNECTION", VECTOR)
    assert lonely.codes() == set(), "twin: any loss is believed"


def test_unsent_and_unseen_bytes_are_no_finding(lonely: Lonely, site: Site) -> None:
    """A reading in mid-upload is behind the log, and the end of a broken connection is not counted."""
    site.send("Open")
    site.send("UploadFrame", receipt=False, frames=-(-VECTOR // (256 * 1024)))
    site.read(lost=VECTOR)
    site.send("Open")
    for _ in range(100):
        site.send("Shares")
    site.read(lost=VECTOR + UNSEEN_PER_CONNECTION // 2)
    assert lonely.codes() == set()


def test_messages_without_any_reading_cannot_be_decided(lonely: Lonely, site: Site) -> None:
    site.round()
    lonely.log.checkpoint()
    found = {finding.code: finding for finding in verify(lonely.folder, lonely.keys).findings}
    assert found["NoNetworkCounter"].severity is Severity.UNDECIDED


# The meter, and real connections.


def test_meter_adds_up_connections_that_come_and_go() -> None:
    looks = iter([{1: Flow(10, 5)}, {1: Flow(30, 5), 2: Flow(7, 0)}, {2: Flow(8, 1)}, None, {3: Flow(1, 1)}])
    meter = Meter(lambda: next(looks))
    for _ in range(3):
        meter.poll()
    assert meter.sent == 38
    taken = meter.take()
    assert (taken.flow, taken.opened) == (Flow(38, 6), 2)
    taken = meter.take()
    assert (taken.flow, taken.opened) == (Flow(1, 1), 1)


def test_kernel_counts_every_tcp_connection_of_the_process() -> None:
    others = {*(tcp_flows() or {})}  # what an earlier test of this process has not closed yet

    def ours() -> Flows:
        return {cookie: flow for cookie, flow in (tcp_flows() or {}).items() if cookie not in others}

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        meter = Meter(ours)
        meter.poll()
        meter.take()
        accepted, _ = server.accept()
        with accepted:
            client.sendall(bytes(50_000))
            got = 0
            while got < 50_000:
                got += len(accepted.recv(65_536))
            taken = meter.take()
    assert taken.flow.out >= 50_000 and taken.flow.into >= 50_000
    assert taken.opened == 1  # the accepted end; the other one was there before
    assert client.fileno() == -1 and not ours()


def test_what_stays_on_the_machine_does_not_count_unless_it_goes_to_the_coordinator() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            port = server.getsockname()[1]
            cookies = [set(tcp_flows(ports) or {}) for ports in ((), (port,), None)]
    assert not cookies[0] & cookies[1] and len(cookies[1]) == len(cookies[0]) + 1  # the end that dialled
    assert len(cookies[2]) >= len(cookies[1]) + 1 and client.fileno() == -1


@pytest.mark.parametrize(
    ("here", "there", "stays"),
    [
        ("10.0.0.5", "10.0.0.9", False),
        ("10.0.0.5", "10.0.0.5", True),
        ("127.0.0.1", "127.0.0.2", True),
        ("::ffff:127.0.0.1", "::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.5", "::ffff:8.8.8.8", False),
        ("fe80::1%eth0", "fe80::2%eth0", False),
    ],
)
def test_which_connections_stay(here: str, there: str, stays: bool) -> None:
    assert kernel_bytes._stays((here, 1), (there, 2)) is stays


def test_what_leaves_this_process_is_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.sendall(bytes(1000))
        meter = meter_for(table(server.getsockname()[1]))
        meter.poll()
        assert meter.sent >= 1000


def test_quiet_line_waits_for_the_next_reading(lonely: Lonely) -> None:
    sent = iter([0, 5000, 5000, 5000, 5100, 5101, 5101])
    ledger = KernelByteLog(lonely.log, Meter(lambda: {1: Flow(next(sent), 0)}))
    before = lonely.log.size
    sizes = []
    for seconds in (0.0, 29.0, 30.0, 60.0):  # nothing sent; too soon; due; not worth it
        ledger.tick(seconds)
        sizes.append(lonely.log.size - before)
    ledger.close()
    assert [*sizes, lonely.log.size - before] == [0, 0, 1, 1, 2]


def test_what_a_round_sent_is_read_when_it_ends(lonely: Lonely) -> None:
    """A card that is exported beside the running agent has a count, however short the run was."""
    sent = chain([0], repeat(5000))
    ledger = KernelByteLog(lonely.log, Meter(lambda: {1: Flow(next(sent), 0)}))
    before = lonely.log.size
    sizes = []
    for seconds, result in ((0.0, 0), (1.0, 0), (2.0, 1), (3.0, 1)):
        ledger.tick(seconds, result)
        sizes.append(lonely.log.size - before)
    assert sizes == [0, 0, 1, 1]


# A network namespace of the service's own: what a child sends, and what is not TCP.


def _in_own_namespace(folder: Path, attack: str, coverage: str) -> dict[str, Any]:
    here = Path(__file__).parents[3]
    script = [sys.executable, "-m", own_namespace.__name__, str(folder), attack, coverage]
    done = subprocess.run([*own_namespace.START, *script], cwd=here, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("attack", own_namespace.ATTACKS)
def test_what_a_child_sends_is_in_the_count_of_the_namespace(tmp_path: Path, attack: str) -> None:
    found = _in_own_namespace(tmp_path / "own", attack, "own")
    assert found["coverage"] == ["network namespace"] and found["sent"] == found["logged"] > 10_000_000
    assert found["codes"] == ([] if attack == "nothing" else ["UnloggedTraffic"]), found


def test_what_a_child_sends_is_not_in_the_count_of_the_process(tmp_path: Path) -> None:
    """The twin: only the process is counted, and the same datagrams go unseen; the log says what it covers."""
    found = _in_own_namespace(tmp_path / "process", "datagrams of a child", "process")
    assert found["coverage"] == ["process"] and found["codes"] == []


def test_the_machine_itself_is_no_namespace_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert kernel_bytes.is_own_namespace() is False
    monkeypatch.setattr(kernel_bytes, "_FIRST_ONLY", Path("/proc/sys/net/core/absent"))
    assert kernel_bytes.is_own_namespace() is True
    monkeypatch.setattr(os, "getppid", lambda: 4711)  # somebody tries it in a container, from a shell
    assert kernel_bytes.is_own_namespace() is False


def test_bytes_beside_the_connections_are_found(lonely: Lonely, site: Site) -> None:
    site.round()
    site.read(beside=2000)
    assert lonely.codes() == set()
    site.read(lost=site.sent, beside=PROTOTYPES)
    assert lonely.codes() == {"UnloggedTraffic"}


def test_a_count_of_the_process_alone_is_noted(lonely: Lonely, site: Site) -> None:
    site.round()
    site.read()
    assert "ProcessCount" in {finding.code for finding in verify(lonely.folder, lonely.keys).findings}


def test_a_count_that_becomes_narrower_cannot_be_decided(
    lonely: Lonely, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the namespace is counted; then, for what was to be hidden, only the process."""
    site.round()
    site.read(beside=0)
    site.round()
    site.read(lost=site.sent // 2)
    assert lonely.codes() == {"CounterCoverage"}
    monkeypatch.setattr(
        EgressLedger, "_cover", lambda ledger, coverage, _seq: ledger.covered.update({coverage: 1 << 40})
    )
    assert lonely.codes() == set(), "twin"


def test_most_of_what_left_must_be_in_the_widest_count(lonely: Lonely, site: Site) -> None:
    site.send("Open")
    site.read(beside=0)
    site.log.append(ev.AgentStop(reason="end"))
    lonely.log.close()
    again = Site(lonely)
    again.log = lonely.reopen()
    again.number = 100
    again.round()
    again.number -= 100
    again.read()
    assert lonely.codes() == {"CounterCoverage"}


@pytest.mark.parametrize(("one_meter", "codes"), [(True, set()), (False, {"UnloggedTraffic"})])
def test_a_connection_that_outlives_its_run_is_not_counted_again(
    lonely: Lonely, site: Site, one_meter: bool, codes: set[str]
) -> None:
    """gRPC closes a connection some time after it was told to; by then the agent of the next run may count."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        meter = Meter(partial(tcp_flows, {port}))
        site.send("Open")
        site.send("Shares")
        with socket.create_connection(("127.0.0.1", port)) as stream:
            stream.sendall(bytes(site.sent + 3000))
            KernelByteLog(lonely.log, meter).close()
            site.log.append(ev.AgentStop(reason="next run"))
            lonely.log.close()
            following = lonely.reopen()
            # The twin begins to count anew, at a connection that has carried much.
            KernelByteLog(following, meter if one_meter else Meter(partial(tcp_flows, {port}))).close()
            again = Site(lonely)
            again.log, again.number = following, 100
            again.send("Open")
            stream.sendall(bytes(again.sent))
            KernelByteLog(following, meter).close()
    assert lonely.codes() == codes


# A real agent, and something in its process that talks to a stranger.


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = tls_federation(tmp_path_factory.mktemp("network"))
    for member in ("hub", "graz"):
        world.identity(member).install_manifest(world.published(), now_ms=world.now)
    return world


def _agent(world: World, folder: Path) -> Agent:
    path = write_config(folder, world.identity("graz").folder, world.authority.folder / "initial.safetensors")
    learner = Counting(1)
    return assemble(
        SiteConfig.read(path),
        clock=SystemClock(),
        rng=SystemRandomness(),
        make_learner=standing_in(learner, None),
    )


async def _talk(world: World, agent: Agent, smuggled: int) -> None:
    """Agent and coordinator talk as ever; meanwhile `smuggled` bytes go to a stranger.

    The stranger lives in this process too, so the meter is told that its port is on another machine.
    """
    coordinator = Coordinator(world, greet)
    port = await coordinator.start()
    stranger = await asyncio.start_server(_swallow, "127.0.0.1", 0)
    away = stranger.sockets[0].getsockname()[1]
    stop: list[asyncio.Event] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_bytes, "_stays", lambda here, there: there[1] != away)
        running = asyncio.create_task(serve(agent, table(port), until=stop.append))
        await asyncio.wait_for(coordinator.done.wait(), 30)
        if smuggled:
            _, writer = await asyncio.open_connection("127.0.0.1", away)
            writer.write(bytes(smuggled))
            await writer.drain()
            await asyncio.sleep(0.3)
            writer.close()
        await asyncio.sleep(0.3)
        stop[0].set()
        await running
    await coordinator.server.stop(0)
    stranger.close()


async def _swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(65_536):
        pass
    writer.close()


@pytest.mark.parametrize(("smuggled", "codes"), [(0, set()), (PROTOTYPES, {"UnloggedTraffic"})])
def test_real_agent_with_something_that_phones_home(
    world: World, tmp_path: Path, smuggled: int, codes: set[str]
) -> None:
    agent = _agent(world, tmp_path / "agent")
    asyncio.run(_talk(world, agent, smuggled))
    result = verify(agent.state_dir.log, keys_for(agent.state_dir.log, None))
    assert {finding.code for finding in result.findings} & {"UnloggedTraffic", "NoNetworkCounter"} == codes
    assert result.ledger.readings >= 1
    assert result.ledger.counted >= result.ledger.total + smuggled
