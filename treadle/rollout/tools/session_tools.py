"""The tools of one session: calls checked, carried out and answered, instances held and released.

Owns the stateful instances of the session. Knows nothing about where tools come from.
Invariant: a call ends as a typed `ToolResult`, or raises a Failure; a model's mistake never does the latter.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Self

from treadle.errors import MisuseError, ToolFailure
from treadle.rollout.parsers.payload import quote
from treadle.rollout.tools.answer import Cap, to_result
from treadle.rollout.tools.attempts import Policy, perform
from treadle.rollout.tools.fit import Misfit
from treadle.rollout.tools.spec import Invoke, Tool, ToolSpec
from treadle.rollout.tools.stateful import Instance, release_all
from treadle.rollout.tools.threads import Threads
from treadle.types import Task, ToolCall, ToolResult, ToolStatus


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds for every call of a toolbox."""

    policy: Policy
    cap: Cap
    threads: Threads


class SessionTools:
    """What one session may call. A context: leaving it, also by cancellation, releases the stateful tools."""

    __slots__ = ("_bound", "_closed", "_instances", "_rules", "_tools", "task")

    def __init__(self, task: Task, tools: Mapping[str, Tool], rules: Rules) -> None:
        self.task = task
        self._tools = tools
        self._rules = rules
        self._bound: dict[str, Invoke] = {}
        self._instances: dict[type, Instance] = {}
        self._closed = False

    def bind_all(self) -> None:
        """Give every tool what the task says; a ToolFailure if the task gives too little or too much."""
        for tool in self._tools.values():
            self._bind(tool)

    async def call(self, call: ToolCall) -> ToolResult:
        """Carry out one call of the model."""
        started = perf_counter()
        returned: object
        tool = self._tools.get(call.name)
        if tool is None or call.problem is not None:
            returned = self._refuse(call)
        else:
            try:
                arguments = tool.spec.check(call.arguments)
            except (Misfit, RecursionError) as misfit:
                returned = _invalid(tool.spec, misfit)
            else:
                invoke = self._bound.get(call.name) or self._bind(tool)
                returned = await perform(tool.spec, invoke, arguments, self._rules.policy)
        return to_result(returned, call.name, self._rules.cap, perf_counter() - started)

    async def call_many(self, calls: Sequence[ToolCall], max_parallel: int) -> tuple[ToolResult, ...]:
        """Carry out the calls of one turn, so many at once; results in the order of the calls.

        A Failure of one call cancels the others and is raised.
        """
        if len(calls) == 1:
            return (await self.call(calls[0]),)
        results: dict[int, ToolResult] = {}
        pending = iter(enumerate(calls))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(max_parallel, len(calls))):
                    group.create_task(self._work_off(pending, results))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        if len(results) < len(calls):  # a task group takes no notice of a child that was cancelled
            missing = next(call.name for at, call in enumerate(calls) if at not in results)
            raise ToolFailure(f"a call of this turn, such as {missing}, cancelled its own task")
        return tuple(results[at] for at in range(len(calls)))

    async def _work_off(self, pending: Iterator[tuple[int, ToolCall]], results: dict[int, ToolResult]) -> None:
        for at, call in pending:
            results[at] = await self.call(call)

    def _refuse(self, call: ToolCall) -> ToolResult:
        problem = call.problem or f"there is no tool {quote(call.name)}"
        about = f"{quote(call.name)}: " if call.problem and call.name else ""
        known = ", ".join(self._tools) or "none"
        return ToolResult(f"{about}{problem}. Known tools: {known}.", ToolStatus.INVALID)

    def _bind(self, tool: Tool) -> Invoke:
        if self._closed:
            raise MisuseError("the tools of a session cannot be called after it has ended")
        invoke = self._bound[tool.spec.name] = tool.bind(self)
        return invoke

    def instance(self, cls: type) -> Callable[[float], Awaitable[Any]]:
        if cls not in self._instances:
            self._instances[cls] = Instance(cls, self.task, self._rules.threads)
        return self._instances[cls].get

    async def run_in_thread(self, function: Callable[[], object], timeout_s: float) -> object:
        return await self._rules.threads.run(function, timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        self._bound.clear()
        if self._instances:
            await release_all(self._instances.values())


def _invalid(spec: ToolSpec, misfit: Exception) -> ToolResult:
    problem = str(misfit) if isinstance(misfit, Misfit) else "the arguments are nested too deeply"
    takes = ", ".join(spec.parameters.get("properties", ())) or "nothing"
    return ToolResult(f"{spec.name}: {problem}. It takes: {takes}.", ToolStatus.INVALID)
