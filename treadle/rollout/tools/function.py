"""Function tools: typed functions and stateful classes as tools, and how a config names them.

Owns the `tool` mark, how a function is run, and the errors of import paths and duplicate names. An async function is
awaited, any other runs in a thread, so that a busy tool never stalls the event loop; or inline, for cheap pure
functions that say so (an inline function cannot be interrupted: it must be fast).

A class offers the methods that carry the `tool` mark, or its `__call__` under the class's name in snake case. Each
session has one instance, built at its first call: `__init__` on the event loop, with `task.tool_kwargs[class name]`,
then `open()` if there is one. `close()` is called when the session ends, however it ends. `open` and `close` may be
async; if not, they run in a thread. A class that cannot be built or opened is an infrastructure fault.
Invariant: whatever was built is closed, also after a failed `open` and under cancellation; closing has a deadline.
"""

import asyncio
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar, overload

from treadle.aio import Expired, describe_error, is_external_stop, run_shielded, within
from treadle.config.plugin import load_object
from treadle.errors import ConfigError, Mistake, ToolFailure, TreadleError
from treadle.rollout.tools.base import Invoke, Scope, Tool, ToolSpec
from treadle.rollout.tools.signature import Convert, Signature, read_docstring, read_signature
from treadle.rollout.tools.thread_pool import DaemonThreadPool
from treadle.rollout.tools.validators import ArgumentValidator, InvalidArgument, compile_validator
from treadle.types import Task

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__treadle_tool__"


class ToolMode(StrEnum):
    """Where a function runs."""

    AWAITED = "awaited"
    THREAD = "thread"
    INLINE = "inline"


@dataclass(frozen=True, slots=True)
class ToolMark:
    """Options of the `tool` decorator."""

    name: str | None = None
    inline: bool = False
    infrastructure: tuple[type[BaseException], ...] = ()


@overload
def tool(function: F, /) -> F: ...
@overload
def tool(
    *, name: str | None = None, inline: bool = False, infrastructure: tuple[type[BaseException], ...] = ()
) -> Callable[[F], F]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    inline: bool = False,
    infrastructure: tuple[type[BaseException], ...] = (),
) -> Any:
    """Mark a function, or a method of a stateful class, as a tool. The function itself stays as it is.

    Args:
        name: what the model calls it; the function's own name if left out.
        inline: run a sync function on the event loop itself; for cheap pure functions only.
        infrastructure: exceptions that mean the tool's infrastructure broke, so the model must not read them.

    >>> from treadle.rollout.tools import FunctionTool, tool
    >>> @tool(name="add", inline=True)
    ... def plus(a: int, b: int) -> int:
    ...     "Add two numbers."
    ...     return a + b
    >>> plus(1, 2)
    3
    >>> made = FunctionTool.of(plus).spec
    >>> made.name, made.description, sorted(made.parameters["properties"])
    ('add', 'Add two numbers.', ['a', 'b'])
    """

    def mark(marked: F) -> F:
        setattr(marked, _MARK, ToolMark(name, inline, infrastructure))
        return marked

    return mark if function is None else mark(function)


def mark_of(item: Any) -> ToolMark | None:
    """The mark that `tool` left, if it did."""
    found = getattr(item, _MARK, None)
    return found if isinstance(found, ToolMark) else None


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A typed function as a tool; with an `owner`, a method called on the session's instance of that class."""

    spec: ToolSpec
    function: Callable[..., Any]
    mode: ToolMode
    injected: Mapping[str, bool] | None = None
    owner: type | None = None

    @classmethod
    def of(cls, function: Callable[..., Any], origin: str | None = None) -> "FunctionTool":
        """The tool that a plain function makes; a ValueError says what is missing."""
        where = origin or f"{function.__module__}:{function.__qualname__}"
        signature = read_signature(function, where)
        return cls._build(function, function.__name__, where, signature, None)

    @classmethod
    def of_method(cls, owner: type, name: str, origin: str, called: str | None = None) -> "FunctionTool":
        """The tool that a method of a stateful class makes, `called` as given or like the method."""
        function = getattr(owner, name)
        signature = read_signature(function, f"{origin}.{name}", skip_first=True)
        if not signature.description and called:
            signature = replace(signature, description=read_docstring(owner.__doc__).description)
        return cls._build(function, called or name, origin, signature, owner)

    @classmethod
    def _build(
        cls, function: Callable[..., Any], name: str, origin: str, signature: Signature, owner: type | None
    ) -> "FunctionTool":
        mark = mark_of(function) or ToolMark()
        check = partial(_validate, compile_validator(signature.parameters, closed=True), signature.converts)
        needs_task = any(signature.injected.values())
        mode = ToolMode.INLINE if mark.inline else ToolMode.THREAD
        if inspect.iscoroutinefunction(function):
            mode = ToolMode.AWAITED
        spec = ToolSpec(
            mark.name or name,
            signature.description,
            signature.parameters,
            origin,
            check,
            mark.infrastructure,
            needs_task,
        )
        return cls(spec, function, mode, signature.injected, owner)

    def bind(self, scope: Scope) -> Invoke:
        injected = self._injected_from(scope.task)
        if self.owner is not None:
            return partial(self._invoke_method, scope, scope.instance(self.owner), injected)
        return partial(self._invoke, scope, self.function, injected)

    def _injected_from(self, task: Task) -> Mapping[str, Any]:
        """Arguments of this tool from the task; a ToolFailure names what is missing or unknown."""
        given = task.tool_kwargs.get(self.spec.name, {})
        wanted = self.injected or {}
        missing = [name for name, needed in wanted.items() if needed and name not in given]
        unknown = [name for name in given if name not in wanted]
        if missing or unknown:
            problems = [f"does not give {name!r}" for name in missing] + [f"gives unknown {name!r}" for name in unknown]
            raise ToolFailure(f"task {task.uid!r}: tool_kwargs of {self.spec.name!r} {', '.join(problems)}")
        return given

    async def _invoke(
        self,
        scope: Scope,
        function: Callable[..., Any],
        injected: Mapping[str, Any],
        arguments: dict[str, Any],
        timeout_s: float,
    ) -> object:
        arguments = {**arguments, **injected}
        if self.mode is ToolMode.AWAITED:
            return await within(timeout_s, function(**arguments))
        if self.mode is ToolMode.INLINE:
            return function(**arguments)
        return await scope.run_in_thread(partial(function, **arguments), timeout_s)

    async def _invoke_method(
        self,
        scope: Scope,
        instance: Callable[[float], Any],
        injected: Mapping[str, Any],
        arguments: dict[str, Any],
        timeout_s: float,
    ) -> object:
        method = partial(self.function, await instance(timeout_s))
        return await self._invoke(scope, method, injected, arguments, timeout_s)


def _validate(check: ArgumentValidator, converts: Sequence[tuple[str, Convert]], given: Any) -> dict[str, Any]:
    """Arguments in the annotated types, or InvalidArgument."""
    arguments: dict[str, Any] = {**check(given)}
    for name, convert in converts:
        if name in arguments:
            try:
                arguments[name] = convert(arguments[name])
            except InvalidArgument as error:
                raise error.under(name) from None
    return arguments


CLOSE_S = 10.0
"""How long one `close()` may take."""

_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def tools_of_class(cls: type, origin: str) -> tuple[FunctionTool, ...]:
    """The tools of a stateful class, in the order they are written; a ValueError if it has none."""
    names = {name: None for base in reversed(cls.__mro__) for name in vars(base) if mark_of(getattr(cls, name, None))}
    if names:
        return tuple(FunctionTool.of_method(cls, name, origin) for name in names)
    if any("__call__" in vars(base) for base in cls.__mro__):
        return (FunctionTool.of_method(cls, "__call__", origin, called=_HUMP.sub("_", cls.__name__).lower()),)
    raise ValueError(f"{origin}: the class {cls.__name__} has no method marked with @tool, and no __call__")


class ToolInstance:
    """A session's one instance of a stateful class: built when first asked for, closed once."""

    def __init__(self, cls: type, task: Task, threads: DaemonThreadPool) -> None:
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
            if is_external_stop(error):
                raise
            raise ToolFailure(f"{self._cls.__name__} could not be set up: {describe_error(error)}") from error
        self._ready = True

    async def close(self) -> None:
        """Release what was built, once. A `close()` that breaks is logged: the session's result stands without it."""
        self._ready = False
        if self._made is not None:
            await run_shielded(self._run("close", CLOSE_S), 2 * CLOSE_S, f"{self._cls.__name__}.close()")
            self._made = None

    async def _run(self, name: str, timeout_s: float) -> None:
        method = getattr(self._made, name, None)
        if method is None:
            return
        if inspect.iscoroutinefunction(method):
            await within(timeout_s, method())
        else:
            await self._threads.run(method, timeout_s)


async def close_instances(instances: Iterable[ToolInstance]) -> None:
    """Close instances concurrently; each runs to its end or its deadline."""
    await run_shielded(_close_all(tuple(instances)), 3 * CLOSE_S, "releasing a session's tools")


async def _close_all(instances: tuple[ToolInstance, ...]) -> None:
    async with asyncio.TaskGroup() as group:
        for instance in instances:
            group.create_task(instance.close())


KEY = "rollout.multi_turn.tools"


def load_tools(paths: Mapping[int, str]) -> list[Tool]:
    """The tools that import paths name, by their place in the list; a ConfigError carries what is wrong with every
    path."""
    tools: list[Tool] = []
    mistakes: list[Mistake] = []
    for at, path in paths.items():
        key = f"{KEY}[{at}]"
        try:
            tools += _tools_from(load_object(path, key), path)
        except ConfigError as error:
            found = (replace(mistake, key=key) for mistake in error.mistakes)
            mistakes += [replace(mistake, problem=f"{path!r}: {mistake.problem}") for mistake in found]
        except ValueError as error:
            mistakes.append(Mistake(key, str(error), value=path))
    if mistakes:
        raise ConfigError(mistakes)
    return tools


def _tools_from(found: Any, path: str) -> tuple[Tool, ...]:
    if isinstance(found, FunctionTool):
        return (found,)
    if isinstance(found, type):
        return tools_of_class(found, path)
    if inspect.isroutine(found):
        return (FunctionTool.of(found, path),)
    raise ValueError(
        f"{path!r} is a {type(found).__name__}; a tool is a function, or a class with one instance a session"
    )


def unique_by_name(tools: Iterable[Tool]) -> Mapping[str, Tool]:
    """The tools by name; a ConfigError names both origins where two share one."""
    named: dict[str, Tool] = {}
    mistakes: list[Mistake] = []
    for tool in tools:
        spec = tool.spec
        if spec.name in named:
            problem = (
                f"two tools are called {spec.name!r}: one from {named[spec.name].spec.origin}, one from {spec.origin}"
            )
            mistakes.append(
                Mistake(KEY, problem, value=spec.origin, fix="rename one with @tool(name=...), or leave it out")
            )
        named[spec.name] = tool
    if mistakes:
        raise ConfigError(mistakes)
    return named
