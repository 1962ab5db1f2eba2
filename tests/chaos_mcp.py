"""MCP server of the chaos runs: the calculator, over standard input and output. `mcp` is its one package."""

import asyncio
from zlib import crc32

from chaos_agent import work_out
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("calculator")


@server.tool()
async def calculate(expression: str) -> str:
    """Work out one operation on two whole numbers."""
    await asyncio.sleep(crc32(expression.encode()) % 16 / 10)
    try:
        return work_out(expression)
    except ValueError as error:
        raise ToolError(str(error)) from None


if __name__ == "__main__":
    server.run("stdio")
