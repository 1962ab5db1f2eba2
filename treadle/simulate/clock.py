"""Virtual clock: an event loop whose time jumps; hours of waiting run in milliseconds, the same way every time.

    run(main())                       # like asyncio.run, but asyncio.sleep(3600) returns at once

Time stands still while anything can run, and jumps to the next timer when nothing can. So an hour of simulated
latencies, deadlines and backoffs costs what its callbacks cost, and two runs of one seed are equal to the timestamp.

- Only the loop's clock is virtual: what runs on it uses `loop.time()` and `asyncio.sleep`, never `time.monotonic()`.
- Threads from `asyncio.to_thread` and `loop.run_in_executor` are waited for in real time while the clock stands still.
- Real sockets and pipes are refused: what they deliver has no place on this clock.
- Nothing can run and no timer is set: `Deadlock`, with the tasks that wait. Past `horizon_s`: `HorizonPassed`.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

HORIZON_S = 30 * 24 * 3600.0
"""Longest virtual time without a horizon of the caller: past it, something retries for ever."""

_THREAD_PATIENCE_S = 60.0


class Deadlock(AssertionError):
    """Nothing can run, and no timer will ever change that."""


class HorizonPassed(AssertionError):
    """Virtual time went past the horizon."""


class _JumpingSelector(selectors.BaseSelector):
    """Selector that moves the clock where the loop would sleep."""

    def __init__(self) -> None:
        self._real = selectors.DefaultSelector()
        self.jump: Callable[[float | None], float] = lambda timeout: 0.0
        """Moves the clock; returns how long to wait for threads in real time."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout == 0:
            return []  # something can run; what threads hand over is among it, and the wake-up pipe can wait
        return self._real.select(0) or self._real.select(self.jump(timeout))

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        if len(self._real.get_map()) >= 1:  # the first is the loop's own wake-up pipe
            raise RuntimeError("virtual time has no room for real sockets and pipes: use asyncio.run instead")
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def get_map(self) -> Any:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop in virtual time, from 0.0 on."""

    def __init__(self, horizon_s: float = HORIZON_S) -> None:
        self._now = 0.0
        self._horizon_s = horizon_s
        self._threads: ThreadPoolExecutor | None = None
        self._threads_at_work = 0
        selector = _JumpingSelector()
        super().__init__(selector)
        selector.jump = self._jump

    def time(self) -> float:
        return self._now

    def _jump(self, timeout: float | None) -> float:
        if self._threads_at_work:
            return _THREAD_PATIENCE_S
        if timeout is None:
            raise Deadlock(f"at {self._now:g} s nothing can run and no timer is set; waiting: {self._waiting()}")
        if self._now + timeout > self._horizon_s:
            raise HorizonPassed(f"the next timer is past {self._horizon_s:g} s; waiting: {self._waiting()}")
        self._now += timeout
        return 0.0

    def _waiting(self) -> str:
        names = sorted(f"{task.get_name()}: {task.get_coro()!r}" for task in asyncio.all_tasks(self))
        return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        if executor is None:
            self._threads = executor = self._threads or ThreadPoolExecutor()
        future = super().run_in_executor(executor, func, *args)
        self._threads_at_work += 1
        future.add_done_callback(self._thread_ended)
        return future

    def _thread_ended(self, _: asyncio.Future[Any]) -> None:
        self._threads_at_work -= 1

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ASYNC109
        if self._threads is not None:
            self._threads.shutdown(wait=True)


def run(main: Coroutine[Any, Any, T], *, horizon_s: float = HORIZON_S) -> T:
    """`asyncio.run` in virtual time."""
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(horizon_s)) as runner:
        return runner.run(main)
