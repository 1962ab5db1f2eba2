"""An agent as one writes it for any model: the OpenAI SDK, a tool, a loop. It knows nothing of training."""

import json
import ssl
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
def _tls() -> ssl.SSLContext:
    """For the clients of all sessions, which belong to their event loops: making it takes longer than a session."""
    return ssl.create_default_context()


async def solve(base_url: str, api_key: str, task: Any) -> None:
    """Ask, use the tool, ask again. The reward is the config's; an agent may also return one."""
    http = DefaultAsyncHttpxClient(timeout=120, verify=_tls())
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http) as client:
        messages: Any = [*task.messages]
        for _ in range(MAX_TURNS):
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return
            for call in message.tool_calls:
                assert call.type == "function"
                result = run_tool(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def run_tool(name: str, arguments: str) -> str:
    try:
        return calculate(**json.loads(arguments)) if name == "calculate" else f"there is no tool {name}"
    except (TypeError, ValueError) as error:
        return str(error)
