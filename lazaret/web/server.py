"""What serves the pages: the socket, and from paths to content.

The socket has a thread of its own with a loop of its own, so that who looks at a page never keeps the party behind it
waiting.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import weakref
from collections.abc import Callable, Mapping
from http import HTTPStatus
from importlib import resources
from threading import Thread
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from lazaret.errors import ConfigError, ToolkitError
from lazaret.web.access import Address, Guard
from lazaret.web.http import Request, Response

if TYPE_CHECKING:
    from uvicorn import Server

    from lazaret.web.connection import Answer

log = logging.getLogger("web")

SECONDS: Final = 15  # for a request to come, and again for its answer to be taken
MOST_CONNECTIONS: Final = 64
MOST_SOCKETS: Final = 2 * MOST_CONNECTIONS  # with those that have not finished their TLS handshake
STOP_SECONDS: Final = 5.0


class WebServer:
    """Listens when `start` has returned, and is gone when `stop` has."""

    def __init__(
        self, answer: Answer, address: Address, *, tls: ssl.SSLContext | None = None, seconds: int = SECONDS
    ) -> None:
        self._answer = answer
        self._address = address
        self._tls = tls
        self._seconds = seconds
        self._server: Server | None = None
        self._thread: Thread | None = None
        self.port = address.port

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls else ''}://{self._address.url_host}:{self.port}/"

    def start(self) -> None:
        """:raises ConfigError: if nothing can listen there."""
        # Only here: a command that serves no page does not pay for the server.
        from lazaret.web.connection import make_server

        server = make_server(self._answer, seconds=self._seconds, connections=MOST_CONNECTIONS, tls=self._tls)
        sockets = _listening(self._address)
        self.port = sockets[0].getsockname()[1]
        # Not `server.run`, which may choose another kind of loop and would answer to this process's signals.
        work = server.serve(sockets=sockets)
        self._server, self._thread = server, Thread(target=asyncio.run, args=(work,), name="web", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Bounded in time, whatever the clients do."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(timeout=STOP_SECONDS)

    def wait(self) -> None:
        """Until the server ends; for commands that do nothing else."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout=0.5)


class BoundedListener(socket.socket):
    """Accepts only so many at once, so that a flood takes no file descriptors from the run in this process.

    The server counts connections that speak HTTP. Under TLS one that never finishes its handshake is not among them,
    and asyncio waits a minute for it.
    """

    def __init__(self, bound: socket.socket) -> None:
        # The protocol is named because asyncio sends without delay (TCP_NODELAY) only on sockets that say they are TCP.
        # Otherwise every answer of two writes waits 40 ms for the other side's delayed acknowledgement.
        super().__init__(bound.family, bound.type, socket.IPPROTO_TCP, fileno=bound.detach())
        self._accepted: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def accept(self) -> tuple[socket.socket, Any]:
        """:raises ConnectionAbortedError: if there are too many, as if the client had gone in the meantime."""
        stream, where = super().accept()
        if sum(one.fileno() >= 0 for one in self._accepted) >= MOST_SOCKETS:
            stream.close()
            raise ConnectionAbortedError
        self._accepted.add(stream)
        return stream, where


def _listening(address: Address) -> list[socket.socket]:
    """One socket for each address that the host has, as `localhost` may have two.

    :raises ConfigError: if one of them cannot be had.
    """
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, where in dict.fromkeys(found):
            bound = socket.create_server(where[:2], family=family, backlog=MOST_CONNECTIONS)
            sockets.append(BoundedListener(bound))
    except OSError as error:
        for one in sockets:
            one.close()
        raise ConfigError(
            f"cannot listen: {(error.strerror or str(error)).lower()}",
            where=f"{address.url_host}:{address.port}",
            hint="is the port in use, or the address not of this host?",
        ) from error
    return sockets


# From paths to content: files of the package, and values made when they are asked for.


Source = Callable[[], Response]
_KINDS: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
}


def assets(package: str, *names: str) -> dict[str, Source]:
    """Files in the folder `assets` of a package, by path; `index.html` is the page itself."""
    found: dict[str, Source] = {}
    for name in names:
        data = resources.files(package).joinpath("assets", name).read_bytes()
        found["/" if name == "index.html" else f"/{name}"] = _always(Response.of(data, _KINDS[name.rpartition(".")[2]]))
    return found


def _always(response: Response) -> Source:
    return lambda: response


class Pages:
    """All that can be asked for. Called from one thread."""

    def __init__(self, routes: Mapping[str, Source], guard: Guard) -> None:
        self._routes = routes
        self._guard = guard

    def answer(self, request: Request) -> Response:
        refusal = self._guard.refusal(request)
        if refusal is not None:
            return refusal
        source = self._routes.get(self._guard.path(request))
        if source is None:
            return Response.refusal(HTTPStatus.NOT_FOUND)
        try:
            return source().for_request(request)
        except (ToolkitError, OSError) as error:
            # A database in the middle of its first second, a folder that is being moved: the page asks again.
            log.warning("%s: %s", self._guard.path(request), error)
            return Response.refusal(HTTPStatus.SERVICE_UNAVAILABLE, Retry_After="1")
        except Exception:
            # A fault of ours: told to the operator, not to who asked, and the next request is answered again.
            log.exception("%s", self._guard.path(request))
            return Response.refusal(HTTPStatus.INTERNAL_SERVER_ERROR)


def exposition(collector: Collector) -> Response:
    """What a collector tells, from a registry of its own: nothing of other libraries slips in."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return Response(body=generate_latest(registry), kind=CONTENT_TYPE_LATEST)
