"""What keys of `rollout.multi_turn.mcp_servers` change: in the tools that a model is offered."""

import asyncio
import sys
from pathlib import Path
from typing import Any

from tests.effects.cases import Case, config_cases, configured
from tests.fake_endpoint import FakeEndpoint
from treadle.errors import TreadleError
from treadle.rollout.tools import Toolbox
from treadle.rollout.tools.mcp_tools import MCPTools
from treadle.types import Task, ToolCall

SERVER = str(Path(__file__).parent / "mcp_server.py")


def offered(directory: Path, **keys: Any) -> Any:
    """The schemas of the tools; or that there are none. An HTTP server records whether it was asked."""
    with FakeEndpoint() as endpoint:
        url = keys.get(f"{IT}.url")
        if url is not None:
            keys[f"{IT}.url"] = url.format(endpoint.base_url)

        async def main() -> Any:
            multi_turn = configured("model: {path: unused}\n", keys).rollout.multi_turn
            try:
                async with await Toolbox.create(multi_turn) as toolbox:
                    return toolbox.schemas()
            except TreadleError as error:
                return type(error).__name__

        return asyncio.run(main()), len(endpoint.chats) > 0


def called(directory: Path, **keys: Any) -> Any:
    """How many servers two sessions of one call each had, and how many wait for the next."""

    async def main() -> Any:
        multi_turn = configured("model: {path: unused}\n", keys).rollout.multi_turn
        async with await Toolbox.create(multi_turn) as toolbox:
            pids = set()
            for uid in ("a", "b"):
                async with toolbox.open(Task(uid, ())) as tools:
                    pids.add((await tools.call(ToolCall("pid", {}))).text)
            (server,) = toolbox._servers
            if isinstance(server, MCPTools):
                return len(pids), 0
            await asyncio.gather(*server._starts)
            return len(pids), len(server._ready)

    return asyncio.run(main())


IT = "rollout.multi_turn.mcp_servers.*"
COMMAND = {f"{IT}.command": [sys.executable, SERVER]}

STATEFUL = {f"{IT}.command": [sys.executable, str(Path(__file__).parents[1] / "integration/mcp_server.py"), "stdio"]}

EFFECTS: dict[str, Case] = config_cases(
    IT,
    offered,
    ("command", [sys.executable, SERVER], [sys.executable, SERVER, "polite"]),
    ("env", {}, {"MOOD": "good"}, COMMAND),
    ("tools", [], ["a"], COMMAND),
    ("startup_timeout_s", 0.001, 30.0, COMMAND),
    ("url", "{}/mcp", "http://127.0.0.1:9/mcp"),
) | config_cases(
    IT,
    called,
    ("scope", "run", "session", {**STATEFUL, f"{IT}.warm": 0}),
    ("warm", 0, 1, {**STATEFUL, f"{IT}.scope": "session"}),
)
