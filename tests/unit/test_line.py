"""Whose turn it is among requests in a queue, and how much they may hold. No clock: only order matters."""

import asyncio

import pytest

from kvcellar.ledger.room import Room
from kvcellar.server.line import Line
from tests.support import MemoryTable, full_group, namespace, window_group


def make_line(*slots):
    groups = (full_group(), window_group(2))[: len(slots)]
    room = Room(namespace(groups=groups))
    for shelf, count in zip(room.shelves, slots, strict=True):
        shelf.add_rack(0, MemoryTable(count))
    return Line(room)


@pytest.mark.parametrize(("slots", "limit"), [((40,), 10), ((40, 20), 5), ((3,), 0)])
def test_a_quarter_of_the_smallest_shelf_is_for_queues(slots, limit):
    assert make_line(*slots).limit == limit


def test_all_is_given_that_an_empty_line_has():
    line = make_line(40)
    assert asyncio.run(line.take(100)) == line.held == 10


def test_whoever_does_not_fit_waits_for_those_before_him_and_nobody_overtakes_him():
    async def play():
        line, log = make_line(40), []

        async def come(name, chunks):
            async with line.turn:
                log.append((name, await line.take(chunks)))

        comers = [("first", 6), ("large", 8), ("small", 1)]
        tasks = [asyncio.create_task(come(*one)) for one in comers]
        await drained()
        assert log == [("first", 6)]
        line.leave(3)
        await drained()
        assert log == [("first", 6)], "not enough yet"
        line.leave(3)
        await asyncio.gather(*tasks)
        assert log == [("first", 6), ("large", 8), ("small", 1)]
        assert line.held == 9

    asyncio.run(play())


def test_one_that_gives_up_while_it_waits_lets_the_next_have_its_turn():
    async def play():
        line = make_line(40)
        assert await line.take(10) == 10

        async def come(chunks):
            async with line.turn:
                return await line.take(chunks)

        first, second = asyncio.create_task(come(5)), asyncio.create_task(come(4))
        await drained()
        first.cancel()
        await drained()
        line.leave(10)
        assert await second == line.held == 4
        assert first.cancelled()

    asyncio.run(play())


async def drained():
    """Everybody has gone as far as he can."""
    for _ in range(10):
        await asyncio.sleep(0)
