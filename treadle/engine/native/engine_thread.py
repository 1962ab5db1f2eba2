"""Engine thread: runs the scheduler, apart from the event loop.

Owns the hand-over between an event loop and that thread: calls go in through one list (bounded by its callers) and a
condition, results come back in batches, one wake-up of the loop for each step. The thread waits on the condition when
there is nothing to compute; the loop never waits for a step.
Invariant: every sequence is answered once, also when the thread dies: then with the cause.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from treadle.engine.native.scheduler import Scheduler
from treadle.engine.native.sequence import SequenceOutput, SequenceState
from treadle.errors import EngineFailure, TreadleError

Built = TypeVar("Built")
SchedulerCall = Callable[[Scheduler], None]
OnResult = Callable[[SequenceState, SequenceOutput], None]


class EngineThread:
    """Runs a scheduler. All methods are for the event loop that made it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._wake = threading.Condition()
        self._inbox: list[SchedulerCall] = []
        self._closing = False
        self._error: str | None = None
        self.sequences: set[SequenceState] = set()
        """Those that wait for their answer, which they get also when the thread dies."""
        self._calls: set[asyncio.Future[Any]] = set()
        self._results: list[tuple[SequenceState, SequenceOutput]] = []
        self._thread: threading.Thread | None = None
        self._scheduler: Scheduler | None = None

    async def start(self, build: Callable[[OnResult], Scheduler]) -> None:
        """Start the thread, and in it the scheduler that `build` makes; raise what went wrong in there."""
        ready: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(build, ready), name=self._name, daemon=True)
        self._thread.start()
        try:
            await ready
        except asyncio.CancelledError:
            self._closing = True  # the waiting task is gone: the thread ends when it is done building
            raise

    def check(self) -> None:
        """Raise what ended the thread, if something did."""
        if self._error is not None:
            raise EngineFailure(self._error)

    def check_weights(self) -> None:
        """Raise why the weights are not whole, if an update of them broke off. For any thread, at any time."""
        if self._scheduler is not None and (reason := self._scheduler.half_loaded):
            raise EngineFailure(reason)

    async def call(self, function: Callable[[Scheduler], Built]) -> Built:
        """Run `function` in the thread, between two steps, and wait for what it returns."""
        self.check()
        future: asyncio.Future[Built] = self._loop.create_future()

        def run(scheduler: Scheduler) -> None:
            try:
                result = function(scheduler)
            except TreadleError as error:
                self._loop.call_soon_threadsafe(_fail, future, error)
            else:
                self._loop.call_soon_threadsafe(settle, future, result)

        self._calls.add(future)
        self.post(run)
        try:
            return await future
        finally:
            self._calls.discard(future)

    def post(self, call: SchedulerCall) -> None:
        """Queue a call for the thread, between two steps. Its result is not awaited, so it must not fail."""
        with self._wake:
            self._inbox.append(call)
            self._wake.notify()

    async def close(self) -> None:
        """End the thread and wait for it; a step takes milliseconds, so this is soon."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _run(self, build: Callable[[OnResult], Scheduler], ready: "asyncio.Future[None]") -> None:
        try:
            scheduler = build(lambda sequence, result: self._results.append((sequence, result)))
        except BaseException as error:  # noqa: BLE001 - it is raised where `start` waits
            self._loop.call_soon_threadsafe(_fail, ready, error)
            return
        self._scheduler = scheduler
        self._loop.call_soon_threadsafe(settle, ready, None)
        try:
            self._serve(scheduler)
        except BaseException as error:  # noqa: BLE001 - every waiting call fails with it
            self._loop.call_soon_threadsafe(self._crash, f"{self._name}: {type(error).__name__}: {error}")

    def _serve(self, scheduler: Scheduler) -> None:
        closing = False
        while not closing:
            calls, closing = self._wait_for_calls(scheduler.busy)
            for call in calls:
                call(scheduler)
            if closing:
                scheduler.close()
            else:
                scheduler.step()
            self._flush_results()

    def _wait_for_calls(self, busy: bool) -> tuple[list[SchedulerCall], bool]:
        with self._wake:
            while not (busy or self._inbox or self._closing):
                self._wake.wait()
            calls, self._inbox = self._inbox, []
            return calls, self._closing

    def _flush_results(self) -> None:
        if self._results:
            results, self._results = self._results, []
            self._loop.call_soon_threadsafe(_deliver, results)

    def _crash(self, problem: str) -> None:
        self._error = problem
        for sequence in list(self.sequences):
            sequence.deliver(EngineFailure(problem))
        for call in list(self._calls):
            _fail(call, EngineFailure(problem))


def _deliver(results: list[tuple[SequenceState, SequenceOutput]]) -> None:
    for sequence, result in results:
        sequence.deliver(result)


def settle(future: "asyncio.Future[Built]", result: Built) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[Built]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
