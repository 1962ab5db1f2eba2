import asyncio
import itertools
import socket
import time

import pytest

from tests.virtual_time import Deadlock, HorizonPassed, VirtualTimeLoop, run


def test_an_hour_passes_at_once_and_exactly() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    began = time.perf_counter()
    assert run(main()) == pytest.approx(3600)
    assert time.perf_counter() - began < 360


def test_timers_fire_in_order_and_time_stands_still_between_them() -> None:
    async def note(at: float, log: list[tuple[float, float]]) -> None:
        await asyncio.sleep(at)
        log.append((at, asyncio.get_running_loop().time()))

    async def main() -> list[tuple[float, float]]:
        log: list[tuple[float, float]] = []
        async with asyncio.TaskGroup() as group:
            for at in (5.0, 0.001, 100_000.0, 5.0, 0.0):
                group.create_task(note(at, log))
        return log

    log = run(main())
    assert [at for at, _ in log] == [0.0, 0.001, 5.0, 5.0, 100_000.0]
    assert all(now == pytest.approx(at) for at, now in log)


def test_timeouts_and_sleeps_agree_on_the_time() -> None:
    async def main() -> str:
        try:
            async with asyncio.timeout(10):
                await asyncio.sleep(20)
        except TimeoutError:
            return f"{asyncio.get_running_loop().time():.3f}"
        return "no timeout"

    assert run(main()) == "10.000"


def test_a_million_seconds_of_ticks_never_stall_on_rounding() -> None:
    async def main() -> int:
        ticks = 0
        loop = asyncio.get_running_loop()
        while loop.time() < 1e6:
            await asyncio.sleep(333.333333333)
            ticks += 1
        return ticks

    assert run(main()) == 3001


def test_two_runs_are_equal() -> None:
    async def main() -> list[tuple[str, float]]:
        log: list[tuple[str, float]] = []

        async def worker(name: str, period: float) -> None:
            for _ in range(20):
                await asyncio.sleep(period)
                log.append((name, asyncio.get_running_loop().time()))

        await asyncio.gather(worker("a", 0.3), worker("b", 0.2), worker("c", 0.6))
        return log

    assert run(main()) == run(main())


def test_a_deadlock_is_reported_with_the_tasks_that_wait() -> None:
    async def wait_for_ever() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock, match="wait_for_ever"):
        run(wait_for_ever())


def test_a_loop_that_never_ends_meets_the_horizon() -> None:
    async def retry() -> None:
        for _ in itertools.count():
            await asyncio.sleep(60)

    with pytest.raises(HorizonPassed, match="retry"):
        run(retry(), horizon_s=10_000)


def test_the_clock_stands_still_while_a_thread_works() -> None:
    done: list[str] = []

    def work() -> None:
        time.sleep(0.02)
        done.append("done")

    async def main() -> tuple[list[str], float]:
        async with asyncio.timeout(0.001):
            await asyncio.to_thread(work)
        return done, asyncio.get_running_loop().time()

    assert run(main()) == (["done"], 0.0)


def test_real_sockets_are_refused() -> None:
    async def main(end: socket.socket) -> None:
        asyncio.get_running_loop().add_reader(end, print)

    near, far = socket.socketpair()
    with near, far, pytest.raises(RuntimeError, match="real sockets"):
        run(main(near))


def test_an_exception_comes_out_as_it_is() -> None:
    async def main() -> None:
        await asyncio.sleep(1)
        raise KeyError("x")

    with pytest.raises(KeyError):
        run(main())


def test_a_loop_can_be_driven_in_steps() -> None:
    loop = VirtualTimeLoop()
    try:
        loop.run_until_complete(asyncio.sleep(5))
        loop.run_until_complete(asyncio.sleep(5))
        assert loop.time() == pytest.approx(10)
    finally:
        loop.close()
