"""The bounded buffer: order, room, the end, cancelled waits, and work that is linear in its items."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from treadle.aio import BoundedBuffer


def test_items_come_out_in_order_and_never_more_than_fit() -> None:
    async def run() -> tuple[list[int], int]:
        buffer, found, most = BoundedBuffer[int](3), list[int](), 0

        async def fill() -> None:
            for at in range(10):
                await buffer.put(at)
            await buffer.close()

        filling = asyncio.ensure_future(fill())
        while taken := await buffer.take():
            most = max(most, len(taken))
            found += taken
        await filling
        return found, most

    assert asyncio.run(run()) == (list(range(10)), 3)


def test_many_waiting_puts_are_each_looked_at_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, wait_for = 0, asyncio.Condition.wait_for

    def watched(condition: asyncio.Condition, is_so: Callable[[], Any]) -> Any:
        def look() -> Any:
            nonlocal looks
            looks += 1
            return is_so()

        return wait_for(condition, look)

    monkeypatch.setattr(asyncio.Condition, "wait_for", watched)

    async def run(count: int) -> int:
        buffer = BoundedBuffer[int](4)
        puts = [asyncio.ensure_future(buffer.put(at)) for at in range(count)]
        found = list[int]()
        while len(found) < count:
            found += await buffer.take()
        await asyncio.gather(*puts)
        assert sorted(found) == list(range(count))
        return looks

    assert asyncio.run(run(400)) < 4 * 400, "a wake-up of all waiting puts for each item is quadratic"


def test_a_cancelled_put_does_not_take_anothers_place() -> None:
    async def run() -> list[int]:
        buffer = BoundedBuffer[int](1)
        await buffer.put(0)
        first, second = (asyncio.ensure_future(buffer.put(at)) for at in (1, 2))
        await asyncio.sleep(0)
        found = await buffer.take()
        first.cancel()  # it was woken, and has not run yet
        async with asyncio.timeout(10):
            found += await buffer.take()
            await second
        return found

    assert asyncio.run(run()) == [0, 2]
