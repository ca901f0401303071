"""gRPC: bytes in, bytes out. Who may speak is decided by TLS and the roster before the first message is read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from protos import tls  # before grpc: it switches TLS 1.2 off

import grpc  # isort: skip
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # isort: skip

from coordinator.assembly import prepare
from coordinator.config import CoordinatorConfig
from coordinator.dashboard.server import Watch, open_dashboard
from coordinator.ingress_log import Arrived
from coordinator.run import Shell
from coordinator.send_queue import SendTurn, Stream, Turns
from coordinator.status import RunPresence
from lazaret import process
from lazaret.control import BY_SIGNAL, NEXT_RUN
from lazaret.errors import CodecError, ConfigError, RemoteProtocolError, ToolkitError, coarse
from lazaret.files import naming
from lazaret.kernel_bytes import Meter, meter
from lazaret.process import ServiceManager, stop_on_signals
from protos.parse import FROM_SITE, Parcel
from security.clock import SystemClock
from security.identity import pki
from security.identity.enrolment import Identity
from security.identity.manifest import Manifest
from security.identity.membership import Seat
from security.identity.peers import check_tls_peer, issuers
from security.log.egress import KernelByteLog
from security.rng import SystemRandomness
from security.secagg.context import PROTOCOL_VERSION
from security.secagg.fields import Wire
from security.secagg.relay import CloseReason, Goodbye, Open, Welcome, manifest_frames

log = logging.getLogger("coordinator")
TICK_SECONDS: Final = 0.25
OPEN_SECONDS: Final = 20.0  # until a stream begins
RECEIPT_SECONDS: Final = 2.0
# With two pauses for grace and the closing of files, it ends within 15 s.
STOP_SECONDS: Final = 8.0
GRACE_SECONDS: Final = 2.0
CHECK_MS: Final = 10_000  # how long witnesses wait for the check of a sum
WITNESS_SECONDS: Final = 3.0
_HIGHEST_SESSION: Final = 2**63 - 1  # as the database can hold


class Stopping(Exception):
    """Our own side has failed, here or elsewhere: nothing is taken, decided or sent any more."""


class Service:
    """The coordinator on the network.

    :param counted: of a process that has had runs before: connections of the last one may still be open, and what they
        have carried is counted already.
    """

    def __init__(self, shell: Shell, identity: Identity, seat: Seat, *, counted: Meter | None = None) -> None:
        self.shell = shell
        self.identity = identity
        self._seat = seat
        self.port = 0
        self.traffic = KernelByteLog(shell.books.log, counted or meter())
        self.stopped = asyncio.Event()
        self.watch: Watch = lambda: None
        self.next_run = False  # this run is over, and another one waits
        self._at_once = False
        self._failure: BaseException | None = None
        self._witnessed_rounds = -1
        self._unchecked_since: int | None = None
        self._sending = Turns()
        self._receiving = Turns()

    @property
    def manifest(self) -> Manifest:
        return self._seat.manifest

    # One stream.

    async def converse(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """A site's stream, from its Open to its end. A fault of the site's ends its stream, one of ours the service."""
        try:
            site, spki = await self._who(context)
            await context.send_initial_metadata(((tls.TIME_KEY, str(self.shell.clock.now_ms())),))
            stream = await self._open(site, spki, requests, context)
            if stream is not None:
                await self._talk(stream, context)
        except RemoteProtocolError as error:
            log.warning("stream closed: %s", error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a message of this protocol")
        except Stopping:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the coordinator has to stop")
        except grpc.aio.InternalError as error:
            # The line broke while we wrote, before gRPC cancelled the call: it would print a traceback of ours.
            raise asyncio.CancelledError from error

    async def _talk(self, stream: Stream, context: Any) -> None:
        """Both ways at once, until one of them ends, or nothing is read any more."""
        ways: list[asyncio.Task[None]] = []
        try:
            with self._own_work():
                self.shell.connected(stream)
            ways += [asyncio.create_task(way(stream, context)) for way in (self._read, self._write)]
            ways.append(asyncio.create_task(stream.unread()))
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in done:
                way.result()
        finally:
            for way in ways:
                way.cancel()
            try:
                with self._own_work():
                    self.shell.disconnected(stream)
            finally:
                await asyncio.gather(*ways, return_exceptions=True)

    @contextmanager
    def _own_work(self) -> Iterator[None]:
        """What we do with a message or for one. If it fails, memory may be ahead of the disk, and nothing may follow
        from it: the error is kept, and ends the service. What the line does wrong happens outside of here.

        :raises Stopping: instead of that error, and from then on.
        """
        if self._failure is not None:
            raise Stopping
        try:
            yield
        except RemoteProtocolError:
            raise
        except Exception as error:
            self._failure = self._failure or error
            raise Stopping from error

    async def _who(self, context: Any) -> tuple[str, str]:
        """The site behind a certificate: issued by our root, in the roster, valid today, not revoked."""
        try:
            certificate = tls.peer_certificate(context)
            now = self.shell.clock.now_ms()
            subject = check_tls_peer(self.manifest, self.identity.root(), certificate, now_ms=now)
            self.manifest.site(subject.member)
            return subject.member, pki.key_fingerprint(pki.certificate_key(certificate))
        except ToolkitError as error:
            log.warning("a peer was refused: %s", error)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "certificate is not accepted here")
            raise

    async def _open(self, site: str, spki: str, requests: AsyncIterator[bytes], context: Any) -> Stream | None:
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                data = await anext(requests, None)
        except TimeoutError:
            raise RemoteProtocolError("a stream without Open", where=f"site {site}") from None
        if data is None:
            return None
        with self._own_work():
            stream, refusal = self._greet(site, spki, data)
        if refusal is None:
            return stream
        with self._own_work():
            self.shell.books.refused(site, min(stream.session, _HIGHEST_SESSION), 1, len(data))
        log.warning("site %s refused: %s", site, refusal.name.lower())
        await self.deliver(stream, Goodbye(code=refusal), context)
        return None

    def _greet(self, site: str, spki: str, data: bytes) -> tuple[Stream, CloseReason | None]:
        """The stream that an Open begins, or why there is to be none."""
        try:
            parcel = FROM_SITE.decode(data)
            opening = parcel.message
            if not isinstance(opening, Open) or parcel.sequence != 1:
                raise CodecError("a stream begins with Open", where=f"site {site}")
        except CodecError:
            self.shell.books.refused(site, 0, 1, len(data))
            raise
        stream = Stream(site, opening.session, spki)
        refusal = self._refusal(site, opening)
        if refusal is not None:
            return stream, refusal
        self._take(stream, parcel, data)
        version, digest = self.manifest.version, self.manifest.digest
        stream.put([Welcome(protocol=PROTOCOL_VERSION, manifest_version=version, manifest_hash=digest)])
        if opening.manifest_version < version:
            stream.put(manifest_frames(self.identity.manifest_path.read_bytes(), version))
        return stream, None

    def _refusal(self, site: str, opening: Open) -> CloseReason | None:
        if opening.protocol != PROTOCOL_VERSION:
            return CloseReason.OTHER_PROTOCOL
        if (opening.federation, opening.site) != (self.manifest.federation, site):
            return CloseReason.NOT_LISTED
        if opening.manifest_version > self.manifest.version:
            return CloseReason.OLD_MANIFEST  # ours is: the operator must install the newer one
        last, _ = self.shell.storage.history.sessions().get(site, (0, 0))
        return None if last < opening.session <= _HIGHEST_SESSION else CloseReason.OUT_OF_ORDER

    async def _read(self, stream: Stream, context: Any) -> None:
        """Not by iterating over the requests: the iterator would hold on to each frame until the next one is there.

        A frame that is not asked for stays on the other side of the window. Each one comes through the loop, so that
        many of them at once do not block the other streams.
        """
        with self._receiving.of_stream() as turn:
            while self._received(stream, await context.read()):
                if self.shell.awaits_frames(stream.site):
                    await turn.frame()
                else:
                    turn.end()

    def _received(self, stream: Stream, data: Any) -> bool:
        """Take what arrived; returns whether the stream continues."""
        if data is grpc.aio.EOF:
            return False
        with self._own_work():
            try:
                arrived = self._take(stream, FROM_SITE.decode(data), data)
            except CodecError:
                # Every byte that reaches us has an entry, also where it ends the stream.
                self.shell.books.refused(stream.site, stream.session, stream.received + 1, len(data))
                raise
            if self.shell.streams.get(stream.site) is not stream:  # replaced by a newer one
                self.shell.books.refused(stream.site, stream.session, arrived.sequence, arrived.size)
                return False
            self.shell.received(stream, arrived)
        return True

    def _take(self, stream: Stream, parcel: Parcel, data: bytes) -> Arrived:
        if parcel.sequence != stream.received + 1:
            raise CodecError("messages are out of order", where=f"site {stream.site}")
        arrived = Arrived.of(stream.site, stream.session, parcel.sequence, parcel.message, data)
        if parcel.log_head is not None:
            self.shell.books.saw_head(parcel.log_head)
        stream.received += 1
        stream.bytes_in += len(data)
        stream.heard_ms = self.shell.clock.now_ms()
        self.shell.traffic.received[type(parcel.message).__name__] += len(data)
        if isinstance(parcel.message, Open):
            self.shell.books.arrived(arrived, round_number=None)
        return arrived

    async def _write(self, stream: Stream, context: Any) -> None:
        """Until the stream is closed; a message may be made only when its turn comes, and that can fail as well."""
        with self._sending.of_stream() as turn:
            while next_one := await self._next(stream, turn):
                await self.deliver(stream, next_one.pop(), context)

    async def _next(self, stream: Stream, turn: SendTurn) -> list[Wire]:
        """The next message, in a list that is emptied to deliver it: with a hundred slow links, a hundred frames are on
        their way for long, and nothing else may hold them in memory once they are encoded. Empty at the end."""
        with self._own_work():
            message = await stream.next(turn)
        return [] if message is None else [message]

    async def deliver(self, stream: Stream, message: Wire, context: Any) -> None:
        """One message to one site; the one place where bytes leave."""
        with self._own_work():
            data = stream.encode(message, self.shell.books)
        self.shell.traffic.sent[type(message).__name__] += len(data)
        del message
        await context.write(data)

    # The whole service.

    def stop(self) -> None:
        """A first signal stops in order, a second one at once."""
        self._at_once = self.stopped.is_set()
        self.stopped.set()

    async def serve(self, listen: str, begin: Callable[[], None] = lambda: None) -> None:
        """Run until `stopped` is set and the aggregation under way is over.

        :param begin: what is done once sites can connect; only then is a round opened.
        """
        server = grpc.aio.server(options=tls.coordinator_options())
        handler = grpc.stream_stream_rpc_method_handler(self.converse)
        service, _, method = tls.METHOD.strip("/").partition("/")
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        status = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(status, server)
        self.port = self._bind(server, listen)
        begin()
        await server.start()
        await status.set(service, health_pb2.HealthCheckResponse.SERVING)
        log.info("listening on %s:%d", listen.rpartition(":")[0], self.port)
        try:
            await self._run()
        except BaseException as error:
            self._failure = self._failure or error  # the loop's own as well: no stream continues from here
            with suppress(Exception):  # what fails on the way out must not hide why we leave
                await self._leave(server, status)
            raise
        await self._leave(server, status)
        self._check()

    def _bind(self, server: Any, listen: str) -> int:
        try:
            return int(server.add_secure_port(listen, tls.server_credentials(self.identity, issuers(self.manifest))))
        except RuntimeError as error:
            raise ConfigError(
                "cannot listen on this address",
                where=listen,
                hint="is the port in use, or the address not of this host?",
            ) from error

    async def _leave(self, server: Any, status: Any) -> None:
        await status.enter_graceful_shutdown()
        for stream in list(self.shell.streams.values()):
            stream.close(Goodbye(code=CloseReason.STOPPING))
        await server.stop(grace=GRACE_SECONDS)
        # Calls that were cut off end by themselves now; of those that end with the loop, gRPC would print a traceback.
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=GRACE_SECONDS)
        self.traffic.close()

    def _check(self) -> None:
        """Raise what has failed in a stream."""
        if self._failure is not None:
            raise self._failure

    def _may_leave(self, patience: float) -> bool:
        """Whether nothing is left that could end now; after `patience` the rest has to wait for the next start."""
        engine = self.shell.engine
        # The check of a sum belongs to one roster: finished now, a newer manifest may be installed meanwhile.
        checking = engine.check.open and bool(self.shell.streams)
        if not engine.aggregating and not checking:
            return True
        if not self._at_once and asyncio.get_running_loop().time() < patience:
            return False
        if engine.aggregating:
            log.warning("stopping during an aggregation, which continues at the next start")
        return True

    async def _run(self) -> None:
        shell, loop = self.shell, asyncio.get_running_loop()
        receipts_due = loop.time()
        patience: float | None = None
        while True:
            self._check()
            if self.stopped.is_set():
                patience = patience or loop.time() + STOP_SECONDS
                # Before the witnesses are waited for: else a sum is made meanwhile, and left unchecked.
                shell.execute(shell.engine.stop())
                if self._may_leave(patience):
                    await self._witness_end()
                    return
            shell.tick()
            if shell.next_run_due:
                self.next_run = True
                await self._witness_end()
                return
            self.traffic.tick(loop.time())
            if loop.time() >= receipts_due and not shell.engine.aggregating:
                shell.settle_receipts()
                receipts_due = loop.time() + RECEIPT_SECONDS
            self._witness_round()
            self.watch()
            await asyncio.sleep(TICK_SECONDS)

    def _witness_round(self) -> None:
        """Once when the first sites are there, and after each published result.

        Not before its sum is checked, as long as that does not take long: then the checkpoints cover the whole round.
        """
        shell, now = self.shell, self.shell.clock.mono_ms()
        if shell.results == self._witnessed_rounds or not shell.streams or shell.engine.aggregating:
            return
        self._unchecked_since = self._unchecked_since or now
        if shell.engine.check.open and now < self._unchecked_since + CHECK_MS:
            return
        self._witnessed_rounds, self._unchecked_since = shell.results, None
        shell.settle_receipts()
        shell.call_witnesses()

    async def _witness_end(self) -> None:
        """The last checkpoints, of all who are still there, before the streams are closed; not for long."""
        shell, loop = self.shell, asyncio.get_running_loop()
        if not shell.streams or self._at_once:
            return
        shell.settle_receipts()
        shell.call_witnesses()
        size, patience = shell.books.head.size, loop.time() + WITNESS_SECONDS
        while shell.streams and shell.books.log.witnessed < size and loop.time() < patience and not self._at_once:
            await asyncio.sleep(TICK_SECONDS)
            self._check()
        await asyncio.sleep(TICK_SECONDS)  # for cosignatures between the sites, which pass through here


def run_until_stopped(
    config: CoordinatorConfig, base: Path, *, shell_type: type[Shell] = Shell, service_type: type[Service] = Service
) -> None:
    """A coordinator from start to end. An aggregation under way is finished or aborted first, if that can be done
    soon."""
    process.limit_heaps()
    manager, counted = ServiceManager(), meter()
    while _one_run(config, base, shell_type, service_type, manager, counted):
        log.info("the next run begins")


def _one_run(
    config: CoordinatorConfig,
    base: Path,
    shell_type: type[Shell],
    service_type: type[Service],
    manager: ServiceManager,
    counted: Meter,
) -> bool:
    """Until the coordinator is stopped, or its run is over and another one waits: True, which is then installed."""
    ready = prepare(config, base, clock=SystemClock(), rng=SystemRandomness(), shell_type=shell_type)
    process.freeze_objects()
    seen = RunPresence(ready.shell, ready.manifest, config)

    async def serve() -> bool:
        service = service_type(ready.shell, ready.identity, ready.seat, counted=counted)
        stop_on_signals(service.stop)
        with open_dashboard(config, base, ready) as watch:

            def look() -> None:
                watch()
                seen.look()
                manager.alive()

            service.watch = look
            await service.serve(config.listen, ready.begin)
        return service.next_run

    try:
        with naming(ready.shell.storage.folder):
            again = asyncio.run(serve())
    except BaseException as error:
        with suppress(Exception):  # as above
            seen.stop(coarse(error))
            ready.shell.close(coarse(error))
        raise
    reason = NEXT_RUN if again else BY_SIGNAL
    seen.stop(reason)
    ready.shell.close(reason)
    if again:
        ready.shell.queue.begin_next(ready.identity, now_ms=SystemClock().now_ms())
    return again
