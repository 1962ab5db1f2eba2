"""An agent as one writes it for any model: the Anthropic SDK, a tool, a loop. It knows nothing of training."""

import ssl
from functools import cache
from typing import Any

from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient

from treadle.recipes.calculator.tools import calculate

TOOLS: Any = [
    {
        "name": "calculate",
        "description": "Work out one operation on two whole numbers.",
        "input_schema": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    }
]
MAX_TURNS = 4
MAX_TOKENS = 96
"""Of one turn; the API wants to be told."""


@cache
def _tls() -> ssl.SSLContext:
    """For the clients of all sessions, which belong to their event loops: making it takes longer than a session."""
    return ssl.create_default_context()


async def solve(base_url: str, api_key: str, task: Any) -> None:
    """Ask, use the tool, ask again. The reward is the config's; an agent may also return one."""
    http = DefaultAsyncHttpxClient(timeout=120, verify=_tls())
    async with AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, http_client=http) as client:
        messages: Any = [*task.messages]
        for _ in range(MAX_TURNS):
            answer = await client.messages.create(model="policy", max_tokens=MAX_TOKENS, messages=messages, tools=TOOLS)
            messages.append({"role": "assistant", "content": answer.content})
            uses = [block for block in answer.content if block.type == "tool_use"]
            if not uses:
                return
            results = [(use.id, _run(use.name, use.input)) for use in uses]
            blocks = [{"type": "tool_result", "tool_use_id": at, "content": result} for at, result in results]
            messages.append({"role": "user", "content": blocks})


def _run(name: str, arguments: Any) -> str:
    try:
        return calculate(**arguments) if name == "calculate" else f"there is no tool {name}"
    except (TypeError, ValueError) as error:
        return str(error)
