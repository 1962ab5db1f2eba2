"""Loop thread: an event loop in a thread of its own, for callers of another loop and of plain code.

`run` is awaited from another loop, `run_blocking` is called from plain code; the caller's context variables arrive in
both. Invariant: every wait on it gets a value or an error. `sys.exit()` and KeyboardInterrupt of one task end that task
alone; if the thread dies all the same, every wait fails with the cause.
"""

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from treadle.aio import GIVE_UP_S, abandon, describe_error, is_abandoned
from treadle.errors import DeadlineError, MisuseError, RunError

log = logging.getLogger(__name__)

T = TypeVar("T")


class LoopThread:
    """Event loop in a daemon thread, started by the constructor and ended by `stop`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._stopping = False
        self._end_s = GIVE_UP_S
        self._waiting: set[Future[Any]] = set()
        self._died: str | None = None
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            while not self._stopping:
                self._run()
            self._end_work()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        except BaseException as error:
            self._died = f"thread {self._thread.name} died: {describe_error(error)}"
            for task in asyncio.all_tasks(self._loop):
                abandon(task)
            log.exception("thread %s died", self._thread.name)
        finally:
            try:
                self._loop.close()
            except OSError as error:  # a tool has closed its descriptors
                self._died = self._died or f"thread {self._thread.name} cannot end: {describe_error(error)}"
            finally:
                self._fail_waiting()

    def _run(self) -> None:
        """Run the loop until it is stopped, or until a task ends with one of the errors that asyncio stops for."""
        try:
            self._loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            # No signal reaches this thread: it is the work of a task, which has this error as its result already.
            log.error("a task on thread %s ended with %s; the others go on", self._thread.name, describe_error(error))

    def _fail_waiting(self) -> None:
        error = RunError(self._died or f"thread {self._thread.name} was stopped while this was under way")
        for future in list(self._waiting):
            if not future.done():
                future.set_exception(error)

    def _end_work(self) -> None:
        """Let what was cancelled just before clean up. A task that does not end is left, and held, as it is."""
        left = {task for task in asyncio.all_tasks(self._loop) if not is_abandoned(task)}
        for task in left:
            if not task.cancelling():  # a second time would interrupt its cleaning up
                task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.wait(left, timeout=self._end_s))
        for task in left:
            abandon(task)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` on the loop, in a copy of the caller's context. Cancelling the future cancels the work."""
        if self._loop.is_closed() or not self._thread.is_alive():
            work.close()
            if self._died is not None:
                raise RunError(self._died)
            raise MisuseError("the rollout manager is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return future

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` from the caller's loop; on this thread's own loop it simply runs there."""
        if threading.current_thread() is self._thread:
            return await work
        return await asyncio.wrap_future(self.submit(work))

    def run_blocking(self, work: Coroutine[Any, Any, T], name: str) -> T:
        """Wait for `work` in the caller's thread. An interrupt of the caller cancels the work."""
        if threading.current_thread() is self._thread:
            work.close()
            raise MisuseError(f"{name}_blocking would wait for itself on the manager's own loop: await {name} instead")
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self, timeout_s: float) -> None:
        """End the loop and its thread; tasks have half of the time to end."""
        if self._loop.is_closed():
            return
        self._stopping, self._end_s = True, timeout_s / 2
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is self._thread:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise DeadlineError(f"thread {self._thread.name} did not stop within {timeout_s:g} s")
