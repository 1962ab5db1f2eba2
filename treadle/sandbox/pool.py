"""Box pool: started boxes for sessions, so that a session does not wait for one to start.

A box is used by one session and never given to another. `take` gives a warm one, or starts one; another is started in
the background for a warm one that is taken. One that ended while it waited, or did not start, is left out.
Invariant: after `close` every box that the pool started and nothing took is stopped.
"""

import asyncio
from weakref import WeakKeyDictionary

from treadle.aio import abandon, run_shielded
from treadle.errors import SandboxFailure
from treadle.sandbox.protocol import BoxSettings, Sandbox
from treadle.sandbox.providers import open_box

CLOSE_S = 20.0


_POOLS: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[BoxSettings, BoxPool]]" = WeakKeyDictionary()


async def take_box(settings: BoxSettings) -> Sandbox:
    """A started box, the caller's to stop: one that waited, where the settings ask for such."""
    if not settings.warm:
        return await open_box(settings)
    pools = _POOLS.setdefault(asyncio.get_running_loop(), {})
    if settings not in pools:
        pools[settings] = BoxPool(settings, settings.warm)
    return await pools[settings].take()


async def close_boxes(settings: BoxSettings) -> None:
    """Stop the boxes of these settings that wait for `take_box` on this event loop."""
    pool = _POOLS.get(asyncio.get_running_loop(), {}).pop(settings, None)
    if pool is not None:
        await pool.close()


class BoxPool:
    """Boxes of one kind. `warm`: how many wait, started."""

    def __init__(self, settings: BoxSettings, warm: int = 0) -> None:
        self.settings = settings
        self._num_warm = warm
        self._warm: list[asyncio.Task[Sandbox]] = []
        self._closed = False
        self.fill()

    def fill(self) -> None:
        """Start as many as are to wait; on the event loop that uses them."""
        if self._num_warm and not self._closed:
            while len(self._warm) < self._num_warm:
                self._warm.append(asyncio.ensure_future(open_box(self.settings)))

    async def take(self) -> Sandbox:
        """A started box, the caller's to stop; SandboxFailure where none can be had."""
        if self._closed:
            raise SandboxFailure("the pool of boxes is closed")
        for _ in range(len(self._warm)):
            started = self._warm.pop(0)
            self.fill()
            box = await self._wait_for(started)
            if box is not None and box.alive:
                return box
            if box is not None:
                await box.stop()
        return await open_box(self.settings)

    async def _wait_for(self, started: "asyncio.Task[Sandbox]") -> Sandbox | None:
        """A box that is being started; None where that failed: its taker starts one anew, and hears why if it must."""
        try:
            return await asyncio.shield(started)
        except SandboxFailure:
            return None
        except asyncio.CancelledError:
            self._warm.append(started)
            if self._closed:
                await self.close()
            raise

    async def close(self) -> None:
        self._closed = True
        await run_shielded(self._stop_all(), CLOSE_S, "stopping warm boxes")

    async def _stop_all(self) -> None:
        boxes = await asyncio.gather(*self._warm, return_exceptions=True)
        for task in self._warm:
            abandon(task)
        self._warm.clear()
        await asyncio.gather(*(box.stop() for box in boxes if not isinstance(box, BaseException)))
