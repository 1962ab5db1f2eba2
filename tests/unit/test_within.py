"""A deadline around work: `aio.within`."""

import asyncio

import pytest

from treadle.aio import Expired, within


async def answer() -> int:
    return 3


async def answer_later(steps: int = 3) -> int:
    for _ in range(steps):
        await asyncio.sleep(0)
    return steps


def test_work_that_waits_for_nothing_costs_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("a timer was made")

        monkeypatch.setattr(asyncio.get_running_loop(), "call_at", refuse)
        assert await within(60, answer()) == 3
        with pytest.raises(AssertionError, match="timer"):
            await within(60, answer_later())

    asyncio.run(run())


def test_work_that_waits_gives_its_value() -> None:
    async def run() -> None:
        assert await within(60, answer_later(5)) == 5
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_result, "done")
        assert await within(60, future) == "done"

    asyncio.run(run())


def test_a_deadline_cancels_the_work_and_is_told_from_a_timeout_of_its_own() -> None:
    async def run() -> None:
        seen = []

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

        with pytest.raises(Expired):
            await within(0.001, work())
        assert seen == ["cancelled"]

        async def own(late: bool) -> None:
            if late:
                await asyncio.sleep(0)
            raise TimeoutError("own")

        for late in (False, True):
            with pytest.raises(TimeoutError, match="own"):
                await within(60, own(late))

    asyncio.run(run())


def test_work_may_outlive_what_is_thrown_into_it() -> None:
    async def run() -> None:
        async def work() -> str:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return await answer_text()
            return ""

        async def answer_text() -> str:
            await asyncio.sleep(0)
            return "saved"

        task = asyncio.ensure_future(within(60, work()))
        await asyncio.sleep(0)
        task.cancel()
        assert await task == "saved"

    asyncio.run(run())
