"""The tools of an MCP server, shared by all sessions.

Owns the translation between MCP's results and ours, and the current connection: a server that died is started again
when the next call comes. Knows nothing about retries; what it raises as ToolFailure, the caller tries again.
The border: an answer of the server, also one marked as an error, is for the model to read, and so is its refusal of
the arguments. A connection that broke, an error of the protocol or an answer that breaks the server's own schema is
an infrastructure fault.
"""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from treadle.config.rollout import MCPServerConfig
from treadle.errors import ConfigError, Mistake, RunError, ToolFailure, nearest
from treadle.rollout.tools.mcp_link import KEY, Link, describe
from treadle.rollout.tools.schema import compile_check
from treadle.rollout.tools.spec import Expired, Invoke, Scope, ToolSpec, within
from treadle.types import ToolResult, ToolStatus

if TYPE_CHECKING:
    from mcp.types import CallToolResult, ContentBlock
    from mcp.types import Tool as RemoteTool


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

    def __init__(self, name: str, server: MCPServerConfig, link: Link) -> None:
        self._name = name
        self._server = server
        self._link = link
        self._links = [link]
        self._lock = asyncio.Lock()
        self._closed = False
        self.tools = tuple(MCPTool(_spec(remote, name), self) for remote in _offered(link.tools, name, server))

    @classmethod
    async def connect(cls, name: str, server: MCPServerConfig) -> "MCPTools":
        """Start the server, or reach it, and list its tools; RunError or ConfigError if that cannot be done."""
        if bool(server.command) == bool(server.url):
            given = "both a command and a url" if server.url else "neither a command nor a url"
            raise ConfigError([Mistake(f"{KEY}.{name}", f"has {given}", fix="give one of the two")])
        link = await Link.open(name, server)
        try:
            return cls(name, server, link)
        except ConfigError:
            await link.close()
            raise

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> object:
        """The server's answer; Expired if it gives none in time, ToolFailure if it cannot give one."""
        from mcp import MCPError

        link = await self._current_link()
        with link.in_use() as client:
            try:
                answer = await within(timeout_s, client.call_tool(tool, arguments))
            except Expired:
                raise
            except Exception as error:
                if isinstance(error, MCPError) and _refuses_arguments(error):
                    return ToolResult(f"{tool}: {error.message}", ToolStatus.INVALID)
                if self._server.url or _is_broken(error):
                    link.retire()
                raise ToolFailure(f"MCP server {self._name!r}: {describe(error)}{link.tail.words()}") from error
        return _result(answer)

    async def _current_link(self) -> Link:
        """The connection for a new call; callers who find it broken wait for one of them to open the next."""
        if self._link.usable:
            return self._link
        async with self._lock:
            if self._closed:
                raise ToolFailure(f"MCP server {self._name!r} is closed")
            if not self._link.usable:
                self._links = [link for link in self._links if not link.ended]
                try:
                    self._link = await Link.open(self._name, self._server)
                except RunError as error:
                    raise ToolFailure(str(error)) from error
                self._links.append(self._link)
        return self._link

    async def close(self) -> None:
        """Stop the server."""
        self._closed = True
        async with asyncio.TaskGroup() as group:
            for link in self._links:
                group.create_task(link.close())


def _offered(tools: Iterable["RemoteTool"], name: str, server: MCPServerConfig) -> list["RemoteTool"]:
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
    return ToolSpec(remote.name, remote.description or "", schema, f"MCP server {server!r}", compile_check(schema))


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
    """The answer as text; what has no text form is named in its place."""
    structured = answer.structured_content
    text = "\n".join(map(_block_text, answer.content))
    if not answer.content and structured is not None:
        text = json.dumps(structured, ensure_ascii=False)
    status = ToolStatus.ERROR if answer.is_error else ToolStatus.OK
    return ToolResult(text, status, extra={} if structured is None else {"structured_content": structured})


def _block_text(block: "ContentBlock") -> str:
    if block.type == "text":
        return block.text
    if block.type == "resource":
        return str(getattr(block.resource, "text", f"[resource {block.resource.uri}]"))
    if block.type == "resource_link":
        return f"[resource {block.uri}]"
    return f"[{block.type} {block.mime_type}]"
