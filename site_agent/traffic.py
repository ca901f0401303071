"""Which of this process's connections the kernel's count is about."""

from __future__ import annotations

from functools import partial
from typing import Final
from urllib.parse import urlsplit

from security.traffic import Meter, tcp_flows
from site_agent.config import CoordinatorTable
from site_agent.ranks import Place

HTTP_PORT: Final = 80  # of a proxy that is given without one


def meter_for(table: CoordinatorTable, place: Place | None) -> Meter:
    """Counts what leaves this machine, and what goes to the coordinator wherever that is.

    :param place: among several processes that train as one. On several machines their own traffic, gigabytes of
        gradients, would hide whatever the count is there to show: then nothing is counted, and the log says nothing.
    """
    if place is not None and not place.loopback:
        return Meter(lambda: None)
    dialled = urlsplit(table.proxy or f"//{table.address}")
    return Meter(partial(tcp_flows, {dialled.port or HTTP_PORT}))
