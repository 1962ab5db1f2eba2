"""MCP servers of scope `session`: one for each session that calls a tool of theirs, some started ahead.

Owns the pool of servers that no session has yet, and the lease by which a session holds one. Browsers and shells keep
state, which sessions must not share: a server that a session has used is closed with it and never given to another. One
that dies takes its session's state along, so the session fails instead of going on with a fresh one.
Waits: a session waits for a server that is ready, or for the start of one (`startup_timeout_s`); at most `MAX_STARTING`
start at once. Closing waits for each server, at most the time that a connection may take to close.
Invariant: every server is in the pool, in one lease, or closed; leaving a session closes its own, also by cancellation.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

from treadle.config.rollout import MCPServerConfig
from treadle.errors import ConfigError, RunError, ToolFailure
from treadle.rollout.tools.base import Invoke, Scope, ToolSpec
from treadle.rollout.tools.mcp_tools import CLOSE_S, MCPConnection, call_tool, check_address, read_specs

MAX_STARTING = 4
"""Servers of a pool that start at once: a start takes a core for a while."""


@dataclass(frozen=True, slots=True)
class MCPSessionTool:
    """One tool of a server that each session has its own of."""

    spec: ToolSpec
    pool: "MCPSessionPool"

    def bind(self, scope: Scope) -> Invoke:
        if scope.task.tool_kwargs.get(self.spec.name):
            raise ToolFailure(f"task {scope.task.uid!r}: {self.spec.name!r} is an MCP tool and takes no tool_kwargs")
        lease: MCPLease = scope.lease(self.pool)
        return partial(lease.call, self.spec.name)


class MCPLease:
    """The server of one session, taken from the pool at its first call."""

    def __init__(self, pool: "MCPSessionPool") -> None:
        self._pool = pool
        self._connection: MCPConnection | None = None
        self._lock = asyncio.Lock()
        self._closed = False

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> object:
        """The server's answer; Expired if it gives none in time, ToolFailure if it cannot give one."""
        connection = await self._get()
        if not connection.usable:
            name = self._pool.name
            raise ToolFailure(f"MCP server {name!r} of this session has ended, and its state{connection.tail.text()}")
        return await call_tool(connection, self._pool.name, self._pool.server, tool, arguments, timeout_s)

    async def _get(self) -> MCPConnection:
        if self._connection is None:
            async with self._lock:
                if self._closed:
                    raise ToolFailure(f"MCP server {self._pool.name!r} was closed with its session")
                if self._connection is None:
                    self._connection = await self._pool.take()
        return self._connection

    async def close(self) -> None:
        """Stop the server, if there is one."""
        self._closed = True
        if self._connection is not None:
            await self._connection.close()


class MCPSessionPool:
    """Servers that are ready or starting, for sessions to come. Built by `connect`; `close` is the last call."""

    def __init__(self, name: str, server: MCPServerConfig, first: MCPConnection) -> None:
        self.name, self.server = name, server
        self.tools = tuple(MCPSessionTool(spec, self) for spec in read_specs(first, name, server))
        self._ready: deque[MCPConnection] = deque([first])
        self._starts: set[asyncio.Task[None]] = set()
        self._may_start = asyncio.Semaphore(MAX_STARTING)
        self._closed = False

    @classmethod
    async def connect(cls, name: str, server: MCPServerConfig) -> "MCPSessionPool":
        """Start the first server, or reach it, and list its tools; RunError or ConfigError if that cannot be done."""
        check_address(name, server)
        first = await MCPConnection.open(name, server)
        try:
            return cls(name, server, first)
        except ConfigError:
            await first.close()
            raise

    def lease(self) -> MCPLease:
        """For one session; nothing is started yet."""
        return MCPLease(self)

    async def take(self) -> MCPConnection:
        """A server that no session has had; a ToolFailure where none starts."""
        if self._closed:
            raise ToolFailure(f"MCP server {self.name!r} is closed")
        found: MCPConnection | None = None
        while found is None and self._ready:
            one = self._ready.popleft()
            if one.usable:
                found = one
            else:
                await one.close()
        try:
            return found or await self._open()
        finally:
            self._warm_up()

    async def _open(self) -> MCPConnection:
        async with self._may_start:
            try:
                return await MCPConnection.open(self.name, self.server)
            except RunError as error:
                raise ToolFailure(str(error)) from error

    def _warm_up(self) -> None:
        """Start what the pool lacks, beside the sessions."""
        while not self._closed and len(self._ready) + len(self._starts) < self.server.warm:
            start = asyncio.create_task(self._add(), name=f"starting MCP server {self.name}")
            self._starts.add(start)
            start.add_done_callback(self._starts.discard)

    async def _add(self) -> None:
        try:
            one = await self._open()
        except ToolFailure:
            return  # the next session tries itself, and says why
        if self._closed:
            await one.close()
        else:
            self._ready.append(one)

    async def close(self) -> None:
        """Stop the servers that no session has."""
        self._closed = True
        for start in list(self._starts):
            start.cancel()
        if self._starts:
            await asyncio.wait(self._starts, timeout=CLOSE_S)
        async with asyncio.TaskGroup() as group:
            for connection in self._ready:
                group.create_task(connection.close())
