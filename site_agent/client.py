"""gRPC: one outbound stream, opened again whenever it breaks. Bytes in, bytes out; the agent does the rest.

All events of a site come through one queue: bytes from the coordinator, finished work of the training thread, the
clock. So the agent never runs twice at the same time, and effects keep their order.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, Final
from urllib.parse import urlsplit

from lazaret.control import BY_SIGNAL, NEXT_RUN
from lazaret.kernel_bytes import Meter, meter, tcp_flows
from protos import tls  # before grpc: it switches TLS 1.2 off
from site_agent.config import CoordinatorTable

import grpc  # isort: skip
from cryptography import x509

from lazaret.errors import CertificateError, CertificateUntrusted, ConfigError, KeyUnavailable, ToolkitError, coarse
from security.identity import pki
from security.identity.peers import check_coordinator_certificate
from security.identity.tls_probe import Destination, NoTls, ask
from security.log.egress import KernelByteLog
from security.log.events import AgentStop
from security.log.machine import SKEW_MS
from security.log.writer import AuditLog
from site_agent.effects import Effects
from site_agent.local_work import Finish, Job
from site_agent.run import Agent, Left, RunEnds
from site_agent.trainer.ranks import RankPlace

# The kernel's byte count: what it covers.

HTTP_PORT: Final = 80  # of a proxy that is given without one


def meter_for(table: CoordinatorTable) -> Meter:
    """Counts what leaves this process, what goes to the coordinator wherever that is, and all that leaves the network
    namespace if it is this service's own. Where several machines train together, their traffic would hide everything.
    """
    dialled = urlsplit(table.proxy or f"//{table.address}")
    return meter(partial(tcp_flows, {dialled.port or HTTP_PORT}), alone=RankPlace.read() is None)


log = logging.getLogger("site-agent")
TICK_SECONDS: Final = 0.1
HEARTBEAT_SECONDS: Final = 30.0
CONNECT_SECONDS: Final = 20.0
MOST_APART_MS: Final = SKEW_MS  # what auditors allow two logs to differ by
SAY_AGAIN_SECONDS: Final = 600.0
ASK_SECONDS: Final = 1.0
WITNESS_SECONDS: Final = 3.0
LINGER_SECONDS: Final = 0.5
_OTHER_END: Final = (
    "something answers, but TLS with it fails: another federation's coordinator, a certificate that has expired, or a "
    "proxy that inspects TLS (`site-agent check` finds out which)"
)
_UNREACHABLE: Final = "the coordinator cannot be reached (`site-agent check` finds out why)"
_TURNED_AWAY: Final = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)

Event = Callable[[], Iterator[bytes]]


class Client:
    """A site on the network.

    :param counted: of a process that has had runs before: a connection of the last one may still be open, and what it
        has carried is counted already.
    """

    def __init__(self, agent: Agent, table: CoordinatorTable, *, counted: Meter | None = None) -> None:
        self.agent = agent
        self.table = table
        self.traffic = KernelByteLog(agent.log, counted or meter_for(table))
        self.stopped = asyncio.Event()
        self.watch: Callable[[], None] = lambda: None
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._call: Any = None
        self._compared: Any = None  # the stream whose clock was looked at
        self._boot = 0  # this machine's time when its monotonic clock was 0, as it was then
        self._connected = math.inf  # since when, on the loop's clock
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()  # None: no more
        self._loop = asyncio.get_running_loop()
        agent.submit = self._jobs.put

    # Work and time.

    def _work(self) -> None:
        """The training thread: one job after the other. What a job returns is handled in the loop's thread."""
        while (job := self._jobs.get()) is not None:
            try:
                finish = job()
            except Exception as error:  # not to be lost in a thread: it ends the agent
                finish = _raising(error)
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(self._events.put_nowait, self._finishing(finish))

    def _finishing(self, finish: Finish) -> Event:
        return lambda: self.agent.run(finish())

    async def _clock(self) -> None:
        heartbeat = self._loop.time() + HEARTBEAT_SECONDS
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._events.put_nowait(self.agent.ticked)
            self.traffic.tick(self._loop.time(), self.agent.newest)
            self.watch()
            if self._loop.time() >= heartbeat:
                heartbeat = self._loop.time() + HEARTBEAT_SECONDS
                self.agent.heartbeat()

    # One event after the other.

    async def _handle(self) -> None:
        """Carry events out, for ever. What is to be sent goes out in order; a broken stream only drops it."""
        while True:
            event = await self._events.get()
            for payload in event():
                await self._write(payload)

    async def _write(self, payload: bytes) -> None:
        if self._call is None:
            return
        try:
            await self._call.write(payload)
        except (grpc.RpcError, asyncio.InvalidStateError):
            self._break()
        except asyncio.CancelledError:
            if _cancelled_from_outside():
                raise
            self._break()

    def _break(self) -> None:
        """The stream has ended: the outbox must know at once, so that it logs nothing as sent from now on."""
        self._call = None
        self.agent.closed()

    # Connections.

    async def run(self) -> None:
        """Stay connected until stopped.

        :raises ToolkitError: when there is no use in trying again.
        """
        # A daemon: an agent that is stopped does not wait for an answer of the trainer.
        Thread(target=self._work, name="training", daemon=True).start()
        tasks = [asyncio.create_task(self._handle()), asyncio.create_task(self._clock())]
        stopped = asyncio.create_task(self.stopped.wait())
        dialling = asyncio.create_task(self._stay_connected())
        try:
            done, _ = await asyncio.wait([*tasks, stopped, dialling], return_when=asyncio.FIRST_COMPLETED)
            if done == {stopped}:
                last = asyncio.create_task(self._last_head())
                tasks.append(last)
                done, _ = await asyncio.wait([*tasks, dialling], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task is not stopped:
                    self._rethrow(task)
        finally:
            self._jobs.put(None)
            for task in (*tasks, stopped, dialling):
                task.cancel()
            await asyncio.gather(*tasks, stopped, dialling, return_exceptions=True)

    async def _last_head(self) -> None:
        """The end of the log, witnessed as far as anybody is there for it; not for long."""
        if self._call is None:
            return
        self.agent.witnessing.expect_last()
        self._events.put_nowait(self.agent.last_head)
        patience = self._loop.time() + WITNESS_SECONDS
        await asyncio.sleep(LINGER_SECONDS)  # others may stop too: they need our signatures as we need theirs
        while self._call is not None and not self.agent.witnessing.settled and self._loop.time() < patience:
            await asyncio.sleep(TICK_SECONDS)

    @staticmethod
    def _rethrow(task: asyncio.Task[Any]) -> None:
        error = task.exception()
        if isinstance(error, Left) and not isinstance(error, RunEnds):
            raise error.error from error
        if error is not None:
            raise error

    async def _stay_connected(self) -> None:
        wait, said = float(self.table.least_wait), ("", 0.0)
        while True:
            self._connected = math.inf
            reason = await self._one_connection()
            if self._loop.time() - self._connected > CONNECT_SECONDS:
                wait = float(self.table.least_wait)  # it lasted for a while; an attempt that timed out did not
            # Jitter keeps sites from connecting at the same moment; nothing secret depends on it.
            pause = wait * random.uniform(0.5, 1.0)
            # The same every minute would fill a disk in months.
            if reason != said[0] or wait < float(self.table.most_wait) or self._loop.time() >= said[1]:
                said = (reason, self._loop.time() + SAY_AGAIN_SECONDS)
                log.warning("%s; trying %s again in %.1f s", reason, self.table.address, pause)
            await asyncio.sleep(pause)
            wait = min(2 * wait, float(self.table.most_wait))

    async def _one_connection(self) -> str:
        """Connect, exchange messages until the stream ends, and return why it did."""
        options = tls.channel_options(self.table.proxy)
        try:
            served = await self._served()
            # The credentials are in no variable (`protos.tls`).
            channel = grpc.aio.secure_channel(self.table.address, self._credentials(served), options=options)
        except (CertificateUntrusted, NoTls):
            return _OTHER_END
        except (CertificateError, ConfigError) as error:
            return f"{error} ({error.hint})" if error.hint else str(error)
        except KeyUnavailable:
            raise
        except ToolkitError:
            return _UNREACHABLE
        async with channel:
            try:
                await asyncio.wait_for(channel.channel_ready(), CONNECT_SECONDS)
            except TimeoutError:
                return await _why_not(channel)
            call = channel.stream_stream(tls.METHOD)()
            self._call, self._connected = call, self._loop.time()
            self._events.put_nowait(self.agent.opened)
            try:
                return await self._read(call)
            finally:
                if self._call is call:
                    self._break()

    def _credentials(self, served: x509.Certificate) -> grpc.ChannelCredentials:
        """From the files as they are now: a renewal may have been installed since. The handshake would not say why.

        :param served: the coordinator's certificate; the outbox asks whether the manifest pins its key.
        """
        identity, now = self.agent.identity, self.agent.clock.now_ms()
        identity.settle_tls(now_ms=now)
        pki.check_dates(identity.tls_certificate(), now, str(identity.tls_path))
        manifest = self.agent.session.manifest
        if identity.shown_tls_path() == identity.own_tls_path:
            identity.check_shown(manifest, now_ms=now)
        self.agent.outbox.peer = check_coordinator_certificate(
            manifest.federation, identity.root(), served, revoked=manifest.revoked, now_ms=now
        )
        return tls.channel_credentials(identity, only=served)

    async def _served(self) -> x509.Certificate:
        """The certificate that answers there now. gRPC cannot tell whose it was, so that it is looked at before, and is
        then the only one which the connection accepts."""
        answer: asyncio.Future[x509.Certificate] = self._loop.create_future()

        def look() -> None:
            try:
                found = ask(Destination.parse(self.table.address, self.table.proxy), seconds=CONNECT_SECONDS)
                tell = partial(_settle, answer, found.certificate)
            except Exception as error:  # not to be lost in a thread
                tell = partial(_settle, answer, error)
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(tell)

        Thread(target=look, name="probe", daemon=True).start()
        return await answer

    async def _read(self, call: Any) -> str:
        try:
            while (data := await call.read()) is not grpc.aio.EOF:
                if (apart := await self._clocks_apart(call)) is not None:
                    call.cancel()
                    return apart
                self._events.put_nowait(partial(self._received, call, data))
            code, details = await call.code(), await call.details()
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
        except asyncio.CancelledError:
            call.cancel()
            if _cancelled_from_outside():
                raise
            return "the stream was closed"
        if code in _TURNED_AWAY:
            # A new site may be started before the operator has installed the manifest that lists it.
            return (
                f"refused by the coordinator: {details} (the operator may not have the newest manifest yet; "
                "`site-agent check` tests certificate and manifest, the operator's log has the reason)"
            )
        return f"the stream has ended ({code.name.lower()})"

    async def _clocks_apart(self, call: Any) -> str | None:
        """Why nothing of this stream is used: this machine's time and the coordinator's differ by too much. Its entries
        and cosignatures would have times that other logs contradict, and every auditor would find that."""
        clock = self.agent.clock
        boot = clock.now_ms() - clock.mono_ms()
        if self._compared is call:
            # A clock that was set in the meantime is compared with the coordinator's again, on a new stream.
            moved = boot - self._boot
            return f"this machine's clock was moved by {round(moved / 1000)} s" if abs(moved) > MOST_APART_MS else None
        self._compared, self._boot = call, boot
        their_time = next((value for key, value in await call.initial_metadata() or () if key == tls.TIME_KEY), None)
        if their_time is None or not str(their_time).isdigit():
            return None
        apart = clock.now_ms() - int(their_time)
        if abs(apart) <= MOST_APART_MS:
            return None
        way = "ahead of" if apart > 0 else "behind"
        return f"this machine's clock is {abs(apart) // 1000} s {way} the coordinator's: set it, and keep it with NTP"

    def _received(self, call: Any, data: bytes) -> Iterator[bytes]:
        """Bytes of a stream that is over by the time their turn comes mean nothing any more."""
        if self._call is not call:
            return
        try:
            yield from self.agent.received(data)
        except Left as left:
            if not left.retry:
                raise
            log.info("%s", left.error)
            call.cancel()


def _settle(answer: asyncio.Future[x509.Certificate], found: x509.Certificate | Exception) -> None:
    if answer.done():
        return
    if isinstance(found, Exception):
        answer.set_exception(found)
    else:
        answer.set_result(found)


async def _why_not(channel: Any) -> str:
    """Why a channel is not connected, as far as it is known: gRPC gives a reason to a call that fails at once.

    A name may have several addresses, and the reason is that of the last one tried. So a failed handshake is reported
    if it is visible, and `site-agent check` is recommended always.
    """
    call = channel.stream_stream(tls.METHOD)()
    try:
        await asyncio.wait_for(call.code(), ASK_SECONDS)
        details = await call.details() or ""
    except TimeoutError:
        details = ""
    finally:
        call.cancel()
    return _OTHER_END if "handshake failed" in details.lower() else _UNREACHABLE


def _cancelled_from_outside() -> bool:
    """gRPC reports a call that was cancelled as if the task had been."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _raising(error: Exception) -> Finish:
    def finish() -> Effects:
        raise error

    return finish


async def serve(
    agent: Agent,
    table: CoordinatorTable,
    *,
    counted: Meter | None = None,
    until: Callable[[asyncio.Event], None],
    watch: Callable[[], None] = lambda: None,
    ended: Callable[[str], None] = lambda _: None,
) -> bool:
    """Run an agent; `until` gets the event that stops it, for signal handlers. True if it is to be assembled again, for
    the next run.

    :param counted: one for all runs of this process, where there may be several.
    :param watch: called several times a second.
    :param ended: hears why the agent ends.
    :raises ToolkitError: when there is no use in trying again. The log ends in order either way.
    """
    client = Client(agent, table, counted=counted)
    client.watch = watch
    until(client.stopped)
    gc.freeze()  # what exists now stays; garbage collection during an aggregation need not visit it
    reason = BY_SIGNAL
    try:
        await client.run()
    except RunEnds as ends:
        log.info("%s", ends.error)
        reason = NEXT_RUN
    except Exception as error:
        reason = coarse(error)
        raise
    finally:
        gc.unfreeze()
        agent.learner.close()  # first: it may still write to the log
        ended(reason)
        agent.log.close(partial(end_log, client.traffic, reason))
        agent.wal.close()
        if agent.budget is not None:
            agent.budget.close()
    return reason == NEXT_RUN


def end_log(traffic: KernelByteLog, reason: str, privacy_log: AuditLog) -> None:
    """What a log ends with: the last reading, and why the agent stops."""
    traffic.close()
    privacy_log.append(AgentStop(reason=reason))
