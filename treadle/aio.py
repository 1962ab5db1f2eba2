"""Asyncio helpers: foreign code in tasks, concurrency, deadlines, shielded cleanup, a bounded buffer.

Distinguishes a cancellation or an interrupt of the caller, which passes, from `sys.exit()`, `KeyboardInterrupt` or a
task that cancelled itself inside a user's tool, which is an error like any other. Names the place in the user's files
that an error message shows.

    in_own_task      foreign code in a task of its own; CancelledError only where the caller was cancelled
    run_shielded     cleanup that runs to its end or its deadline, also while the caller is cancelled
    run_whole        a short step that is not left half done: a cancellation of the caller is raised when it has ended
    run_concurrently results of coroutines run together; `first_error` unwraps the error of a task group
    within           a deadline; raises `Expired`, so that a TimeoutError of the work itself stays one
    BoundedBuffer    `put` waits while it is full, `take` waits while it is empty and not closed
    run_to_end       a coroutine from plain code, also inside a running loop
"""

import asyncio
import logging
import signal
import sysconfig
import threading
import types
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from contextvars import copy_context
from functools import cache
from pathlib import Path
from traceback import FrameSummary, extract_tb
from typing import Any, Generic, TypeVar

from treadle.errors import RunError

log = logging.getLogger(__name__)

T = TypeVar("T")

GIVE_UP_S = 5.0
"""How long a task may take to end after it was cancelled; then it is abandoned."""

_MAX_TEXT = 1000

_ABANDONED: set[asyncio.Task[Any]] = set()
"""Tasks that are no longer awaited; held, since an event loop holds its tasks only weakly."""


class SelfCancelled(Exception):
    """A task was cancelled by the code that it runs, not from outside."""


def is_external_stop(error: BaseException) -> bool:
    """Whether an exception is a cancellation or an interrupt of the caller, and must pass."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or task.cancelling() > 0
    if isinstance(error, KeyboardInterrupt):  # a signal interrupts the main thread alone, unless it is ignored
        here = threading.current_thread() is threading.main_thread()
        return here and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    return isinstance(error, GeneratorExit)


async def in_own_task(work: Coroutine[Any, Any, T], give_up_s: float = GIVE_UP_S) -> T:
    """Result of `work`, run in a task of its own: a cancellation from inside is distinct from one of the caller.

    SelfCancelled where it cancelled itself. A cancelled caller waits for its end, and at most `give_up_s`.
    """
    task = asyncio.ensure_future(as_result(work))
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        await cancel_and_wait(task, give_up_s)
        raise
    if task.cancelled():
        raise SelfCancelled("cancelled its own task")
    value, error = task.result()
    if isinstance(error, asyncio.CancelledError):
        raise SelfCancelled(f"cancelled its own task{error_location(error)}") from error
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


async def as_result(work: Coroutine[Any, Any, T]) -> tuple[T | None, BaseException | None]:
    """An error as a value: a task that ends with SystemExit or KeyboardInterrupt would end its event loop too."""
    try:
        return await work, None
    except GeneratorExit:
        raise
    except BaseException as error:  # noqa: BLE001  it is raised again where the work is awaited
        return None, error


async def cancel_and_wait(task: asyncio.Task[Any], give_up_s: float = GIVE_UP_S) -> bool:
    """Cancel a task and wait for its end; False where it does not end, and is left to itself."""
    task.cancel()
    abandon(task)
    await asyncio.wait({task}, timeout=give_up_s)
    return task.done()


def abandon(task: asyncio.Task[Any]) -> None:
    """Keep a task until it ends, and ignore its result."""
    if not task.done():
        _ABANDONED.add(task)
        task.add_done_callback(_forget)


def is_abandoned(task: asyncio.Task[Any]) -> bool:
    """Whether it was given up: it had its time to end."""
    return task in _ABANDONED


def _forget(task: asyncio.Task[Any]) -> None:
    _ABANDONED.discard(task)
    if not task.cancelled():
        task.exception()  # seen, so that the event loop does not print it


def describe_error(error: BaseException) -> str:
    """What broke and where in the user's files, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    name, text = type(error).__name__, " ".join(str(error).split())[:_MAX_TEXT]
    return f"{name}: {text}{error_location(error)}" if text else f"{name}{error_location(error)}"


def error_location(error: BaseException) -> str:
    """Where an error comes from, as ` (file:line)`: the innermost line of the user's, or else the innermost."""
    return _format(extract_tb(error.__traceback__))


def task_location(task: asyncio.Task[Any]) -> str:
    """Where a task waits, in the same form."""
    frames = list[FrameSummary]()
    step: Any = task.get_coro()
    while (frame := getattr(step, "cr_frame", None)) is not None:
        code: types.CodeType = frame.f_code
        frames.append(FrameSummary(code.co_filename, frame.f_lineno, code.co_name, lookup_line=False))
        step = step.cr_await
    return _format(frames)


def _format(frames: Iterable[FrameSummary]) -> str:
    known = [frame for frame in frames if not frame.filename.startswith("<")]
    users = [frame for frame in known if is_user_file(frame.filename)]
    found = (users or known)[-1:]
    return f" ({found[0].filename}:{found[0].lineno})" if found else ""


def is_user_file(file: str) -> bool:
    """Whether a file is neither Python's, nor an installed package's, nor ours."""
    return not file.startswith(("<", *_libraries()))


@cache
def _libraries() -> tuple[str, ...]:
    """Where code lies that is not the user's: Python's, installed packages', ours but for the recipes."""
    here = Path(__file__).parent
    ours = (str(path) for path in here.iterdir() if path.name != "recipes")
    folders: Callable[[str], str] = sysconfig.get_path
    return (*(folders(name) for name in ("stdlib", "purelib", "platlib")), *ours)


async def run_shielded(work: Coroutine[Any, Any, None], deadline_s: float, what: str) -> None:
    """Run `work` to its end, or to the deadline, whatever happens to the caller. A failure is logged, not raised."""
    task = asyncio.create_task(as_result(work), name=what)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + deadline_s
    cancelled: asyncio.CancelledError | None = None
    while not task.done() and loop.time() < deadline:
        try:
            await asyncio.wait({task}, timeout=deadline - loop.time())
        except asyncio.CancelledError as error:
            cancelled = error
    if not task.done():
        abandon(task)
        task.cancel()
        log.warning("%s did not finish within %g s and was abandoned", what, deadline_s)
    elif task.cancelled():
        log.warning("%s cancelled its own task", what)
    elif (failed := task.result()[1]) is not None:
        log.warning("%s failed", what, exc_info=failed)
    if cancelled is not None:
        raise cancelled


async def run_whole(work: Coroutine[Any, Any, T]) -> T:
    """Result of work that no cancellation of the caller interrupts: it is raised when the work has ended.

    For steps that take something which only their end writes down, and that end soon of their own accord.
    """
    task = asyncio.create_task(as_result(work))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as stop:
            cancelled = stop
    if cancelled is not None:
        raise cancelled
    value, error = task.result()
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


async def run_concurrently(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines together; a single one is simply awaited."""
    if len(work) == 1:
        return [await work[0]]
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(item) for item in work]
    return task_results(running)


def task_results(ended: Sequence[asyncio.Task[T]]) -> list[T]:
    """Results of tasks that have ended. A task group ignores one that was cancelled: a sample would be missing."""
    lost = sum(task.cancelled() for task in ended)
    if lost:
        raise RunError(f"{lost} of {len(ended)} samples were cancelled from inside: their results are missing")
    return [task.result() for task in ended]


@contextmanager
def first_error() -> Iterator[None]:
    """Around a task group: raise the error that ended it instead of an exception group."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


@asynccontextmanager
async def first_error_of(manager: AbstractAsyncContextManager[T], what: str) -> AsyncIterator[T]:
    """Around a manager: where its block fails, an error of leaving it is logged, and does not replace the block's."""
    own: BaseException | None = None
    try:
        async with manager as value:
            try:
                yield value
            except BaseException as error:
                own = error
                raise
    except Exception as error:
        if own is None or error is own:
            raise
        log.warning("%s did not close in order: %s", what, describe_error(error))
        raise own from own.__cause__


class Expired(Exception):
    """A tool had its time and gave no answer."""


@types.coroutine
def _resume(steps: Generator[Any, Any, T], awaited: Any) -> Generator[Any, Any, T]:
    """The rest of an awaitable that has begun, and waits for `awaited`."""
    try:
        while True:
            try:
                given = yield awaited
            except GeneratorExit:
                steps.close()
                raise
            except BaseException as error:  # noqa: BLE001  it is thrown into the work, whatever it is
                awaited = steps.throw(error)
            else:
                awaited = steps.send(given)
    except StopIteration as ended:
        return ended.value  # type: ignore[no-any-return]


async def within(timeout_s: float, work: Awaitable[T]) -> T:
    """What `work` gives; Expired when the time is over. A TimeoutError of the work's own stays one.

    Work that ends without waiting for anything costs no timer.
    """
    steps = work.__await__()
    try:
        awaited = next(steps)
    except StopIteration as ended:
        return ended.value  # type: ignore[no-any-return]
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await _resume(steps, awaited)
    except TimeoutError as error:
        if limit.expired():
            raise Expired from error
        raise


class BoundedBuffer(Generic[T]):
    """First-in first-out buffer: `put` waits while it is full, `take` while it is empty and not closed.

    A `take` wakes as many waiting `put`s as it made room for, and a `put` one `take`: the work is linear in the items,
    however many wait.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._items: deque[T] = deque()
        lock = asyncio.Lock()
        self._has_room, self._has_items = asyncio.Condition(lock), asyncio.Condition(lock)
        self._closed = False

    async def put(self, item: T) -> None:
        async with self._has_room:
            await _wait_for(self._has_room, lambda: len(self._items) < self._most)
            self._items.append(item)
            self._has_items.notify()

    async def close(self) -> None:
        """Nothing more will be put."""
        async with self._has_items:
            self._closed = True
            self._has_items.notify_all()

    async def take(self) -> list[T]:
        """Everything there is, at least one item; an empty list once the buffer is closed and empty."""
        async with self._has_items:
            await _wait_for(self._has_items, lambda: self._items or self._closed)
            taken = list(self._items)
            self._items.clear()
            self._has_room.notify(len(taken))
            return taken


async def _wait_for(condition: asyncio.Condition, is_so: Callable[[], object]) -> None:
    try:
        await condition.wait_for(is_so)
    except asyncio.CancelledError:
        condition.notify()  # it may have been woken just now, in the place of another
        raise


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` from plain code, also where this thread has a running loop: then on a loop of another thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1, thread_name_prefix="treadle-work") as pool:
        return pool.submit(copy_context().run, asyncio.run, work).result()
