"""The rate limit holds in every window, in order, and is not worn down by those who leave."""

import asyncio

import pytest

from tests.virtual_time import run
from treadle.reward.rate import BURST_S, RateLimit


async def starts(rate: float, count: int) -> list[float]:
    limit, clock, times = RateLimit(rate), asyncio.get_running_loop(), []

    async def one() -> None:
        await limit.turn()
        times.append(clock.time())

    await asyncio.gather(*(one() for _ in range(count)))
    return times


@pytest.mark.parametrize("rate", [0.5, 3.0, 100.0])
def test_no_window_holds_more_starts_than_the_rate_allows(rate: float) -> None:
    times = run(starts(rate, 50))
    for first in range(50):
        for last in range(first, 50):
            window = times[last] - times[first]
            assert last - first + 1 <= rate * (window + BURST_S) + 1 + 1e-6
    assert times[-1] - times[0] == pytest.approx(49 / rate, rel=0.25)


def test_no_rate_is_no_wait() -> None:
    async def main() -> float:
        limit, clock = RateLimit(None), asyncio.get_running_loop()
        begin = clock.time()
        for _ in range(100):
            await limit.turn()
        return clock.time() - begin

    assert run(main()) == 0.0


def test_turns_are_given_in_order_and_a_waiter_who_leaves_takes_none() -> None:
    async def main() -> tuple[list[int], float]:
        limit, clock, order = RateLimit(1.0), asyncio.get_running_loop(), []

        async def one(number: int) -> None:
            await limit.turn()
            order.append(number)

        begin = clock.time()
        async with asyncio.TaskGroup() as group:
            waiters = [group.create_task(one(number)) for number in range(6)]
            await asyncio.sleep(0.5)
            for waiter in waiters[2:4]:
                waiter.cancel()
        return order, clock.time() - begin

    order, took_s = run(main())
    assert order == [0, 1, 4, 5]
    assert took_s == pytest.approx(3.0, abs=0.2)
