"""Rate limit: how often a score may start.

Owns the clocks of this process: limits of the same thing share one, whichever rollout uses it, so two rollouts are
together no faster than one. Every start goes through it, on one event loop in the order of arrival.
Invariant: in any T seconds at most `rate × (T + BURST_S) + 1` turns are given. A cancelled waiter takes no turn.
"""

import asyncio
from collections.abc import Hashable
from threading import Lock
from weakref import WeakValueDictionary

BURST_S = 0.1
"""Turns missed for this long may be caught up, so that timer jitter does not lower the rate."""


class RateClock:
    """When the next turn is; for any number of threads."""

    def __init__(self, rate_per_s: float) -> None:
        self._interval_s = 1 / rate_per_s
        self._next_s = 0.0
        self._lock = Lock()

    def take(self, now: float) -> float:
        """Take the turn that is due and return 0; else return how long it is until one is."""
        with self._lock:
            if now < self._next_s:
                return self._next_s - now
            self._next_s = max(self._next_s, now - BURST_S) + self._interval_s
            return 0.0


_CLOCKS: WeakValueDictionary[Hashable, RateClock] = WeakValueDictionary()
_CLOCKS_LOCK = Lock()


class RateLimit:
    """Waiters are let through first come, first served; None lets all through at once.

    `shared_by` is what is limited: limits with an equal one have a clock in common.
    """

    def __init__(self, rate_per_s: float | None, shared_by: Hashable | None = None) -> None:
        self._clock = _clock(rate_per_s, shared_by) if rate_per_s else None
        self._line = asyncio.Lock()

    async def turn(self) -> None:
        """Return when the next score may start."""
        if self._clock is None:
            return
        loop = asyncio.get_running_loop()
        async with self._line:
            wait_s = self._clock.take(loop.time())
            while wait_s:  # another thread may have taken the turn by then
                await asyncio.sleep(wait_s)
                wait_s = self._clock.take(loop.time())


def _clock(rate_per_s: float, shared_by: Hashable | None) -> RateClock:
    if shared_by is None:
        return RateClock(rate_per_s)
    with _CLOCKS_LOCK:
        return _CLOCKS.setdefault((rate_per_s, shared_by), RateClock(rate_per_s))
