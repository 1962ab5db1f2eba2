"""An error of leaving never replaces the one that a block ended with."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from treadle.aio import first_error_of


@asynccontextmanager
async def breaks_on_leaving(log: list[str]) -> AsyncIterator[str]:
    try:
        yield "value"
    finally:
        log.append("left")
        raise RuntimeError("did not close")


def test_the_error_of_the_block_stands_with_its_own_cause_and_that_of_leaving_is_logged(caplog) -> None:
    left: list[str] = []

    async def main() -> None:
        async with first_error_of(breaks_on_leaving(left), "the part") as value:
            assert value == "value"
            raise LookupError("the cause") from KeyError("below")

    with pytest.raises(LookupError, match="the cause") as caught:
        asyncio.run(main())
    assert isinstance(caught.value.__cause__, KeyError) and left == ["left"]
    assert "the part did not close in order: RuntimeError: did not close" in caplog.text


def test_an_error_of_leaving_alone_is_raised() -> None:
    async def main() -> None:
        async with first_error_of(breaks_on_leaving([]), "the part"):
            pass

    with pytest.raises(RuntimeError, match="did not close"):
        asyncio.run(main())


def test_a_cancellation_is_no_error_to_be_replaced() -> None:
    async def main() -> None:
        async def body() -> None:
            async with first_error_of(breaks_on_leaving([]), "the part"):
                await asyncio.sleep(600)

        task = asyncio.ensure_future(body())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    asyncio.run(main())
