"""Both ends of a plaintext FedAvg exchange.

`python -m benchmarks.plain.parties server IDENTITY PORT SITES WORDS ROUNDS TIMES` and
`python -m benchmarks.plain.parties site IDENTITY PORT WORDS ROUNDS TIMES`
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from protos import tls  # before grpc: it switches TLS 1.2 off

import grpc  # isort: skip

import numpy as np

from benchmarks.plain.exchange_pb2 import Frame
from benchmarks.times import note
from security.identity.enrolment import Identity

FRAME_BYTES = 262_144
METHOD = "Average"
SERVICE = "lazaret.benchmarks.plain.Exchange"


def frames(vector: np.ndarray[Any, Any]) -> list[tuple[int, memoryview]]:
    data = vector.data.cast("B")
    return [(start // FRAME_BYTES, data[start : start + FRAME_BYTES]) for start in range(0, len(data), FRAME_BYTES)]


class Server:
    """Waits for all sites, says go, adds what comes, sends the mean."""

    def __init__(self, sites: int, words: int, rounds: int, times: Path) -> None:
        self.sites, self.words, self.rounds, self.times = sites, words, rounds, times
        self.gates = [asyncio.Barrier(sites) for _ in range(2 * rounds + 1)]
        self.total = np.zeros(words, dtype=np.float32)
        self.done = asyncio.Event()
        self.finished = 0

    async def average(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """One site's stream, all rounds."""
        count = len(frames(self.total))
        for number in range(self.rounds):
            if await self.gates[2 * number].wait() == 0:
                self.total = np.zeros(self.words, dtype=np.float32)
                note(self.times, "go", number, time.process_time())
            await self.gates[-1].wait()
            await context.write(Frame(index=0).SerializeToString())
            for _ in range(count):
                frame = Frame.FromString(await anext(requests))
                start = frame.index * FRAME_BYTES // 4
                part = np.frombuffer(frame.data, dtype=np.float32)
                self.total[start : start + len(part)] += part
            if await self.gates[2 * number + 1].wait() == 0:
                self.total /= np.float32(self.sites)
            await self.gates[-1].wait()
            for index, data in frames(self.total):
                await context.write(Frame(index=index, data=bytes(data)).SerializeToString())
            note(self.times, "burst over", number, time.process_time())
        self.finished += 1
        if self.finished == self.sites:
            self.done.set()


async def serve(identity: Identity, port: int, server: Server) -> None:
    running = grpc.aio.server(options=tls.COORDINATOR_OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(server.average)
    running.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    running.add_secure_port(f"0.0.0.0:{port}", tls.server_credentials(identity))
    await running.start()
    await server.done.wait()
    await running.stop(grace=5)


async def take_part(identity: Identity, address: str, words: int, rounds: int, times: Path) -> None:
    vector = np.full(words, 0.5, dtype=np.float32)
    credentials = tls.channel_credentials(identity)
    async with grpc.aio.secure_channel(address, credentials, options=tls.SITE_OPTIONS) as channel:
        await channel.channel_ready()
        call = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
        mean = np.empty_like(vector)
        target = mean.data.cast("B")
        for number in range(rounds):
            await call.read()
            note(times, "burst", number, time.process_time())
            for index, data in frames(vector):
                await call.write(Frame(index=index, data=bytes(data)).SerializeToString())
            for index, _ in frames(vector):
                frame = Frame.FromString(await call.read())
                target[index * FRAME_BYTES : index * FRAME_BYTES + len(frame.data)] = frame.data
            vector += mean - vector  # the next model
            note(times, "mean", number, time.process_time())
        await call.done_writing()


def main() -> None:
    role, folder, address, *numbers, times = sys.argv[1:]
    identity = Identity(folder=Path(folder))
    if role == "server":
        sites, words, rounds = map(int, numbers)

        async def run() -> None:
            await serve(identity, int(address), Server(sites, words, rounds, Path(times)))

        asyncio.run(run())
    else:
        words, rounds = map(int, numbers)
        asyncio.run(take_part(identity, address, words, rounds, Path(times)))


if __name__ == "__main__":
    main()
