"""Few frames are on their way into the network at once, and a slow link holds up nobody else."""

from __future__ import annotations

import asyncio

import pytest

from coordinator import streams
from coordinator.streams import Turns

COUNT = 3


async def most_at_once(turns: Turns, *, wanted: bool) -> int:
    inside = most = 0

    async def send() -> None:
        nonlocal inside, most
        async with turns.one(wanted=wanted):
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(send() for _ in range(20)))
    return most


def test_only_so_many_frames_are_under_way() -> None:
    assert asyncio.run(most_at_once(Turns(COUNT), wanted=True)) == COUNT


def test_other_messages_do_not_wait() -> None:
    assert asyncio.run(most_at_once(Turns(COUNT), wanted=False)) == 20


def test_a_slow_link_gives_its_turn_away_and_does_not_get_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PATIENCE_SECONDS", 0.01)

    async def run() -> int:
        turns, freed = Turns(COUNT), asyncio.Event()

        async def stuck() -> None:
            async with turns.one(wanted=True):
                await freed.wait()

        slow = [asyncio.create_task(stuck()) for _ in range(COUNT)]
        await asyncio.sleep(0)
        found = await asyncio.wait_for(most_at_once(turns, wanted=True), 5)
        freed.set()
        await asyncio.gather(*slow)
        assert await most_at_once(turns, wanted=True) == COUNT  # neither more nor fewer turns than before
        return found

    assert asyncio.run(run()) == COUNT


def test_a_turn_ends_with_an_error() -> None:
    async def run() -> int:
        turns = Turns(COUNT)
        for _ in range(COUNT + 1):
            with pytest.raises(OSError):
                async with turns.one(wanted=True):
                    raise OSError
        return await asyncio.wait_for(most_at_once(turns, wanted=True), 5)

    assert asyncio.run(run()) == COUNT
