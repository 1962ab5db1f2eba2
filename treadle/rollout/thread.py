"""An event loop of its own in a thread of its own, and the two ways to call into it.

Owns the bridge between colours: `run` is awaited from any other loop, `run_blocking` is called from plain code, also
where a loop is running. Context variables of the caller arrive in both. Nobody guesses which one was meant.
"""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from treadle.errors import DeadlineError, MisuseError

T = TypeVar("T")


class LoopThread:
    """Started by its constructor; `stop` ends it. The thread never keeps the interpreter from leaving."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._end_work()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _end_work(self) -> None:
        """Let what was cancelled just before clean up; whoever stops the thread says how long it may take."""
        left = asyncio.all_tasks(self._loop)
        for task in left:
            if not task.cancelling():  # a second time would interrupt its cleaning up
                task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` on the loop, in a copy of the caller's context. Cancelling the future cancels the work."""
        if self._loop.is_closed() or not self._thread.is_alive():
            work.close()
            raise MisuseError("the rollout manager is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

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
        """End the loop and its thread."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is self._thread:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise DeadlineError(f"thread {self._thread.name} did not stop within {timeout_s:g} s")
