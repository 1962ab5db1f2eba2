"""When the policy's weights are those that engines were given last, and stay so for a while.

Owns the order between a training step, which changes the weights, and whoever reads them meanwhile: an engine that is
started again, and needs what the others have.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Stillness:
    """Used on one loop. Starts unsettled: nobody has been given anything."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._version: int | None = None
        self._settled = asyncio.Event()
        self._waiting = 0
        self._wanted = asyncio.Event()

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """A training step. Until the next push, the weights are nobody's."""
        async with self._lock:
            self._version = None
            self._settled.clear()
            yield

    @asynccontextmanager
    async def idle(self) -> AsyncIterator[None]:
        """Between two training steps: the policy computes nothing."""
        async with self._lock:
            yield

    def settle(self, version: int) -> None:
        """Engines were given the weights as they are, under this number."""
        self._version = version
        self._settled.set()

    @asynccontextmanager
    async def still(self) -> AsyncIterator[int]:
        """Wait until the weights are those that engines have, and keep them so; their version."""
        while True:
            await self._wait_settled()
            async with self._lock:
                if self._version is not None:
                    yield self._version
                    return

    async def wanted(self) -> None:
        """Wait until somebody waits for the next push."""
        await self._wanted.wait()

    async def _wait_settled(self) -> None:
        if self._settled.is_set():
            return
        self._waiting += 1
        self._wanted.set()
        try:
            await self._settled.wait()
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._wanted.clear()
