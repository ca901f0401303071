"""Uvicorn, held to the bounds of a page that runs beside a federation.

Uvicorn and h11 read the requests and write the answers. Three things they leave open are closed here: a client may take
as long as it likes over its first request, connections are counted only once a request has come, and refusals of the
parser carry none of the headers that every other answer has. This module is imported when a page is served and not
before: commands without a page never load uvicorn.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

import h11
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from lazaret.web.http import MAX_HEAD, BadRequest, Request, Response, check_head

MOST_REQUESTS: Final = 1000  # on one connection
STOP_SECONDS: Final = 1  # what a server that ends gives to connections that do not close

Answer = Callable[[Request], Response]


def make_server(answer: Answer, *, seconds: int, connections: int, tls: ssl.SSLContext | None) -> Server:
    """A server that has no socket yet.

    :param seconds: what a client has for sending a request, and again for taking the answer.
    :param connections: how many may be open at once.
    """
    config = Config(
        _application(answer),
        interface="asgi3",
        http=BoundedConnection,
        ws="none",
        lifespan="off",
        workers=1,
        # Nothing about requests is logged: a client could fill the disk with it. Faults of a page go to the log `web`.
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        # Who asks is decided by the connection; a header that names another client is not believed.
        proxy_headers=False,
        limit_concurrency=connections,
        timeout_keep_alive=seconds,
        timeout_graceful_shutdown=STOP_SECONDS,
        h11_max_incomplete_event_size=MAX_HEAD,
        ssl_context_factory=None if tls is None else lambda *_: tls,
    )
    config.load()
    return Server(config)


def _application(answer: Answer) -> Callable[..., Any]:
    async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:  # noqa: ARG001
        """One request. Its body, if it claims to have one, is never read: the connection is closed instead."""
        try:
            response, close = answer(Request.of_scope(scope)), False
        except BadRequest as error:
            response, close = Response.refusal(error.status), True
        headers = response.headers(close=close)
        await send({"type": "http.response.start", "status": response.status.value, "headers": headers})
        await send({"type": "http.response.body", "body": response.body})

    return application


class BoundedConnection(H11Protocol):
    """One connection: at most so many at once, a deadline over every request and answer, and strict headers."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        # With a limit of its own, uvicorn refuses every request while too many connections are open, also those of
        # clients that came in time. Here the newest connection is turned away and the others go on.
        self._most, self.limit_concurrency = self.limit_concurrency, None
        self._answered = 0
        self._head = b""  # what has come since the last whole head
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_deadline()
        if self._most is not None and len(self.connections) > self._most:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes alone win no time: only a whole request does, so a client that sends one byte a second is cut off."""
        try:
            self._check_heads(data)
        except BadRequest as error:
            self._refuse(error.status)
            return
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._set_deadline()

    def _check_heads(self, data: bytes) -> None:
        """Hold the bytes of each head to what h11 forgives: its length, bare line feeds, folded lines, controls.

        :raises BadRequest: before the parser sees a byte of this piece.
        """
        *heads, self._head = (self._head + data).split(b"\r\n\r\n")
        for head in (*heads, self._head):
            check_head(head)

    def on_response_complete(self) -> None:
        self._answered += 1
        self._set_deadline()
        if self._answered >= MOST_REQUESTS:
            self.transport.close()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """Called by uvicorn while it handles the error of the parser, which knows the status that fits."""
        error = sys.exception()
        hint = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else HTTPStatus.BAD_REQUEST
        known = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        self._refuse(known if hint == known else HTTPStatus.BAD_REQUEST)

    def shutdown(self) -> None:
        """The server ends, and waits for nobody: a page is asked for again in a moment."""
        self.transport.abort()

    def _set_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        # Abort and not close: closing would wait for a client that takes no bytes.
        self._deadline = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)

    def _refuse(self, status: HTTPStatus) -> None:
        """An answer to what is no request, if none has begun, and the end of the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = Response.refusal(status)
            headers = [*self.server_state.default_headers, *response.headers(close=True)]
            head = h11.Response(status_code=status.value, headers=headers, reason=status.phrase.encode())
            for event in (head, h11.Data(data=response.body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
