"""The smallest MCP server, on standard input and output: two tools. Imports nothing that takes time."""

import json
import os
import sys

SCHEMA = {"type": "object", "properties": {}}


def answer(method: str, parameters: dict) -> dict:
    if method == "initialize":
        version = parameters["protocolVersion"]
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "s", "version": "1"}}
    if method == "tools/list":
        words = [*sys.argv[1:], os.environ.get("MOOD", "none")]
        return {"tools": [{"name": name, "description": " ".join(words), "inputSchema": SCHEMA} for name in ("a", "b")]}
    return {}


for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        result = answer(message["method"], message.get("params", {}))
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
