"""The door of an engine: open, shut while the engine is paused, or closed for good.

Owns the requests that wait for it to open. Knows nothing of tokens. Invariant: whoever waits leaves when the door
opens, when its session is aborted or when the door closes for good, and leaves nothing behind when cancelled.
"""

import asyncio

from treadle.errors import EngineFailure


class _Visitor:
    """One request that waits."""

    __slots__ = ("aborted", "session", "since", "wake")

    def __init__(self, session: str) -> None:
        loop = asyncio.get_running_loop()
        self.session = session
        self.since = loop.time()
        self.aborted = False
        self.wake: asyncio.Future[None] = loop.create_future()

    def knock(self) -> None:
        if not self.wake.done():
            self.wake.set_result(None)


class Gate:
    """Read `shut` first: an open gate costs a request one attribute."""

    __slots__ = ("_closed", "_visitors", "shut")

    def __init__(self) -> None:
        self.shut = False
        self._closed: str | None = None
        self._visitors: dict[_Visitor, None] = {}

    async def admit(self, session: str) -> bool:
        """Wait until the gate opens. False: the session was aborted meanwhile. Its deadline is the caller's."""
        while self.shut:
            if self._closed:
                raise EngineFailure(self._closed)
            if not await self._wait(session):
                return False
        return True

    async def _wait(self, session: str) -> bool:
        visitor = _Visitor(session)
        self._visitors[visitor] = None
        try:
            await visitor.wake
        finally:
            del self._visitors[visitor]
        return not visitor.aborted

    def pause(self) -> None:
        self.shut = True

    def resume(self) -> None:
        """Let everyone in, unless the gate is closed for good."""
        if self._closed is None:
            self.shut = False
            self._wake_all()

    def abort(self, session: str | None = None) -> None:
        """Turn away those who wait: one session, or all."""
        for visitor in self._visitors:
            if session is None or visitor.session == session:
                visitor.aborted = True
                visitor.knock()

    def close(self, why: str) -> bool:
        """Turn away those who wait, and everyone after, with `why`. False: it was closed already."""
        first = self._closed is None
        self._closed, self.shut = self._closed or why, True
        self._wake_all()
        return first

    def _wake_all(self) -> None:
        for visitor in self._visitors:
            visitor.knock()

    def waiting(self) -> tuple[tuple[str, float], ...]:
        """The session and the start of each wait, oldest first."""
        return tuple((visitor.session, visitor.since) for visitor in self._visitors)
