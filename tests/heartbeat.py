"""A heartbeat on an event loop: how long other threads keep it from running.

Measured in the CPU time of this process, which stands still while other programs have the processor: a thread that
holds the interpreter's lock uses it up, a busy machine does not.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

BEAT_S = 0.005


async def longest_stall_s(work: Callable[[], Awaitable[object]]) -> float:
    """The most CPU time that this process used between two beats while `work` ran."""
    worst = 0.0

    async def beat() -> None:
        nonlocal worst
        last = time.process_time()
        while True:
            await asyncio.sleep(BEAT_S)
            now = time.process_time()
            worst, last = max(worst, now - last), now

    heart = asyncio.ensure_future(beat())
    await asyncio.sleep(0)
    try:
        await work()
        await asyncio.sleep(2 * BEAT_S)  # a beat that is overdue counts
    finally:
        heart.cancel()
    return worst
