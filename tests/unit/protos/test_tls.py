"""Options of both ends of a stream: gRPC knows each name, and an idle stream is not closed for its keep-alives."""

from __future__ import annotations

import asyncio
from pathlib import Path

from protos import tls  # before grpc, as in every command

import grpc  # isort: skip
from grpc._cython import cygrpc  # isort: skip

METHOD = "/test.Idle/Converse"
# An idle hour in three seconds: every time of the options is divided by this.
FASTER = 300


def faster(options: list[tuple[str, int | str]]) -> list[tuple[str, int | str]]:
    return [(name, value // FASTER if name.endswith("_ms") else value) for name, value in options]  # type: ignore[operator]


def test_every_option_is_a_name_that_grpc_knows() -> None:
    """An unknown name is ignored without a word; the library's own strings are the list."""
    library = Path(cygrpc.__file__).read_bytes()
    names = {name for name, _ in (*tls.COORDINATOR_OPTIONS, *tls.channel_options("http://proxy:3128"))}
    assert [name for name in sorted(names) if name.encode() + b"\0" not in library] == []


async def idle(server_options: list[tuple[str, int | str]], seconds: float) -> grpc.StatusCode | None:
    """How a stream on which nothing is said ends within so many seconds; None if it does not."""
    gone = asyncio.Event()

    async def converse(requests: object, context: object) -> None:
        await gone.wait()

    handler = grpc.stream_stream_rpc_method_handler(converse)
    server = grpc.aio.server(options=server_options)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Idle", {"Converse": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=faster(tls.channel_options(None)))
    try:
        call = channel.stream_stream(METHOD)()
        await call.wait_for_connection()
        try:
            return await asyncio.wait_for(asyncio.shield(call.code()), seconds)
        except TimeoutError:
            return None
    finally:
        gone.set()
        await channel.close()
        await server.stop(None)


def test_an_idle_stream_stays_open() -> None:
    assert asyncio.run(idle(faster([*tls.COORDINATOR_OPTIONS]), 3.0)) is None


def test_an_idle_stream_stays_open_twin() -> None:
    """Without the option that a misspelt name left out, the server counts keep-alives as abuse and closes."""
    without = [pair for pair in tls.COORDINATOR_OPTIONS if "min_ping_interval" not in pair[0]]
    assert len(without) == len(tls.COORDINATOR_OPTIONS) - 1
    assert asyncio.run(idle(faster(without), 10.0)) is grpc.StatusCode.UNAVAILABLE
