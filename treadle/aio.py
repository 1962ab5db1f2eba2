"""Calls into code that is not ours: what was asked for from outside, and what the code did to itself.

Owns the difference between a cancellation or an interrupt of the caller, which passes, and `sys.exit()`,
`KeyboardInterrupt` or a cancelled task out of somebody's tool, which is an error like any other; and the place in the
user's files that an error message names.
Invariant: `in_own_task` raises CancelledError only where its caller was cancelled.
"""

import asyncio
import signal
import sysconfig
import threading
from collections.abc import Callable, Coroutine, Iterable
from functools import cache
from pathlib import Path
from traceback import FrameSummary, extract_tb
from types import CodeType
from typing import Any, TypeVar

T = TypeVar("T")

GIVE_UP_S = 5.0
"""How long a task may take to end after it was cancelled; then it is abandoned."""

_MAX_TEXT = 1000

_ABANDONED: set[asyncio.Task[Any]] = set()
"""Tasks that nobody waits for any more; held, since an event loop holds its tasks only weakly."""


class CancelledInside(Exception):
    """A task was cancelled by the code that it runs: nobody outside asked for it."""


def is_from_outside(error: BaseException) -> bool:
    """Whether an exception was asked for by whoever runs this code, and must pass."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or task.cancelling() > 0
    if isinstance(error, KeyboardInterrupt):  # a signal interrupts the main thread alone, unless it is ignored
        here = threading.current_thread() is threading.main_thread()
        return here and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    return isinstance(error, GeneratorExit)


async def in_own_task(work: Coroutine[Any, Any, T], give_up_s: float = GIVE_UP_S) -> T:
    """What `work` gives. In a task of its own, so that what it does to its task is told from what the caller's is told.

    CancelledInside where it cancelled itself. A cancelled caller waits for its end, and at most `give_up_s`.
    """
    task = asyncio.ensure_future(returned(work))
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        await end(task, give_up_s)
        raise
    if task.cancelled():
        raise CancelledInside("cancelled its own task")
    value, error = task.result()
    if isinstance(error, asyncio.CancelledError):
        raise CancelledInside(f"cancelled its own task{place(error)}") from error
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


async def returned(work: Coroutine[Any, Any, T]) -> tuple[T | None, BaseException | None]:
    """An error as a value: a task that ends with SystemExit or KeyboardInterrupt would end its event loop too."""
    try:
        return await work, None
    except GeneratorExit:
        raise
    except BaseException as error:  # noqa: BLE001  it is raised again where the work is awaited
        return None, error


async def end(task: asyncio.Task[Any], give_up_s: float = GIVE_UP_S) -> bool:
    """Cancel a task and wait for its end; False where it does not end, and is left to itself."""
    task.cancel()
    abandon(task)
    await asyncio.wait({task}, timeout=give_up_s)
    return task.done()


def abandon(task: asyncio.Task[Any]) -> None:
    """Keep a task until it ends, and take no notice of how it does."""
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


def describe(error: BaseException) -> str:
    """What broke and where in the user's files, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    name, text = type(error).__name__, " ".join(str(error).split())[:_MAX_TEXT]
    return f"{name}: {text}{place(error)}" if text else f"{name}{place(error)}"


def place(error: BaseException) -> str:
    """Where an error comes from, as ` (file:line)`: the innermost line of the user's, or else the innermost."""
    return _format(extract_tb(error.__traceback__))


def where(task: asyncio.Task[Any]) -> str:
    """Where a task waits, in the same form."""
    frames = list[FrameSummary]()
    step: Any = task.get_coro()
    while (frame := getattr(step, "cr_frame", None)) is not None:
        code: CodeType = frame.f_code
        frames.append(FrameSummary(code.co_filename, frame.f_lineno, code.co_name, lookup_line=False))
        step = step.cr_await
    return _format(frames)


def _format(frames: Iterable[FrameSummary]) -> str:
    known = [frame for frame in frames if not frame.filename.startswith("<")]
    users = [frame for frame in known if is_users(frame.filename)]
    found = (users or known)[-1:]
    return f" ({found[0].filename}:{found[0].lineno})" if found else ""


def is_users(file: str) -> bool:
    """Whether a file is neither Python's, nor an installed package's, nor ours."""
    return not file.startswith(("<", *_libraries()))


@cache
def _libraries() -> tuple[str, ...]:
    """Where code lies that is not the user's: Python's, installed packages', ours but for the recipes."""
    here = Path(__file__).parent
    ours = (str(path) for path in here.iterdir() if path.name != "recipes")
    folders: Callable[[str], str] = sysconfig.get_path
    return (*(folders(name) for name in ("stdlib", "purelib", "platlib")), *ours)
