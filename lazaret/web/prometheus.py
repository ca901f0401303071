"""One scrape as an answer."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from lazaret.web.http import Response


def exposition(collector: Collector) -> Response:
    """What a collector tells, from a registry of its own: nothing of other libraries slips in."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return Response(body=generate_latest(registry), kind=CONTENT_TYPE_LATEST)
