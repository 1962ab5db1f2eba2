"""The same agent with a plain client and streams: it shows what the model writes while it waits.

    treadle train openai_sdk_agent \
        rollout.agent.loops.function_agent.kwargs.function=examples.openai_sdk_agent.streaming:solve
"""

from functools import cache
from typing import Any

import httpx
from openai import OpenAI

from treadle.recipes.openai_sdk_agent.agent import MAX_TURNS, TOOLS, run_tool


@cache
def _http() -> httpx.Client:
    """One connection pool for all sessions: plain functions run in threads, which can share it."""
    return httpx.Client(timeout=120, limits=httpx.Limits(max_connections=None))


def solve(base_url: str, api_key: str, task: Any) -> None:
    client = OpenAI(base_url=base_url, api_key=api_key, http_client=_http())
    messages: Any = [*task.messages]
    for _ in range(MAX_TURNS):
        with client.chat.completions.stream(model="policy", messages=messages, tools=TOOLS) as stream:
            for event in stream:
                if event.type == "content.delta":
                    show(event.delta)
            message = stream.get_final_completion().choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            result = run_tool(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def show(text: str) -> None:
    """Where a program of yours would print it."""
