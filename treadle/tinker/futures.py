"""Futures of the Tinker API: accepted requests that run, and their results until they are fetched.

Owns results and failures by request id, the queue of finished samples that a sampling session polls, and the order of
a model's requests: by `seq_id`, whatever order they arrive in. A request that comes again with the same id is the same
request. Knows nothing of what requests do.
Waits: `wait` waits for a result, at most the given time. A request whose predecessor never comes fails after
`GAP_TIMEOUT_S`.
Invariant: a request runs once; its result stays `KEEP_S` after it is there, and no more than `MAX_RESULTS` are kept.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from treadle.aio import describe_error
from treadle.errors import ConfigError, TreadleError
from treadle.tinker.refusals import ApiError, RequestFailed

log = logging.getLogger(__name__)

KEEP_S = 1800.0
MAX_RESULTS = 20_000
MAX_QUEUED = 4096
"""Requests that wait for others of their model, or samples that are not finished."""
GAP_TIMEOUT_S = 600.0

Result = bytes | dict[str, Any]
"""Protobuf, or JSON."""
Work = Callable[[], Awaitable[Result]]


@dataclass(eq=False, slots=True)
class PendingResult:
    """One accepted request."""

    request_id: str
    owner: str
    """The session that it belongs to."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    result: Result | None = None
    failure: RequestFailed | None = None
    finished_at: float | None = None
    task: asyncio.Task[None] | None = None
    """Its own; None while it waits for others of its model, and where it runs in their turn."""
    has_begun: bool = False
    on_done: Callable[["PendingResult"], None] | None = None

    def finish(self, result: Result | None = None, failure: RequestFailed | None = None) -> None:
        if self.done.is_set():
            return
        self.result, self.failure, self.finished_at = result, failure, time.monotonic()
        self.done.set()
        if self.on_done is not None:
            self.on_done(self)

    @property
    def num_bytes(self) -> int:
        return len(self.result) if isinstance(self.result, bytes) else 0


class FutureStore:
    """Every accepted request that is not forgotten yet."""

    def __init__(self) -> None:
        self._entries: dict[str, PendingResult] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def get(self, request_id: str) -> PendingResult | None:
        return self._entries.get(request_id)

    def add(self, request_id: str, owner: str) -> PendingResult:
        """A new request, which something else will run."""
        assert request_id not in self._entries, "a request runs once"
        entry = self._entries[request_id] = PendingResult(request_id, owner)
        return entry

    def start(self, entry: PendingResult, work: Work) -> None:
        """Run a request now."""
        entry.task = self.spawn(run_entry(entry, work))

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that ends with the store."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    async def wait(self, request_id: str, timeout_s: float) -> PendingResult | None:
        """The request once it is done, or None where it is not in time; an ApiError where it is unknown."""
        entry = self._entries.get(request_id)
        if entry is None:
            raise ApiError(
                410, f"request {request_id} is unknown here: its result was dropped, or the server restarted"
            )
        try:
            async with asyncio.timeout(timeout_s):
                await entry.done.wait()
        except TimeoutError:
            return None
        return entry

    def cancel(self, request_id: str) -> None:
        """End a request that nothing waits for any more; one that runs in the order of its model goes to its end."""
        entry = self._entries.get(request_id)
        if entry is None:
            return
        if entry.task is not None:
            entry.task.cancel()
        if not entry.has_begun:
            entry.finish(failure=_cancelled())

    def forget(self, request_id: str) -> None:
        entry = self._entries.get(request_id)
        if entry is not None and entry.done.is_set():
            del self._entries[request_id]

    def forget_owner(self, owner: str) -> None:
        """End and drop every request of a session."""
        for entry in [entry for entry in self._entries.values() if entry.owner == owner]:
            if entry.task is not None:
                entry.task.cancel()
            entry.finish(failure=RequestFailed("the session has ended", by_user=False))
            del self._entries[entry.request_id]

    def sweep(self) -> None:
        """Drop results that were kept long enough, and the oldest beyond the limit."""
        now = time.monotonic()
        finished = [entry for entry in self._entries.values() if entry.finished_at is not None]
        surplus = len(finished) - MAX_RESULTS
        for number, entry in enumerate(finished):
            assert entry.finished_at is not None
            if number < surplus or now - entry.finished_at > KEEP_S:
                del self._entries[entry.request_id]

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_entry(entry: PendingResult, work: Work) -> None:
    """Run a request to its result or failure; one that has ended before it began does not run."""
    if entry.done.is_set():
        return
    entry.has_begun = True
    try:
        entry.finish(await work())
    except asyncio.CancelledError:
        entry.finish(failure=_cancelled())
        raise
    except RequestFailed as failure:
        entry.finish(failure=failure)
    except ApiError as error:
        entry.finish(failure=RequestFailed(error.reason))
    except TreadleError as error:
        entry.finish(failure=RequestFailed(str(error), by_user=isinstance(error, ConfigError)))
    except Exception as error:
        log.exception("a request of the Tinker API broke")
        entry.finish(failure=RequestFailed(f"the server broke: {describe_error(error)}", by_user=False))


def _cancelled() -> RequestFailed:
    return RequestFailed("the request was cancelled", by_user=False)


class OrderedRequests:
    """The requests of one model, run one after the other by their number."""

    def __init__(self, store: FutureStore, first: int) -> None:
        self._store = store
        self._next = first
        self._waiting: dict[int, tuple[PendingResult, Work]] = {}
        self._since = time.monotonic()
        self._drain: asyncio.Task[None] | None = None

    def submit(self, number: int, entry: PendingResult, work: Work) -> None:
        """Run a request when those before it have run."""
        if number < self._next:
            raise ApiError(400, f"seq_id {number} is of the past: {self._next} is next")
        if len(self._waiting) >= MAX_QUEUED:
            raise ApiError(429, f"{MAX_QUEUED} requests of this model wait already")
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting[number] = (entry, work)
        if self._drain is None and number == self._next:
            self._drain = self._store.spawn(self._run())

    async def _run(self) -> None:
        try:
            while self._next in self._waiting:
                entry, work = self._waiting.pop(self._next)
                self._next += 1
                await run_entry(entry, work)
                self._since = time.monotonic()
        finally:
            self._drain = None

    def expire(self) -> None:
        """Fail requests whose predecessor has not come for too long; those after them no longer wait for it."""
        if self._drain is None and self._waiting and time.monotonic() - self._since > GAP_TIMEOUT_S:
            for entry, _ in self._waiting.values():
                entry.finish(failure=RequestFailed(f"request {self._next} of this model never arrived", by_user=False))
            self._next = max(self._waiting) + 1
            self._waiting.clear()

    def close(self) -> None:
        """Run nothing more: what waits is dropped, and what runs is cancelled."""
        self._waiting.clear()
        if self._drain is not None:
            self._drain.cancel()


@dataclass(frozen=True, slots=True)
class CompletionEvent:
    """A finished sample, as a poll reports it."""

    cursor: int
    request_id: str
    failed: bool
    num_bytes: int


class CompletionQueue:
    """Finished requests of one sampling client, in the order in which they finished."""

    def __init__(self) -> None:
        self._events: list[CompletionEvent] = []
        self._cursor = 0
        self._changed = asyncio.Event()

    def add(self, entry: PendingResult) -> None:
        self._cursor += 1
        event = CompletionEvent(self._cursor, entry.request_id, entry.failure is not None, entry.num_bytes)
        self._events.append(event)
        self._changed.set()

    async def poll(self, after: int, timeout_s: float) -> tuple[list[CompletionEvent], int]:
        """What finished after a cursor, and the new cursor; waits until there is something."""
        self._events = [event for event in self._events if event.cursor > after]
        if not self._events and timeout_s > 0:
            self._changed.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
        return list(self._events), self._cursor
