"""Few vectors are on their way at once, other messages do not wait, and a slow link holds up nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from coordinator import send_queue
from coordinator.send_queue import BULKY, VECTORS_AT_ONCE, Stream, Turns
from lazaret.errors import RemoteProtocolError
from security.secagg.fields import Wire
from security.secagg.messages import Adverts
from security.secagg.relay import Ping

COUNT = 3
SITES = 20
FRAMES = 4
LAST = Ping(number=99)


class Vectors:
    """Counts how many vectors are begun and not yet through."""

    def __init__(self) -> None:
        self.begun = self.most = 0

    def frames(self) -> Iterator[Wire]:
        self.begun += 1
        self.most = max(self.most, self.begun)
        for number in range(FRAMES):
            yield Ping(number=number)
        self.begun -= 1


def stream_with(messages: Iterator[Wire], *, vector: bool) -> Stream:
    stream = Stream("site", 1, "")
    stream.put(messages, vector=vector)
    stream.put([LAST])
    return stream


async def send(turns: Turns, stream: Stream) -> list[Wire]:
    sent: list[Wire] = []
    with turns.of_stream() as turn:
        while not sent or sent[-1] != LAST:
            message = await stream.next(turn)
            assert message is not None
            sent.append(message)
            await asyncio.sleep(0)
    return sent


async def most_at_once(turns: Turns, *, vector: bool) -> int:
    vectors = Vectors()
    sent = await asyncio.gather(*(send(turns, stream_with(vectors.frames(), vector=vector)) for _ in range(SITES)))
    assert [len(found) for found in sent] == [FRAMES + 1] * SITES
    return vectors.most


async def hold(turns: Turns, count: int) -> list[asyncio.Task[None]]:
    """So many streams in the midst of a vector, none of which moves."""

    async def stuck() -> None:
        stream = stream_with(Vectors().frames(), vector=True)
        with turns.of_stream() as turn:
            await stream.next(turn)
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(stuck()) for _ in range(count)]
    await asyncio.sleep(0.01)
    return tasks


async def release(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_only_so_many_vectors_are_under_way() -> None:
    assert asyncio.run(most_at_once(Turns(COUNT), vector=True)) == COUNT


def test_other_messages_do_not_wait() -> None:
    assert asyncio.run(most_at_once(Turns(COUNT), vector=False)) == SITES


def test_a_vector_that_waits_is_not_made() -> None:
    async def run() -> int:
        turns, waiting = Turns(COUNT), Vectors()
        held = await hold(turns, COUNT)
        late = asyncio.create_task(send(turns, stream_with(waiting.frames(), vector=True)))
        await asyncio.sleep(0.01)
        begun = waiting.most
        await release(held)
        await late
        return begun

    assert asyncio.run(run()) == 0


def test_a_slow_link_gives_its_turn_away_and_does_not_get_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_queue, "PATIENCE_SECONDS", 0.02)

    async def run() -> None:
        turns = Turns(COUNT)
        slow = await hold(turns, COUNT)
        assert await asyncio.wait_for(most_at_once(turns, vector=True), 5) == COUNT
        await release(slow)
        assert await most_at_once(turns, vector=True) == COUNT  # neither more nor fewer turns than before

    asyncio.run(run())


def test_a_link_that_is_slow_but_steady_gives_its_turn_away_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_queue, "LONGEST_SECONDS", 0.1)

    async def run() -> None:
        turns = Turns(1)

        async def steady() -> None:
            with turns.of_stream() as turn:
                while True:
                    await turn.frame()
                    await asyncio.sleep(0.01)

        slow = [asyncio.create_task(steady())]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(most_at_once(turns, vector=True), 5) == 1
        await release(slow)
        assert await most_at_once(turns, vector=True) == 1

    asyncio.run(run())


async def order_of_a_check_and_a_sum(turns: Turns) -> list[str]:
    """One site has its sum and asks for what checks it, while the sum of another is on its way."""
    order: list[str] = []

    async def frames(name: str, *, check: bool) -> None:
        with turns.of_stream() as turn:
            for _ in range(FRAMES):
                await turn.frame(check=check)
                order.append(name)
                await asyncio.sleep(0.005)

    sums = asyncio.create_task(frames("sum", check=False))
    await asyncio.sleep(0)
    await asyncio.gather(sums, frames("check", check=True), frames("late sum", check=False))
    return order


def test_what_checks_a_sum_lets_every_sum_pass() -> None:
    order = asyncio.run(order_of_a_check_and_a_sum(Turns(COUNT)))
    assert len(order) == 3 * FRAMES
    assert order[-FRAMES:] == ["check"] * FRAMES


def test_a_check_does_not_wait_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums on slow links, or to a site that connects again and again, cannot hold it up."""
    monkeypatch.setattr(send_queue, "LONGEST_SECONDS", 0.05)
    monkeypatch.setattr(send_queue, "PATIENCE_SECONDS", 60)

    async def run() -> None:
        turns = Turns(COUNT)
        ended = asyncio.Event()

        async def sums() -> None:
            while not ended.is_set():
                with turns.of_stream() as turn:
                    await turn.frame()
                    await asyncio.sleep(0.03)

        overlapping = [asyncio.create_task(sums())]
        await asyncio.sleep(0.015)
        overlapping.append(asyncio.create_task(sums()))
        with turns.of_stream() as turn:
            await asyncio.wait_for(turn.frame(check=True), 5)
        ended.set()
        await asyncio.gather(*overlapping)

    asyncio.run(run())


def test_a_queue_says_which_of_its_vectors_check_a_sum() -> None:
    async def run() -> bool:
        turns = Turns(COUNT)
        stream = Stream("site", 1, "")
        stream.put(Vectors().frames(), vector=True, check=True)
        with turns.of_stream() as first, turns.of_stream() as second:
            await first.frame()
            waiting = asyncio.create_task(stream.next(second))
            await asyncio.sleep(0.01)
            waited = not waiting.done()
            first.end()
            assert await asyncio.wait_for(waiting, 5) == Ping(number=0)
            return waited

    assert asyncio.run(run())


def test_without_patience_for_it_a_slow_link_holds_up_the_others_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_queue, "PATIENCE_SECONDS", 60)

    async def run() -> None:
        turns = Turns(COUNT)
        slow = await hold(turns, COUNT)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(most_at_once(turns, vector=True), 0.2)
        await release(slow)

    asyncio.run(run())


def test_a_turn_ends_with_its_vector_and_with_an_error() -> None:
    async def run() -> int:
        turns = Turns(COUNT)
        for _ in range(COUNT + 1):
            with suppress(OSError), turns.of_stream() as turn:
                await turn.frame()
                raise OSError
        with ExitStack() as still_open:
            for _ in range(COUNT + 1):
                turn = still_open.enter_context(turns.of_stream())
                stream = stream_with(Vectors().frames(), vector=True)
                while await asyncio.wait_for(stream.next(turn), 5) != LAST:
                    pass
            return await asyncio.wait_for(most_at_once(turns, vector=True), 5)

    assert asyncio.run(run()) == COUNT


def test_what_is_closed_is_not_sent_any_more() -> None:
    async def run() -> list[Wire | None]:
        turns = Turns(COUNT)
        stream = stream_with(Vectors().frames(), vector=True)
        with turns.of_stream() as turn:
            found = [await stream.next(turn)]
            stream.close(LAST)
            found += [await stream.next(turn), await stream.next(turn)]
        return found

    assert asyncio.run(run()) == [Ping(number=0), LAST, None]


def test_what_a_site_leaves_unread_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_queue, "MOST_QUEUED", 5)

    async def waiting(count: int) -> tuple[int, bool]:
        stream = Stream("site", 1, "")
        unread = asyncio.create_task(stream.unread())
        for number in range(count):
            stream.put([Ping(number=number)])
        kept = 0
        while not stream.idle:
            kept += stream.take() is not None
        await asyncio.wait([unread], timeout=0.05)
        over = unread.done() and isinstance(unread.exception(), RemoteProtocolError)
        unread.cancel()
        return kept, over

    assert asyncio.run(waiting(5)) == (5, False)
    assert asyncio.run(waiting(50)) == (5, True)


async def bulky_at_once(message: Wire) -> int:
    """How many streams have a message in hand, if a shell queues it for all of them at the same moment."""
    turns, held, most = Turns(), 0, 0

    async def one() -> None:
        nonlocal held, most
        stream = Stream("site", 1, "")
        stream.put([message], vector=type(message) in BULKY)
        with turns.of_stream() as turn:
            assert await stream.next(turn) == message
            held += 1
            most = max(most, held)
            await asyncio.sleep(0.01)
            held -= 1

    await asyncio.gather(*(one() for _ in range(SITES)))
    return most


def test_messages_that_grow_with_the_cohort_are_not_encoded_for_all_at_once() -> None:
    assert asyncio.run(bulky_at_once(Adverts(ctx=bytes(32), adverts=()))) == VECTORS_AT_ONCE
    assert asyncio.run(bulky_at_once(Ping(number=1))) == SITES
