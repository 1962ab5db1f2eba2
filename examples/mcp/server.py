"""An MCP server with one tool, over standard input and output."""

from mcp.server.mcpserver import MCPServer

WEATHER = {"Oslo": "snow", "Cairo": "sun"}

server = MCPServer("weather")


@server.tool()
def weather(city: str) -> str:
    """The weather in a city."""
    return WEATHER[city]


if __name__ == "__main__":
    server.run("stdio")
