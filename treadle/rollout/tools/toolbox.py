"""Toolbox: all tools of a rollout, built once from `rollout.multi_turn`; and the tools of one session.

Owns what tools share (MCP servers, threads, schemas) and the stateful instances of each session. `open` gives a session
the subset its task may use, with the task's own arguments. Knows nothing about formats, tokens or loops.
Invariant: a call ends as a typed `ToolResult`, or raises a Failure; a model's mistake never does the latter.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Self

from treadle.aio import first_error, run_shielded
from treadle.config.rollout import BOX_TOOLS, MCPServerConfig, MultiTurnConfig
from treadle.config.sandbox import SandboxConfig
from treadle.errors import EnvironmentFailure, MisuseError, ToolFailure, nearest
from treadle.rollout.parsers.base import quote
from treadle.rollout.tools.base import Invoke, Tool, ToolSpec
from treadle.rollout.tools.box_tools import BoxTools, load_box_tools
from treadle.rollout.tools.function import ToolInstance, close_instances, load_tools, unique_by_name
from treadle.rollout.tools.invoke import OutputLimit, ToolRetryPolicy, perform_call, to_result
from treadle.rollout.tools.mcp_sessions import MCPLease, MCPSessionPool
from treadle.rollout.tools.mcp_tools import CLOSE_S, MCPTools
from treadle.rollout.tools.thread_pool import DaemonThreadPool
from treadle.rollout.tools.validators import InvalidArgument, compile_validator
from treadle.sandbox.providers import check_provider
from treadle.types import Task, ToolCall, ToolResult, ToolStatus


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Limits of every call of a toolbox."""

    policy: ToolRetryPolicy
    output_limit: OutputLimit
    threads: DaemonThreadPool


class SessionTools:
    """What one session may call. A context: leaving it, also by cancellation, releases the stateful tools."""

    __slots__ = ("_added", "_bound", "_closed", "_instances", "_leases", "_limits", "_tools", "task")

    def __init__(self, task: Task, tools: Mapping[str, Tool], limits: CallLimits) -> None:
        self.task = task
        self._tools = tools
        self._limits = limits
        self._added: dict[str, ToolSpec] = {}
        """Tools that the session's environment runs itself."""
        self._bound: dict[str, Invoke] = {}
        self._instances: dict[type, ToolInstance] = {}
        self._leases: dict[MCPSessionPool, MCPLease] = {}
        self._closed = False

    def bind_all(self) -> None:
        """Bind every tool to the task's arguments; a ToolFailure if some are missing or unknown."""
        for tool in self._tools.values():
            self._bind(tool)

    def add_schemas(self, schemas: Sequence[Mapping[str, Any]]) -> None:
        """Show tools that are run elsewhere; an EnvironmentFailure where a name is taken."""
        for schema in schemas:
            function = schema["function"]
            name, parameters = function["name"], function.get("parameters") or {"type": "object", "properties": {}}
            if name in self._tools or name in self._added:
                raise EnvironmentFailure(f"the environment brings a tool {name!r}, and there is one of that name")
            check = compile_validator(parameters)
            self._added[name] = ToolSpec(name, function.get("description", ""), parameters, "the environment", check)

    def check_added(self, call: ToolCall) -> ToolCall | None:
        """A call of such a tool with checked arguments; None for any other call, and for one that does not fit."""
        spec = self._added.get(call.name)
        if spec is None or call.problem is not None:
            return None
        try:
            return replace(call, arguments=spec.validate(call.arguments))
        except (InvalidArgument, RecursionError):
            return None

    async def call(self, call: ToolCall) -> ToolResult:
        """Carry out one call of the model."""
        started = perf_counter()
        returned: object
        tool = self._tools.get(call.name)
        if call.problem is None and call.name in self._added:
            returned = _refuse_arguments(self._added[call.name], call)
        elif tool is None or call.problem is not None:
            returned = self._refuse(call)
        else:
            try:
                arguments = tool.spec.validate(call.arguments)
            except (InvalidArgument, RecursionError) as error:
                returned = _invalid_result(tool.spec, error)
            else:
                invoke = self._bound.get(call.name) or self._bind(tool)
                returned = await perform_call(tool.spec, invoke, arguments, self._limits.policy)
        return to_result(returned, call.name, self._limits.output_limit, perf_counter() - started)

    async def call_many(self, calls: Sequence[ToolCall], max_parallel: int) -> tuple[ToolResult, ...]:
        """Carry out the calls of one turn, so many at once; results in the order of the calls.

        A Failure of one call cancels the others and is raised.
        """
        if len(calls) == 1:
            return (await self.call(calls[0]),)
        results: dict[int, ToolResult] = {}
        pending = iter(enumerate(calls))

        async def run_pending() -> None:
            for at, call in pending:
                results[at] = await self.call(call)

        with first_error():
            async with asyncio.TaskGroup() as group:
                for _ in range(min(max_parallel, len(calls))):
                    group.create_task(run_pending())
        if len(results) < len(calls):  # a task group ignores a child that was cancelled
            missing = next(call.name for at, call in enumerate(calls) if at not in results)
            raise ToolFailure(f"a call of this turn, such as {missing}, cancelled its own task")
        return tuple(results[at] for at in range(len(calls)))

    def _refuse(self, call: ToolCall) -> ToolResult:
        problem = call.problem or f"there is no tool {quote(call.name)}"
        about = f"{quote(call.name)}: " if call.problem and call.name else ""
        known = ", ".join((*self._tools, *self._added)) or "none"
        return ToolResult(f"{about}{problem}. Known tools: {known}.", ToolStatus.INVALID)

    def _bind(self, tool: Tool) -> Invoke:
        if self._closed:
            raise MisuseError("the tools of a session cannot be called after it has ended")
        invoke = self._bound[tool.spec.name] = tool.bind(self)
        return invoke

    def instance(self, cls: type) -> Callable[[float], Awaitable[Any]]:
        if cls not in self._instances:
            self._instances[cls] = ToolInstance(cls, self.task, self._limits.threads)
        return self._instances[cls].get

    def lease(self, pool: MCPSessionPool) -> MCPLease:
        if pool not in self._leases:
            self._leases[pool] = pool.lease()
        return self._leases[pool]

    async def run_in_thread(self, function: Callable[[], object], timeout_s: float) -> object:
        return await self._limits.threads.run(function, timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        self._bound.clear()
        try:
            if self._instances:
                await close_instances(self._instances.values())
        finally:
            if self._leases:
                await run_shielded(self._close_leases(), CLOSE_S, "closing the MCP servers of a session")

    async def _close_leases(self) -> None:
        async with asyncio.TaskGroup() as group:
            for lease in self._leases.values():
                group.create_task(lease.close())


def _refuse_arguments(spec: ToolSpec, call: ToolCall) -> ToolResult:
    """The answer to a call of an environment's tool whose arguments `check_added` refused."""
    try:
        spec.validate(call.arguments)
    except (InvalidArgument, RecursionError) as error:
        return _invalid_result(spec, error)
    raise MisuseError(f"{spec.name} is a tool of the environment: call it through `Environment.step`")


def _invalid_result(spec: ToolSpec, error: Exception) -> ToolResult:
    problem = str(error) if isinstance(error, InvalidArgument) else "the arguments are nested too deeply"
    takes = ", ".join(spec.parameters.get("properties", ())) or "nothing"
    return ToolResult(f"{spec.name}: {problem}. It takes: {takes}.", ToolStatus.INVALID)


MAX_SUBSETS = 1024
"""Tool subsets whose schemas are kept; more are made again when asked for."""


@dataclass(frozen=True, slots=True)
class ToolSubset:
    """The tools that some tasks may use, by name, and their schemas."""

    tools: Mapping[str, Tool]
    schemas: tuple[dict[str, Any], ...]
    needs_task: bool
    """Whether a tool needs arguments of the task."""


class Toolbox:
    """The tools of one manager. Built by `create`; `close` is the last call."""

    def __init__(
        self,
        multi_turn: MultiTurnConfig,
        tools: Mapping[str, Tool],
        servers: Sequence[MCPTools | MCPSessionPool],
        boxes: type[BoxTools] | None = None,
    ) -> None:
        policy = ToolRetryPolicy(multi_turn.tool_timeout_s, multi_turn.tool_retries)
        output_limit = OutputLimit(multi_turn.max_tool_response_length, multi_turn.tool_response_truncate_side)
        self._limits = CallLimits(policy, output_limit, DaemonThreadPool())
        self._tools = tools
        self._servers = servers
        self._boxes = boxes
        self._subsets: dict[tuple[str, ...] | None, ToolSubset] = {}

    @classmethod
    async def create(cls, multi_turn: MultiTurnConfig, sandbox: SandboxConfig | None = None) -> Self:
        """Load the tools, start the servers; ConfigError or RunError, with nothing left running, if that fails.

        `sandbox`: the boxes of the tools that come with treadle.
        """
        boxes = [name for name in multi_turn.tools if name in BOX_TOOLS]
        loaded = load_tools({at: path for at, path in enumerate(multi_turn.tools) if path not in BOX_TOOLS})
        owner: type[BoxTools] | None = None
        async with AsyncExitStack() as undo:
            if boxes:
                section = sandbox or SandboxConfig()
                await asyncio.to_thread(check_provider, "rollout.sandbox", section)
                owner = BoxTools.of(section, multi_turn.tool_timeout_s)
                undo.push_async_callback(owner.pool.close)
                loaded += load_box_tools(boxes, owner)
            servers = await _connect_all(multi_turn.mcp_servers, undo)
            tools = unique_by_name([*loaded, *(tool for server in servers for tool in server.tools)])
            undo.pop_all()
        return cls(multi_turn, tools, servers, owner)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    def schemas(self, names: tuple[str, ...] | None = None) -> tuple[dict[str, Any], ...]:
        """The named tools, or all, in OpenAI's shape; a ToolFailure if there is no such tool."""
        return self._subset(names).schemas

    def open(self, task: Task) -> SessionTools:
        """The tools of one session, to be used as a context; a ToolFailure if the task does not suit them."""
        subset = self._subset(task.tools)
        session_tools = SessionTools(task, subset.tools, self._limits)
        if subset.needs_task or task.tool_kwargs:
            session_tools.bind_all()
        return session_tools

    def _subset(self, names: tuple[str, ...] | None) -> ToolSubset:
        found = self._subsets.get(names)
        if found is None:
            if len(self._subsets) >= MAX_SUBSETS:
                self._subsets.clear()
            wanted = self.names if names is None else names
            for name in wanted:
                if name not in self._tools:
                    hint = nearest(name, self._tools) or f"known: {', '.join(self._tools) or 'none'}"
                    raise ToolFailure(f"a task asks for the tool {name!r}, which does not exist; {hint}")
            tools = {name: self._tools[name] for name in wanted}
            specs = [tool.spec for tool in tools.values()]
            schemas = tuple(spec.schema() for spec in specs)
            found = self._subsets[names] = ToolSubset(tools, schemas, any(spec.needs_task for spec in specs))
        return found

    async def close(self) -> None:
        """Stop the servers and let the threads end."""
        self._limits.threads.close()
        try:
            if self._boxes is not None:
                await self._boxes.pool.close()
        finally:
            async with asyncio.TaskGroup() as group:
                for server in self._servers:
                    group.create_task(server.close())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _connect_all(
    mcp_servers: Mapping[str, MCPServerConfig], undo: AsyncExitStack
) -> list[MCPTools | MCPSessionPool]:
    """Start all servers concurrently; if one cannot start, `undo` stops those that could."""

    async def connect(name: str, server: MCPServerConfig) -> MCPTools | MCPSessionPool:
        kind = MCPSessionPool if server.scope == "session" else MCPTools
        made: MCPTools | MCPSessionPool = await kind.connect(name, server)
        undo.push_async_callback(made.close)
        return made

    with first_error():
        async with asyncio.TaskGroup() as group:
            starting = [group.create_task(connect(name, server)) for name, server in mcp_servers.items()]
    return [task.result() for task in starting]
