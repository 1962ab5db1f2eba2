"""One connection to one MCP server, owned by one task from its first byte to its last.

The SDK's contexts must be left by the task that entered them. So a connection lives in a task of its own, which
enters them, hands out the client, waits for the order to stop, and leaves them; calls may come from any other task.
Owns the server's standard error, of which it keeps the end. Knows nothing about retries or results.
Waits: `open` for the server's first answers, at most `startup_timeout_s`; `close` for the owner, at most `CLOSE_S`.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any, TextIO

from treadle.config.rollout import MCPServerConfig
from treadle.errors import ConfigError, DeadlineError, Mistake, RunError
from treadle.rollout.tools.release import see_through

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import Tool as RemoteTool

log = logging.getLogger(__name__)

KEY = "rollout.multi_turn.mcp_servers"

CLOSE_S = 15.0
"""How long a connection may take to close; the SDK gives a server about 5 s before it kills it."""

CONNECT_S = 30.0
MAX_PAGES = 100
GUARD = Path(__file__).with_name("mcp_guard.py")
_TAIL_BYTES = 4096


class Link:
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
    async def open(cls, name: str, server: MCPServerConfig) -> "Link":
        """Start the server or reach it; RunError says why that failed, with the server's last words."""
        _require_sdk()
        ready: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
        owner = asyncio.create_task(_own(name, server, ready), name=f"MCP server {name}")
        owner.add_done_callback(_report)
        try:
            return await ready
        except asyncio.CancelledError:
            owner.cancel()
            await see_through(_join(owner), CLOSE_S, f"stopping MCP server {name!r}")
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
        """Keep the owner until the order to stop."""
        await self._stop.wait()

    async def close(self) -> None:
        """Stop the server and wait until it is gone."""
        assert self._owner is not None
        self._retired = True
        self._stop.set()
        await see_through(_join(self._owner), CLOSE_S, f"closing {self._owner.get_name()}")


class StderrTail:
    """The last words of a server: reads its standard error as it comes, and keeps the end."""

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

    def words(self) -> str:
        """What the server said last, as the end of an error message; nothing if it said nothing."""
        if self._read_end >= 0:
            self._read()
        text = self._kept.decode(errors="replace").strip()
        return f"\nits standard error ends:\n{text}" if text else ""


async def _own(name: str, server: MCPServerConfig, ready: asyncio.Future[Link]) -> None:
    """The whole life of one connection."""
    with StderrTail.opened() as (tail, errors):
        limit = asyncio.timeout(server.startup_timeout_s)
        try:
            async with AsyncExitStack() as stack:
                async with limit:
                    client = await _connect(stack, server, errors)
                    tools = await _list_tools(client)
                link = Link(client, tools, tail)
                ready.set_result(link)
                await link.serve()
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
    guarded = ["-I", "-S", str(GUARD), program, *arguments]
    parameters = StdioServerParameters(command=sys.executable, args=guarded, env=dict(server.env))
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
        return DeadlineError(f"MCP server {name!r} ({where}) {problem}{tail.words()}")
    return RunError(f"MCP server {name!r} ({where}) could not start: {describe(error)}{tail.words()}")


def describe(error: BaseException) -> str:
    """An error in words; of a group of errors, the first one that is not a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


async def _join(owner: asyncio.Task[None]) -> None:
    """Until the owner has ended; how it ended is reported by itself."""
    await asyncio.wait({owner})


def _report(owner: asyncio.Task[None]) -> None:
    if not owner.cancelled() and (error := owner.exception()) is not None:
        log.warning("%s: its connection ended badly: %s", owner.get_name(), describe(error))
