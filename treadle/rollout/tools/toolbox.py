"""All tools of a rollout, built once by a manager from `rollout.multi_turn`.

Owns what its tools share: MCP servers, threads, schemas. `open` gives a session its tools: the subset its task may
use, with the task's own arguments. Knows nothing about formats, tokens or loops.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Self

from treadle.config.rollout import MCPServerConfig, MultiTurnConfig
from treadle.errors import ToolFailure, nearest
from treadle.rollout.tools.answer import Cap
from treadle.rollout.tools.attempts import Policy
from treadle.rollout.tools.mcp_tools import MCPTools
from treadle.rollout.tools.offer import load_tools, unite
from treadle.rollout.tools.session_tools import Rules, SessionTools
from treadle.rollout.tools.spec import Tool
from treadle.rollout.tools.threads import Threads
from treadle.types import Task

MAX_SUBSETS = 1024
"""Tool subsets whose schemas are kept; more are made again when asked for."""


@dataclass(frozen=True, slots=True)
class Subset:
    """The tools that some tasks may use, by name, and their schemas."""

    tools: Mapping[str, Tool]
    schemas: tuple[dict[str, Any], ...]
    needs_task: bool
    """Whether a tool must be given something by the task."""


class Toolbox:
    """The tools of one manager. Built by `create`, whole; `close` is the last call."""

    def __init__(self, multi_turn: MultiTurnConfig, tools: Mapping[str, Tool], servers: Sequence[MCPTools]) -> None:
        policy = Policy(multi_turn.tool_timeout_s, multi_turn.tool_retries)
        cap = Cap(multi_turn.max_tool_response_length, multi_turn.tool_response_truncate_side)
        self._rules = Rules(policy, cap, Threads())
        self._tools = tools
        self._servers = servers
        self._subsets: dict[tuple[str, ...] | None, Subset] = {}

    @classmethod
    async def create(cls, multi_turn: MultiTurnConfig) -> Self:
        """Load the tools, start the servers; ConfigError or RunError, with nothing left running, if that fails."""
        loaded = load_tools(multi_turn.tools)
        async with AsyncExitStack() as undo:
            servers = await _connect_all(multi_turn.mcp_servers, undo)
            tools = unite([*loaded, *(tool for server in servers for tool in server.tools)])
            undo.pop_all()
        return cls(multi_turn, tools, servers)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    def schemas(self, names: tuple[str, ...] | None = None) -> tuple[dict[str, Any], ...]:
        """The named tools, or all, in OpenAI's shape; a ToolFailure if there is no such tool."""
        return self._subset(names).schemas

    def open(self, task: Task) -> SessionTools:
        """The tools of one session, to be used as a context; a ToolFailure if the task does not suit them."""
        subset = self._subset(task.tools)
        session_tools = SessionTools(task, subset.tools, self._rules)
        if subset.needs_task or task.tool_kwargs:
            session_tools.bind_all()
        return session_tools

    def _subset(self, names: tuple[str, ...] | None) -> Subset:
        found = self._subsets.get(names)
        if found is None:
            if len(self._subsets) >= MAX_SUBSETS:
                self._subsets.clear()
            found = self._subsets[names] = self._make_subset(names)
        return found

    def _make_subset(self, names: tuple[str, ...] | None) -> Subset:
        wanted = self.names if names is None else names
        for name in wanted:
            if name not in self._tools:
                hint = nearest(name, self._tools) or f"known: {', '.join(self._tools) or 'none'}"
                raise ToolFailure(f"a task asks for the tool {name!r}, which does not exist; {hint}")
        tools = {name: self._tools[name] for name in wanted}
        specs = [tool.spec for tool in tools.values()]
        return Subset(tools, tuple(spec.schema() for spec in specs), any(spec.needs_task for spec in specs))

    async def close(self) -> None:
        """Stop the servers and let the threads end."""
        self._rules.threads.close()
        async with asyncio.TaskGroup() as group:
            for server in self._servers:
                group.create_task(server.close())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _connect_all(mcp_servers: Mapping[str, MCPServerConfig], undo: AsyncExitStack) -> list[MCPTools]:
    """Start all servers side by side; if one cannot start, `undo` stops those that could."""

    async def connect(name: str, server: MCPServerConfig) -> MCPTools:
        made = await MCPTools.connect(name, server)
        undo.push_async_callback(made.close)
        return made

    try:
        async with asyncio.TaskGroup() as group:
            starting = [group.create_task(connect(name, server)) for name, server in mcp_servers.items()]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in starting]
