"""Stateful tools: a class, one instance per session, always released.

A class offers the methods that carry the `tool` mark, or its `__call__` under the class's name in snake case. Its
instance is built at the session's first call: `__init__` on the event loop, with `task.tool_kwargs[class name]`, then
`open()` if there is one. `close()` is called when the session ends, however it ends. `open` and `close` may be async;
if not, they run in a thread. A class that cannot be built or opened is an infrastructure fault.
Invariant: whatever was built is closed, also after a failed `open` and under cancellation; closing has a deadline.
"""

import asyncio
import inspect
import re
from collections.abc import Iterable
from typing import Any

from treadle.aio import describe, is_from_outside
from treadle.errors import ToolFailure, TreadleError
from treadle.rollout.tools.function import FunctionTool, mark_of
from treadle.rollout.tools.release import see_through
from treadle.rollout.tools.spec import Expired, within
from treadle.rollout.tools.threads import Threads
from treadle.types import Task

CLOSE_S = 10.0
"""How long one `close()` may take."""

_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def tools_of(cls: type, origin: str) -> tuple[FunctionTool, ...]:
    """The tools of a stateful class, in the order they are written; a ValueError if it has none."""
    names = {name: None for base in reversed(cls.__mro__) for name in vars(base) if mark_of(getattr(cls, name, None))}
    if names:
        return tuple(FunctionTool.of_method(cls, name, origin) for name in names)
    if any("__call__" in vars(base) for base in cls.__mro__):
        return (FunctionTool.of_method(cls, "__call__", origin, called=_HUMP.sub("_", cls.__name__).lower()),)
    raise ValueError(f"{origin}: the class {cls.__name__} has no method marked with @tool, and no __call__")


class Instance:
    """A session's one instance of a stateful class: built when first asked for, closed once."""

    def __init__(self, cls: type, task: Task, threads: Threads) -> None:
        self._cls = cls
        self._kwargs = task.tool_kwargs.get(cls.__name__, {})
        self._threads = threads
        self._lock = asyncio.Lock()
        self._made: Any = None
        self._ready = False

    async def get(self, timeout_s: float) -> Any:
        """The instance; a ToolFailure if it cannot be built and opened within `timeout_s`."""
        if not self._ready:
            async with self._lock:
                if not self._ready:
                    await self._build(timeout_s)
        return self._made

    async def _build(self, timeout_s: float) -> None:
        try:
            self._made = self._cls(**self._kwargs)
            await self._run("open", timeout_s)
        except TreadleError:
            await self.close()
            raise
        except Expired:
            await self.close()
            raise ToolFailure(f"{self._cls.__name__}.open() took longer than {timeout_s:g} s") from None
        except BaseException as error:
            await self.close()
            if is_from_outside(error):
                raise
            raise ToolFailure(f"{self._cls.__name__} could not be set up: {describe(error)}") from error
        self._ready = True

    async def close(self) -> None:
        """Release what was built, once. A `close()` that breaks is logged: the session's result stands without it."""
        self._ready = False
        if self._made is not None:
            await see_through(self._run("close", CLOSE_S), 2 * CLOSE_S, f"{self._cls.__name__}.close()")
            self._made = None

    async def _run(self, name: str, timeout_s: float) -> None:
        method = getattr(self._made, name, None)
        if method is None:
            return
        if inspect.iscoroutinefunction(method):
            await within(timeout_s, method())
        else:
            await self._threads.run(method, timeout_s)


async def release_all(instances: Iterable[Instance]) -> None:
    """Close instances side by side; each sees its own closing through."""
    await see_through(_close_all(tuple(instances)), 3 * CLOSE_S, "releasing a session's tools")


async def _close_all(instances: tuple[Instance, ...]) -> None:
    async with asyncio.TaskGroup() as group:
        for instance in instances:
            group.create_task(instance.close())
