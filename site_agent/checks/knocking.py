"""One knock at the coordinator's door with this site's own certificate: is it let in, and what time is it there?

A stream is opened and closed again without a message, so that nothing is counted, logged as sent or changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from protos import tls  # before grpc: it switches TLS 1.2 off

import grpc  # isort: skip

from security.consortium.enrolment import Identity
from security.errors import ToolkitError
from site_agent.config import CoordinatorTable

SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """:param time_ms: the coordinator's clock; None if it does not tell."""

    time_ms: int | None


def knock(identity: Identity, table: CoordinatorTable, *, seconds: float = SECONDS) -> Answer:
    """:raises ToolkitError: if the coordinator does not let this site in."""
    credentials = tls.channel_credentials(identity)
    with grpc.secure_channel(table.address, credentials, options=tls.channel_options(table.proxy)) as channel:
        call = channel.stream_stream(tls.METHOD)(iter(()), timeout=seconds)
        try:
            told = dict(call.initial_metadata())
            for _ in call:
                pass  # an empty conversation has no answers
        except grpc.RpcError as error:
            raise _turned_away(error, table.address) from error
    time_ms = str(told.get(tls.TIME_KEY, ""))
    return Answer(time_ms=int(time_ms) if time_ms.isdecimal() else None)


def _turned_away(error: Any, address: str) -> ToolkitError:
    code = error.code()
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return ToolkitError(
            f"the coordinator turns this site away: {error.details()}",
            where=address,
            hint="it may have another manifest than this site: ask its operator to install the newest one",
        )
    return ToolkitError(
        f"the coordinator takes no call from this site ({code.name.lower()})",
        where=address,
        hint="most often it refuses this site's certificate: ended, of another root, or this machine's clock is off",
    )
