"""Thread pool for blocking tools and environments, used from one event loop.

Owns how many threads run at once and what happens to those that never return. A thread cannot be stopped: one whose
job outlives its deadline is left alone and replaced, up to a limit, and does not keep the process from ending.
A BaseException of the job is raised where the call is awaited, and nowhere else.
Waits: a call waits for a free thread before its deadline starts, so that a queue is never mistaken for a slow tool.
Invariant: all state changes on the event loop; a thread only runs its job and posts the result.
"""

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread

from treadle.aio import Expired, within
from treadle.errors import Failure, ToolFailure

MAX_THREADS = 64
MAX_STUCK = 64


@dataclass(frozen=True, slots=True)
class ThreadResult:
    """How a job ended."""

    value: object = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class _ThreadJob:
    run: Callable[[], object]
    post: Callable[[ThreadResult], None]


class DaemonThreadPool:
    """A pool of daemon threads. Built and used on one event loop."""

    def __init__(
        self, max_threads: int = MAX_THREADS, max_stuck: int = MAX_STUCK, failure: type[Failure] = ToolFailure
    ) -> None:
        self._free = asyncio.Semaphore(max_threads)
        self._idle: list[_PoolThread] = []
        self._max_threads = max_threads
        self._max_stuck = max_stuck
        self._failure, self._what = failure, failure.boundary
        self.num_stuck = 0
        self._closed = False

    async def run(self, function: Callable[[], object], timeout_s: float) -> object:
        """What `function` returns or raises; Expired if that takes longer than `timeout_s`."""
        await self._wait_for_turn(timeout_s)
        worker = self._idle.pop() if self._idle else _PoolThread()
        done: asyncio.Future[ThreadResult] = asyncio.get_running_loop().create_future()
        worker.start(function, lambda ran: self._finish(worker, done, ran))
        try:
            ran = await within(timeout_s, done)
        finally:
            self.num_stuck += done.cancelled()
            self._free.release()
        if ran.error is not None:
            raise ran.error
        return ran.value

    async def _wait_for_turn(self, timeout_s: float) -> None:
        if self.num_stuck >= self._max_stuck:
            raise self._failure(f"{self.num_stuck} threads are stuck in {self._what}s that outlived their deadlines")
        if not self._free.locked():
            await self._free.acquire()
            return
        try:
            await within(timeout_s, self._free.acquire())
        except Expired:
            raise self._failure(f"no thread became free for a blocking {self._what} within {timeout_s:g} s") from None

    def _finish(self, worker: "_PoolThread", done: asyncio.Future[ThreadResult], ran: ThreadResult) -> None:
        """Runs on the loop when a job has ended, perhaps long after its caller gave up."""
        if done.cancelled():
            self.num_stuck -= 1
        else:
            done.set_result(ran)
        if self._closed or len(self._idle) >= self._max_threads:
            worker.stop()
        else:
            self._idle.append(worker)

    def close(self) -> None:
        """Let the idle threads end, and the busy ones when they are done."""
        self._closed = True
        while self._idle:
            self._idle.pop().stop()


class _PoolThread:
    """One thread and the queue it takes its jobs from; the queue never holds more than one."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[_ThreadJob | None] = SimpleQueue()
        Thread(target=self._work, name="treadle-tool", daemon=True).start()

    def start(self, function: Callable[[], object], post: Callable[[ThreadResult], None]) -> None:
        context = copy_context()
        self._jobs.put(_ThreadJob(lambda: context.run(function), post))

    def stop(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            ran = _run(job.run)
            try:
                self._loop.call_soon_threadsafe(job.post, ran)
            except RuntimeError:  # the loop is closed: no caller waits
                return
            del job, ran


def _run(function: Callable[[], object]) -> ThreadResult:
    try:
        return ThreadResult(function())
    except BaseException as error:  # noqa: BLE001  it is raised again where the call is awaited
        return ThreadResult(error=error)
