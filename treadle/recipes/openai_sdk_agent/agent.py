"""An agent as one writes it for any model: the OpenAI SDK, a tool, a loop. It knows nothing of training."""

import json
from functools import cache
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from treadle.recipes.calculator.tools import calculate

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Work out one operation on two whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]
MAX_TURNS = 4


@cache
def _http() -> DefaultAsyncHttpxClient:
    """One connection pool for all sessions: a client of its own for each would take longer than the session."""
    return DefaultAsyncHttpxClient(timeout=120)


async def solve(base_url: str, api_key: str, task: Any) -> None:
    """Ask, use the tool, ask again. The reward is the config's; an agent may also return one."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=_http())
    messages: Any = [*task.messages]
    for _ in range(MAX_TURNS):
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            assert call.type == "function"
            result = _run(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def _run(name: str, arguments: str) -> str:
    try:
        return calculate(**json.loads(arguments)) if name == "calculate" else f"there is no tool {name}"
    except (TypeError, ValueError) as error:
        return str(error)
