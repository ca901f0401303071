"""The one place of these pages with a socket: a thread of its own with a loop of its own, so that who looks at a page
never keeps the party behind it waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from http import HTTPStatus
from threading import Event, Thread
from typing import Final

from lazaret.errors import ConfigError
from lazaret.web.access import Address
from lazaret.web.http import MAX_HEAD, BadRequest, Request, Response

READ_SECONDS: Final = 15.0
WRITE_SECONDS: Final = 15.0
MOST_CONNECTIONS: Final = 64
MOST_REQUESTS: Final = 1000  # on one connection

Answer = Callable[[Request], Response]


class WebServer:
    """Listens when `start` has returned, and is gone when `stop` has."""

    def __init__(self, answer: Answer, address: Address, *, tls: ssl.SSLContext | None = None) -> None:
        self._answer = answer
        self._address = address
        self._tls = tls
        self._ready = Event()
        self._failure: OSError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None
        self._open = 0
        self._thread = Thread(target=self._run, name="web", daemon=True)
        self.port = address.port

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls else ''}://{self._address.url_host}:{self.port}/"

    def start(self) -> None:
        """:raises ConfigError: if nothing can listen there."""
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            self._thread.join()
            raise ConfigError(
                f"cannot listen: {(self._failure.strerror or str(self._failure)).lower()}",
                where=f"{self._address.url_host}:{self._address.port}",
                hint="is the port in use, or the address not of this host?",
            )

    def stop(self) -> None:
        if self._loop is not None and self._over is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed already
                self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(timeout=5)

    def wait(self) -> None:
        """Until the server ends; for commands that do nothing else."""
        while self._thread.is_alive():
            self._thread.join(timeout=0.5)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except OSError as error:
            self._failure = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(
            self._converse, self._address.host, self._address.port, limit=MAX_HEAD, ssl=self._tls
        )
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        async with server:
            await self._over.wait()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open > MOST_CONNECTIONS:
                await self._write(writer, Response.refusal(HTTPStatus.SERVICE_UNAVAILABLE).encode())
                return
            for _ in range(MOST_REQUESTS):
                if not await self._one(reader, writer):
                    return
        except (OSError, asyncio.IncompleteReadError, TimeoutError, asyncio.CancelledError):
            pass  # who asked is gone or too slow, or the server ends
        finally:
            self._open -= 1
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; whether another may follow on this connection."""
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), READ_SECONDS)
            request = Request.parse(head)
        except asyncio.LimitOverrunError:
            await self._write(writer, Response.refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE).encode())
            return False
        except BadRequest as error:
            await self._write(writer, Response.refusal(error.status).encode())
            return False
        response = self._answer(request)
        data = response.encode(head_only=request.method == "HEAD", keep_open=request.keeps_open)
        await self._write(writer, data)
        return request.keeps_open

    @staticmethod
    async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(data)
        await asyncio.wait_for(writer.drain(), WRITE_SECONDS)
