"""How often a score may start.

Owns one clock for all workers: every start goes through it, in the order of arrival.
Invariant: in any T seconds at most `rate × (T + BURST_S) + 1` turns are given. A cancelled waiter takes no turn.
"""

import asyncio

BURST_S = 0.1
"""Turns missed for this long may be caught up, so that timer jitter does not lower the rate."""


class RateLimit:
    """Waiters are let through first come, first served; None lets all through at once."""

    def __init__(self, rate_per_s: float | None) -> None:
        self._interval_s = 1 / rate_per_s if rate_per_s else 0.0
        self._next_s = 0.0
        self._line = asyncio.Lock()

    async def turn(self) -> None:
        """Return when the next score may start."""
        if not self._interval_s:
            return
        clock = asyncio.get_running_loop()
        async with self._line:
            await asyncio.sleep(self._next_s - clock.time())
            self._next_s = max(self._next_s, clock.time() - BURST_S) + self._interval_s
