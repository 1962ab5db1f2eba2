"""The rate limit holds in every window, in order, and cancelled waiters do not lower it."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.virtual_time import run
from treadle.reward.rate_limit import BURST_S, RateLimit


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


def test_two_rollouts_in_one_process_share_the_clock_of_an_endpoint() -> None:
    """Each on an event loop in a thread of its own, as two managers are."""
    began, turns = time.monotonic(), 0

    async def rollout() -> int:
        limit, given = RateLimit(20.0, shared_by=("http://judge",)), 0
        while time.monotonic() - began < 1.0:
            await limit.turn()
            given += 1
        return given

    with ThreadPoolExecutor(2) as threads:
        turns = sum(threads.map(lambda _: asyncio.run(rollout()), range(2)))
    took_s = time.monotonic() - began
    assert turns <= 20.0 * (took_s + BURST_S) + 3  # each looks at the time before its last turn


def test_limits_of_other_things_have_clocks_of_their_own() -> None:
    async def main() -> float:
        one, other = RateLimit(0.1, shared_by=("a",)), RateLimit(0.1, shared_by=("b",))
        begin = asyncio.get_running_loop().time()
        await one.turn()
        await other.turn()
        return asyncio.get_running_loop().time() - begin

    assert run(main()) == 0.0
