"""MCP tools: the tools of an MCP server, shared by all sessions, over a connection that is opened again when it breaks.
Servers that each session has its own of are in `mcp_sessions`.

Owns the connection, the end of the server's standard error, and the translation between MCP's results and ours. The
SDK's contexts must be left by the task that entered them; so a connection lives in a task of its own, which enters
them, provides the client, waits until it is stopped, and leaves them. Calls may come from any other task. Knows
nothing about retries: what is raised as ToolFailure, the caller tries again.
The border: an answer of the server, also one marked as an error, is for the model to read, and so is its refusal of
the arguments. A connection that broke, an error of the protocol or an answer that breaks the server's own schema is
an infrastructure fault.
Waits: `open` for the server's first answers, at most `startup_timeout_s`; `close` for the owning task, at most
`CLOSE_S`.
"""

import asyncio
import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from shutil import which
from typing import TYPE_CHECKING, Any, TextIO

from treadle.aio import Expired, run_shielded, within
from treadle.config.rollout import MCPServerConfig
from treadle.errors import ConfigError, DeadlineError, Mistake, RunError, ToolFailure, nearest
from treadle.process import guard
from treadle.rollout.tools.base import Invoke, Scope, ToolSpec
from treadle.rollout.tools.validators import compile_validator
from treadle.types import ToolResult, ToolStatus

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult, ContentBlock
    from mcp.types import Tool as RemoteTool

log = logging.getLogger(__name__)

KEY = "rollout.multi_turn.mcp_servers"

CLOSE_S = 15.0
"""How long a connection may take to close; the SDK gives a server about 5 s before it kills it."""

CONNECT_S = 30.0
MAX_PAGES = 100
MAX_RESULT_CHARS = 8_000_000
"""Of one result, its structured form included; the model reads far less of it."""
_TAIL_BYTES = 4096


class MCPConnection:
    """A live connection to a server that has listed its tools."""

    def __init__(self, client: "Client", tools: tuple["RemoteTool", ...], tail: "StderrTail") -> None:
        self.client = client
        self.tools = tools
        self.tail = tail
        self._retired = False
        self._num_calls = 0
        self._stop = asyncio.Event()
        self._owner = asyncio.current_task()

    @classmethod
    async def open(cls, name: str, server: MCPServerConfig) -> "MCPConnection":
        """Start the server or reach it; RunError says why that failed, with the end of the server's standard error."""
        _require_sdk()
        ready: asyncio.Future[MCPConnection] = asyncio.get_running_loop().create_future()
        owner = asyncio.create_task(_run_connection(name, server, ready), name=f"MCP server {name}")
        owner.add_done_callback(_report)
        try:
            return await ready
        except asyncio.CancelledError:
            owner.cancel()
            await run_shielded(_join(owner), CLOSE_S, f"stopping MCP server {name!r}")
            raise

    @property
    def usable(self) -> bool:
        """Whether new calls may take this connection."""
        return not self._retired and not self.ended

    @property
    def ended(self) -> bool:
        """Whether nothing of this connection is left."""
        return self._owner is None or self._owner.done()

    @contextmanager
    def in_use(self) -> Iterator["Client"]:
        """The client, for one call. A retired connection closes after its last call."""
        self._num_calls += 1
        try:
            yield self.client
        finally:
            self._num_calls -= 1
            self._stop_if_unused()

    def retire(self) -> None:
        """Take no new calls; those under way may finish."""
        self._retired = True
        self._stop_if_unused()

    def _stop_if_unused(self) -> None:
        if self._retired and not self._num_calls:
            self._stop.set()

    async def serve(self) -> None:
        """Keep the owning task until `stop` is set."""
        await self._stop.wait()

    async def close(self) -> None:
        """Stop the server and wait until it is gone."""
        assert self._owner is not None
        self._retired = True
        self._stop.set()
        await run_shielded(_join(self._owner), CLOSE_S, f"closing {self._owner.get_name()}")


class StderrTail:
    """Tail of a server's standard error: reads it as it comes, and keeps the end."""

    def __init__(self, read_end: int) -> None:
        self._read_end = read_end
        self._kept = b""

    @classmethod
    @contextmanager
    def opened(cls) -> Iterator[tuple["StderrTail", TextIO]]:
        """A tail, and the file to give to the server."""
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        tail, loop = cls(read_end), asyncio.get_running_loop()
        with os.fdopen(write_end, "w") as errors:
            loop.add_reader(read_end, tail._read)
            try:
                yield tail, errors
            finally:
                loop.remove_reader(read_end)
                tail._read()
                os.close(read_end)
                tail._read_end = -1

    def _read(self) -> None:
        try:
            self._kept = (self._kept + os.read(self._read_end, 65536))[-_TAIL_BYTES:]
        except BlockingIOError:
            return

    def text(self) -> str:
        """The end of standard error, for an error message; empty if there is none."""
        if self._read_end >= 0:
            self._read()
        text = self._kept.decode(errors="replace").strip()
        return f"\nits standard error ends:\n{text}" if text else ""


async def _run_connection(name: str, server: MCPServerConfig, ready: asyncio.Future[MCPConnection]) -> None:
    """Open, serve and close one connection."""
    with StderrTail.opened() as (tail, errors):
        limit = asyncio.timeout(server.startup_timeout_s)
        try:
            async with AsyncExitStack() as stack:
                async with limit:
                    client = await _connect(stack, server, errors)
                    tools = await _list_tools(client)
                connection = MCPConnection(client, tools, tail)
                ready.set_result(connection)
                await connection.serve()
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(_startup_error(name, server, error, tail, limit.expired()))


async def _connect(stack: AsyncExitStack, server: MCPServerConfig, errors: TextIO) -> "Client":
    from mcp import Client

    transport = await _http(stack, server.url) if server.url else _stdio(server, errors)
    return await stack.enter_async_context(Client(transport))


async def _http(stack: AsyncExitStack, url: str) -> AbstractAsyncContextManager[Any]:
    """A transport whose reads have no limit of their own: each call brings its deadline."""
    from httpx2 import AsyncClient, Timeout
    from mcp.client.streamable_http import streamable_http_client

    http = await stack.enter_async_context(AsyncClient(timeout=Timeout(CONNECT_S, read=None)))
    return streamable_http_client(url, http_client=http)


def _stdio(server: MCPServerConfig, errors: TextIO) -> AbstractAsyncContextManager[Any]:
    from mcp import StdioServerParameters, stdio_client

    program, *arguments = server.command
    if program in ("python", "python3"):
        program = sys.executable  # the one that has treadle and, most likely, what the server imports
    if which(program, path=server.env.get("PATH")) is None:
        raise FileNotFoundError(f"no program {program!r} on this machine")
    guard_arguments = ["-I", "-S", guard.__file__, program, *arguments]
    parameters = StdioServerParameters(command=sys.executable, args=guard_arguments, env=dict(server.env))
    return stdio_client(parameters, errlog=errors)


async def _list_tools(client: "Client") -> tuple["RemoteTool", ...]:
    page = await client.list_tools()
    tools = list(page.tools)
    for _ in range(MAX_PAGES):
        if not page.next_cursor:
            break
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tuple(tools)


def _require_sdk() -> None:
    try:
        from mcp import Client as _  # noqa: F401  only to see whether it is there
    except ImportError as error:
        problem = f"needs the MCP SDK, version 2 or later: {error}"
        raise ConfigError(
            [Mistake(KEY, problem, "mcp", fix="pip install 'treadle[mcp]'", missing="package")]
        ) from error


def _startup_error(name: str, server: MCPServerConfig, error: Exception, tail: StderrTail, late: bool) -> RunError:
    where = server.url or " ".join(server.command)
    if late:
        limit = f"{KEY}.{name}.startup_timeout_s"
        problem = f"did not answer within {server.startup_timeout_s:g} s ({limit})"
        return DeadlineError(f"MCP server {name!r} ({where}) {problem}{tail.text()}")
    return RunError(f"MCP server {name!r} ({where}) could not start: {describe(error)}{tail.text()}")


def describe(error: BaseException) -> str:
    """An error as text; of an exception group, the first that is not a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


async def _join(owner: asyncio.Task[None]) -> None:
    """Until the owner has ended; how it ended is logged by `_report`."""
    await asyncio.wait({owner})


def _report(owner: asyncio.Task[None]) -> None:
    if not owner.cancelled() and (error := owner.exception()) is not None:
        log.warning("%s: its connection ended badly: %s", owner.get_name(), describe(error))


@dataclass(frozen=True, slots=True)
class MCPTool:
    """One tool of a server."""

    spec: ToolSpec
    server: "MCPTools"

    def bind(self, scope: Scope) -> Invoke:
        if scope.task.tool_kwargs.get(self.spec.name):
            raise ToolFailure(f"task {scope.task.uid!r}: {self.spec.name!r} is an MCP tool and takes no tool_kwargs")
        return partial(self.server.call, self.spec.name)


class MCPTools:
    """One MCP server, started once and used by every session."""

    def __init__(self, name: str, server: MCPServerConfig, connection: MCPConnection) -> None:
        self._name = name
        self._server = server
        self._connection = connection
        self._connections = [connection]
        self._lock = asyncio.Lock()
        self._closed = False
        self.tools = tuple(MCPTool(spec, self) for spec in read_specs(connection, name, server))

    @classmethod
    async def connect(cls, name: str, server: MCPServerConfig) -> "MCPTools":
        """Start the server, or reach it, and list its tools; RunError or ConfigError if that cannot be done."""
        check_address(name, server)
        connection = await MCPConnection.open(name, server)
        try:
            return cls(name, server, connection)
        except ConfigError:
            await connection.close()
            raise

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> object:
        """The server's answer; Expired if it gives none in time, ToolFailure if it cannot give one."""
        connection = await self._current_connection()
        return await call_tool(connection, self._name, self._server, tool, arguments, timeout_s)

    async def _current_connection(self) -> MCPConnection:
        """The connection for a new call; callers that find it broken wait until one of them has opened the next."""
        if self._connection.usable:
            return self._connection
        async with self._lock:
            if self._closed:
                raise ToolFailure(f"MCP server {self._name!r} is closed")
            if not self._connection.usable:
                self._connections = [connection for connection in self._connections if not connection.ended]
                try:
                    self._connection = await MCPConnection.open(self._name, self._server)
                except RunError as error:
                    raise ToolFailure(str(error)) from error
                self._connections.append(self._connection)
        return self._connection

    async def close(self) -> None:
        """Stop the server."""
        self._closed = True
        async with asyncio.TaskGroup() as group:
            for connection in self._connections:
                group.create_task(connection.close())


async def call_tool(
    connection: MCPConnection,
    name: str,
    server: MCPServerConfig,
    tool: str,
    arguments: dict[str, Any],
    timeout_s: float,
) -> object:
    """A server's answer; Expired if it gives none in time, ToolFailure if it cannot give one."""
    from mcp import MCPError

    with connection.in_use() as client:
        try:
            answer = await within(timeout_s, client.call_tool(tool, arguments))
        except Expired:
            raise
        except Exception as error:
            if isinstance(error, MCPError) and _refuses_arguments(error):
                return ToolResult(f"{tool}: {error.message}", ToolStatus.INVALID)
            if server.url or _is_broken(error):
                connection.retire()
            raise ToolFailure(f"MCP server {name!r}: {describe(error)}{connection.tail.text()}") from error
    return _result(answer)


def check_address(name: str, server: MCPServerConfig) -> None:
    """A server has a command or an address, or it is a mistake."""
    if bool(server.command) == bool(server.url):
        given = "both a command and a url" if server.url else "neither a command nor a url"
        raise ConfigError([Mistake(f"{KEY}.{name}", f"has {given}", fix="give one of the two")])


def read_specs(connection: MCPConnection, name: str, server: MCPServerConfig) -> list[ToolSpec]:
    """The tools of a server that the config asks for."""
    return [_spec(remote, name) for remote in _configured_tools(connection.tools, name, server)]


def _configured_tools(tools: Iterable["RemoteTool"], name: str, server: MCPServerConfig) -> list["RemoteTool"]:
    """The tools that the config asks for."""
    known = {tool.name: tool for tool in tools}
    unknown = [wanted for wanted in server.tools if wanted not in known]
    if unknown:
        raise ConfigError(
            Mistake(f"{KEY}.{name}.tools", f"the server has no tool {wanted!r}", wanted, fix=_hint(wanted, known))
            for wanted in unknown
        )
    return [known[wanted] for wanted in server.tools] if server.tools else list(known.values())


def _hint(wanted: str, known: Iterable[str]) -> str:
    return nearest(wanted, known) or f"it has: {', '.join(known)}"


def _spec(remote: "RemoteTool", server: str) -> ToolSpec:
    schema = remote.input_schema
    return ToolSpec(remote.name, remote.description or "", schema, f"MCP server {server!r}", compile_validator(schema))


def _refuses_arguments(error: Any) -> bool:
    from mcp.types import INVALID_PARAMS

    return bool(error.code == INVALID_PARAMS)


def _is_broken(error: Exception) -> bool:
    """Whether the connection itself is gone, so that the next call needs a new one."""
    from anyio import BrokenResourceError, ClosedResourceError
    from mcp import MCPError
    from mcp.types import CONNECTION_CLOSED

    if isinstance(error, MCPError):
        return error.code == CONNECTION_CLOSED
    return isinstance(error, OSError | BrokenResourceError | ClosedResourceError)


def _result(answer: "CallToolResult") -> ToolResult:
    """The answer as text; what has no text form is named in its place, and so is one that is too large to keep."""
    structured = answer.structured_content
    text = "\n".join(map(_block_text, answer.content))
    if not answer.content and structured is not None:
        text = json.dumps(structured, ensure_ascii=False)
    status = ToolStatus.ERROR if answer.is_error else ToolStatus.OK
    size = len(text) + (len(json.dumps(structured)) if structured is not None else 0)
    if size > MAX_RESULT_CHARS:
        return ToolResult(
            f"[the result has {size:,} characters; at most {MAX_RESULT_CHARS:,} are read]", ToolStatus.ERROR
        )
    return ToolResult(text, status, extra={} if structured is None else {"structured_content": structured})


def _block_text(block: "ContentBlock") -> str:
    if block.type == "text":
        return block.text
    if block.type == "resource":
        return str(getattr(block.resource, "text", f"[resource {block.resource.uri}]"))
    if block.type == "resource_link":
        return f"[resource {block.uri}]"
    return f"[{block.type} {block.mime_type}]"
