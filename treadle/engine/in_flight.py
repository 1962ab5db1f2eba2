"""In-flight requests, their abort, and the pause gate in front of them.

Owns the two waits of a request. `PauseGate` holds requests back while an engine is paused and fails them once it is
closed. `InFlightRequest` is a wait that another task may end early; it tells that apart from being cancelled: what
`asyncio.timeout` does for itself, for other reasons too. Cheap: an open gate costs a request one attribute, a request
that is never interrupted one small object. Knows nothing of tokens.
Invariants: a held request leaves when the gate opens, when its session is aborted or when the gate closes, and leaves
nothing behind when cancelled. After the `with` block the task's count of cancellations is what it was before.
"""

import asyncio
from types import TracebackType
from typing import Self

from treadle.errors import EngineFailure


class _HeldRequest:
    """One request that waits."""

    __slots__ = ("aborted", "session", "since", "wake")

    def __init__(self, session: str) -> None:
        loop = asyncio.get_running_loop()
        self.session = session
        self.since = loop.time()
        self.aborted = False
        self.wake: asyncio.Future[None] = loop.create_future()

    def wake_up(self) -> None:
        if not self.wake.done():
            self.wake.set_result(None)


class PauseGate:
    """Read `shut` first: an open gate costs a request one attribute."""

    __slots__ = ("_closed", "_held", "shut")

    def __init__(self) -> None:
        self.shut = False
        self._closed: str | None = None
        self._held: dict[_HeldRequest, None] = {}

    async def admit(self, session: str) -> bool:
        """Wait until the gate opens. False: the session was aborted meanwhile. Its deadline is the caller's."""
        while self.shut:
            if self._closed:
                raise EngineFailure(self._closed)
            if not await self._wait(session):
                return False
        return True

    async def _wait(self, session: str) -> bool:
        held = _HeldRequest(session)
        self._held[held] = None
        try:
            await held.wake
        finally:
            del self._held[held]
        return not held.aborted

    def pause(self) -> None:
        self.shut = True

    def resume(self) -> None:
        """Admit all held requests, unless the gate is closed for good."""
        if self._closed is None:
            self.shut = False
            self._wake_all()

    def abort(self, session: str | None = None) -> None:
        """Abort held requests: of one session, or all."""
        for held in self._held:
            if session is None or held.session == session:
                held.aborted = True
                held.wake_up()

    def close(self, why: str) -> bool:
        """Fail held and later requests with `why`. False: it was closed already."""
        first = self._closed is None
        self._closed, self.shut = self._closed or why, True
        self._wake_all()
        return first

    def _wake_all(self) -> None:
        for held in self._held:
            held.wake_up()

    def waiting(self) -> tuple[tuple[str, float], ...]:
        """The session and the start of each wait, oldest first."""
        return tuple((held.session, held.since) for held in self._held)


class WaitInterrupted(Exception):
    """The wait was ended; the text says why."""


class InFlightRequest:
    """The wait of the current task for one request's answer: `with InFlightRequest(…): await …`.

    It is listed among `requests` meanwhile, and another task may end it early.
    """

    __slots__ = ("_before", "_requests", "_task", "due_from", "grace_until", "reason", "session", "started")

    def __init__(self, requests: "InFlightRequests", session: str, started: float) -> None:
        task = asyncio.current_task()
        assert task is not None, "a wait happens in a task"
        self._task = task
        self._before = task.cancelling()
        self._requests = requests
        self.reason: str | None = None
        self.session = session
        self.started = self.due_from = started
        """`due_from`: where its deadline begins to count."""
        self.grace_until: float | None = None
        """Its time is over, and its engine was asked for the tokens it has; none come later than this."""

    def interrupt(self, reason: str) -> None:
        """End the wait with `WaitInterrupted(reason)`; the first reason counts. For others than the waiting task."""
        if self.reason is None:
            self.reason = reason
            self._task.cancel()

    def __enter__(self) -> Self:
        self._requests[self] = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._requests.remove(self)
        if self.reason is None:
            return
        ours_alone = self._task.uncancel() <= self._before
        if ours_alone and kind is asyncio.CancelledError:
            raise WaitInterrupted(self.reason) from None


class InFlightRequests(dict[InFlightRequest, None]):
    """The requests in flight, oldest first. A dict, so that asking how many costs next to nothing."""

    __slots__ = ("_idle",)

    def __init__(self) -> None:
        super().__init__()
        self._idle: asyncio.Event | None = None

    def remove(self, request: InFlightRequest) -> None:
        """A request ended, however it did."""
        del self[request]
        if self._idle is not None and not self:
            self._idle.set()

    def interrupt(self, reason: str, session: str | None = None) -> None:
        """Interrupt the requests of one session, or all; the caller decides what follows."""
        for request in self:
            if session is None or request.session == session:
                request.interrupt(reason)

    async def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight; False when that takes longer."""
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
