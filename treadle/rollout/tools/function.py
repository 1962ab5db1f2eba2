"""Tools from plain typed functions, and from methods of stateful classes.

Owns the `tool` mark, and how a function is run: awaited if it is async, else in a thread, so that a busy tool never
stalls the event loop; or inline, for cheap pure functions that say so. An inline function cannot be interrupted: its
deadline is its author's promise.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar, overload

from treadle.errors import ToolFailure
from treadle.rollout.tools.docstring import read_docstring
from treadle.rollout.tools.schema import compile_check
from treadle.rollout.tools.signature import Convert, Signature, read_signature
from treadle.rollout.tools.spec import Invoke, Scope, ToolSpec, within
from treadle.types import Task

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__treadle_tool__"


class Mode(StrEnum):
    """Where a function runs."""

    AWAITED = "awaited"
    THREAD = "thread"
    INLINE = "inline"


@dataclass(frozen=True, slots=True)
class ToolMark:
    """What the author of a tool says about it."""

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
    mode: Mode
    converts: tuple[tuple[str, Convert], ...] = ()
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
        check = compile_check(signature.parameters, closed=True)
        needs_task = any(signature.injected.values())
        spec = ToolSpec(
            mark.name or name,
            signature.description,
            signature.parameters,
            origin,
            check,
            mark.infrastructure,
            needs_task,
        )
        return cls(spec, function, _mode(function, mark), signature.converts, signature.injected, owner)

    def bind(self, scope: Scope) -> Invoke:
        injected = self._injected_from(scope.task)
        if self.owner is not None:
            return partial(self._invoke_method, scope, scope.instance(self.owner), injected)
        return partial(self._invoke, scope, self.function, injected)

    def _injected_from(self, task: Task) -> Mapping[str, Any]:
        """What the task gives this tool; a ToolFailure says what is missing or unknown."""
        given = task.tool_kwargs.get(self.spec.name, {})
        wanted = self.injected or {}
        missing = [name for name, needed in wanted.items() if needed and name not in given]
        unknown = [name for name in given if name not in wanted]
        if missing or unknown:
            words = [f"does not give {name!r}" for name in missing] + [f"gives unknown {name!r}" for name in unknown]
            raise ToolFailure(f"task {task.uid!r}: tool_kwargs of {self.spec.name!r} {', '.join(words)}")
        return given

    async def _invoke(
        self,
        scope: Scope,
        function: Callable[..., Any],
        injected: Mapping[str, Any],
        arguments: dict[str, Any],
        timeout_s: float,
    ) -> object:
        if injected or self.converts:
            arguments = {**arguments, **injected}
            for name, convert in self.converts:
                if name in arguments:
                    arguments[name] = convert(arguments[name])
        if self.mode is Mode.AWAITED:
            return await within(timeout_s, function(**arguments))
        if self.mode is Mode.INLINE:
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


def _mode(function: Callable[..., Any], mark: ToolMark) -> Mode:
    if inspect.iscoroutinefunction(function):
        return Mode.AWAITED
    return Mode.INLINE if mark.inline else Mode.THREAD
