"""How a run is asked to stop: at once where nothing is lost by it, and else after what is under way.

Owns the wish alone. Whoever waits for something long waits `unless` the wish comes first; whoever may not be
interrupted looks at `requested` afterwards.
"""

import asyncio
import signal
import threading
from collections.abc import Awaitable
from typing import TypeVar

from treadle.terminal import warn

T = TypeVar("T")


class Interrupted(Exception):
    """Somebody asked the run to stop; everything that is done is saved."""


class Stop:
    """The wish to stop; never taken back."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._requests = 0

    def request(self) -> None:
        """Stop when nothing is lost by it. After a second wish, one more Ctrl-C ends the process at once."""
        self._event.set()
        self._requests += 1
        if self._requests == 2 and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            warn("asked to stop again: the run saves what it has; once more ends it at once")

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    async def unless(self, work: Awaitable[T]) -> T:
        """What `work` comes to; Interrupted, and `work` cancelled to its end, where the wish comes first."""
        working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise Interrupted
        finally:
            stopping.cancel()
            if not working.done():
                working.cancel()
                await asyncio.wait({working})
