"""From paths to content: files of the package, and values made when they are asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus
from importlib import resources
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from lazaret.errors import ToolkitError
from lazaret.web.access import Guard
from lazaret.web.http import Request, Response

log = logging.getLogger("web")

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


# One scrape as an answer.

def exposition(collector: Collector) -> Response:
    """What a collector tells, from a registry of its own: nothing of other libraries slips in."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return Response(body=generate_latest(registry), kind=CONTENT_TYPE_LATEST)
