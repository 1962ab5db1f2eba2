"""Tools: what a model may call during a rollout.

Three kinds, one interface. A typed function is a tool as it stands; a class is a stateful tool with one instance per
session; an MCP server brings its own. A `Toolbox` holds them for a manager, and `SessionTools` calls them for a
session, with a deadline, an output limit and a typed result. What a model may read of a fault, and what fails its
trajectory instead, is decided in `invoke`.
"""

from treadle.rollout.tools.function import FunctionTool, tool
from treadle.rollout.tools.mcp_tools import MCPTools
from treadle.rollout.tools.signature import Injected
from treadle.rollout.tools.toolbox import SessionTools, Toolbox

__all__ = ["FunctionTool", "Injected", "MCPTools", "SessionTools", "Toolbox", "tool"]
