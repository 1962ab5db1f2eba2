"""A tiny MCP server for the tests: `python mcp_server.py stdio|http|mute|broken [port]`."""

import asyncio
import os
import signal
import sys
import time

if sys.argv[1:] == ["mute"]:  # before anything is imported: it must have spoken when its time is over
    print("starting, slowly", file=sys.stderr, flush=True)
    time.sleep(60)

from mcp import MCPError
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tiny")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def refuse(reason: str) -> str:
    """Always refuse."""
    raise ToolError(reason)


@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "done"


@server.tool()
async def die() -> str:
    """Die in the middle of the call."""
    print("last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


@server.tool()
def protest(code: int) -> str:
    """Answer with an error of the protocol."""
    raise MCPError(code, "protest")


@server.tool()
def pid() -> int:
    """The process that answers."""
    return os.getpid()


NOTES: list[str] = []


@server.tool()
def note(text: str) -> str:
    """Keep a note, and tell all of them."""
    NOTES.append(text)
    return " ".join(NOTES)


if __name__ == "__main__":
    kind = sys.argv[1]
    if kind == "broken":
        sys.exit("no database")
    elif kind == "http":
        server.run("streamable-http", port=int(sys.argv[2]))
    else:
        server.run("stdio")
