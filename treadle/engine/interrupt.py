"""Ending another task's wait early, and telling that apart from the task being cancelled.

Owns the bookkeeping that `asyncio.timeout` does for itself, for waits that end for other reasons too. Cheaper than a
timeout or a task for each wait: a request that is never interrupted pays for one small object.
Invariant: after the `with` block the task's count of cancellations is what it was before.
"""

import asyncio
from types import TracebackType


class Interrupted(Exception):
    """The wait was ended; the text says why."""


class Interrupt:
    """One wait of the current task: `with interrupt: await …`."""

    __slots__ = ("_before", "_task", "reason")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "a wait happens in a task"
        self._task = task
        self._before = task.cancelling()
        self.reason: str | None = None

    def fire(self, reason: str) -> None:
        """End the wait with `Interrupted(reason)`; the first reason counts. For others than the waiting task."""
        if self.reason is None:
            self.reason = reason
            self._task.cancel()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.reason is None:
            return
        ours_alone = self._task.uncancel() <= self._before
        if ours_alone and kind is asyncio.CancelledError:
            raise Interrupted(self.reason) from None


class Flight(Interrupt):
    """The wait for one request's answer."""

    __slots__ = ("due_from", "grace_until", "session", "started")

    def __init__(self, session: str, started: float) -> None:
        super().__init__()
        self.session = session
        self.started = self.due_from = started
        """`due_from`: where its deadline begins to count."""
        self.grace_until: float | None = None
        """Its time is over, and its engine was asked for the tokens it has; none come later than this."""


class Flights(dict[Flight, None]):
    """The requests on their way, oldest first. A dict, so that asking how many costs next to nothing."""

    __slots__ = ("_idle",)

    def __init__(self) -> None:
        super().__init__()
        self._idle: asyncio.Event | None = None

    def land(self, flight: Flight) -> None:
        """A request ended, however it did."""
        del self[flight]
        if self._idle is not None and not self:
            self._idle.set()

    def end(self, reason: str, session: str | None = None) -> None:
        """Interrupt the requests of one session, or all; whoever sent them decides what next."""
        for flight in self:
            if session is None or flight.session == session:
                flight.fire(reason)

    async def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is on its way; False when that takes longer."""
        if self._idle is None:
            self._idle = asyncio.Event()
        try:
            async with asyncio.timeout(timeout_s):
                while self:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True
