"""Agents as their authors write them: with the SDK of their choice, and nothing of treadle."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

TOOL = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
TOOLS: Any = [{"type": "function", "function": TOOL}]
MAX_TURNS = 8


def add(arguments: str) -> str:
    given = json.loads(arguments)
    return str(given["a"] + given["b"])


def openai_sync(base_url: str, api_key: str, task: Any, max_retries: int = 0) -> float:
    """Chat completions with tools, plain."""
    from openai import OpenAI

    history: Any = [{"role": "system", "content": "Use the tool."}, *task.messages]
    with OpenAI(base_url=base_url, api_key=api_key, max_retries=max_retries) as client:
        for _ in range(MAX_TURNS):
            message = client.chat.completions.create(model="policy", messages=history, tools=TOOLS).choices[0].message
            history.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return float("3" in (message.content or ""))
            for call in message.tool_calls:
                result = add(call.function.arguments)  # type: ignore[union-attr]
                history.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


def unmoved(base_url: str, api_key: str, task: Any) -> float:
    """Asks twice, and calls it a success whatever the answers are."""
    import httpx

    body = {"model": "policy", "messages": list(task.messages)}
    for _ in range(2):
        httpx.post(f"{base_url}/chat/completions", json=body, headers={"authorization": f"Bearer {api_key}"})
    return 1.0


async def openai_async(base_url: str, api_key: str, task: Any) -> dict[str, Any]:
    """The same, awaited; two conversations side by side."""
    import asyncio

    from openai import AsyncOpenAI

    async def one(client: AsyncOpenAI, name: str) -> int:
        history: Any = [{"role": "system", "content": f"You are {name}."}, *task.messages]
        for turn in range(MAX_TURNS):
            answer = await client.chat.completions.create(model="policy", messages=history, tools=TOOLS)
            message = answer.choices[0].message
            history.append(message)
            if not message.tool_calls:
                return turn
            for call in message.tool_calls:
                result = add(call.function.arguments)  # type: ignore[union-attr]
                history.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return MAX_TURNS

    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        turns = await asyncio.gather(one(client, "Ada"), one(client, "Bob"))
    return {"reward": 1.0, "turns": turns}


async def openai_streaming(base_url: str, api_key: str, task: Any) -> None:
    """Chat completions and responses, both as streams."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        history: Any = [*task.messages]
        async with client.chat.completions.stream(model="policy", messages=history, tools=TOOLS) as stream:
            final = (await stream.get_final_completion()).choices[0].message
        history.append({"role": "assistant", "tool_calls": [call.model_dump() for call in final.tool_calls or ()]})
        history += [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in final.tool_calls or ()]
        stream_two = await client.chat.completions.create(
            model="policy", messages=history, tools=TOOLS, stream=True, stream_options={"include_usage": True}
        )
        said = [chunk.choices[0].delta.content or "" async for chunk in stream_two if chunk.choices]
        assert "".join(said) == "It is 3.", said

        items: Any = [{"role": "user", "content": task.messages[-1]["content"]}]
        tools: Any = [{"type": "function", **TOOL}]
        for _ in range(MAX_TURNS):
            async with client.responses.stream(model="policy", input=items, tools=tools, store=False) as responses:
                response = await responses.get_final_response()
            items += [item.model_dump(exclude_none=True) for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                assert response.output_text == "It is 3.", response.output_text
                return
            outputs = [(call.call_id, add(call.arguments)) for call in calls]
            items += [{"type": "function_call_output", "call_id": at, "output": text} for at, text in outputs]


def anthropic_sdk(base_url: str, api_key: str, task: Any) -> float:
    """Messages with tools: whole, then as a stream."""
    from anthropic import Anthropic

    tools: Any = [{"name": "add", "description": "Add.", "input_schema": TOOL["parameters"]}]
    history: Any = [{"role": "user", "content": task.messages[-1]["content"]}]
    with Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key) as client:
        for turn in range(MAX_TURNS):
            asked: Any = {"model": "policy", "max_tokens": 200, "system": "Add.", "messages": history, "tools": tools}
            if turn % 2:
                with client.messages.stream(**asked) as stream:
                    message = stream.get_final_message()
            else:
                message = client.messages.create(**asked)
            history.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
            uses = [block for block in message.content if block.type == "tool_use"]
            if message.stop_reason != "tool_use":
                return float("3" in message.content[-1].text)  # type: ignore[union-attr]
            results = [(use.id, str(use.input["a"] + use.input["b"])) for use in uses]  # type: ignore[index]
            blocks = [{"type": "tool_result", "tool_use_id": at, "content": text} for at, text in results]
            history.append({"role": "user", "content": blocks})
    return 0.0


async def openai_sync_in_async(base_url: str, api_key: str, task: Any) -> float:
    """A coroutine that blocks its event loop: with the plain SDK, as many are written."""
    return openai_sync(base_url, api_key, task)


class AwaitedAgent:
    """A callable object whose call is a coroutine."""

    async def __call__(self, base_url: str, api_key: str, task: Any) -> float:
        return openai_sync(base_url, api_key, task)


awaited = AwaitedAgent()


async def endless_async(base_url: str, api_key: str, task: Any, left: str) -> None:
    """Asks until it is ended, and leaves a file then."""
    import httpx

    try:
        async with httpx.AsyncClient(base_url=base_url, headers={"authorization": f"Bearer {api_key}"}) as client:
            while True:
                await client.post("/chat/completions", json={"model": "policy", "messages": list(task.messages)})
    finally:
        await asyncio.sleep(0)
        await asyncio.to_thread(Path(left).write_text, "cleaned up")


def silent(base_url: str, api_key: str, task: Any) -> float:
    """Asks for nothing."""
    return 1.0


def broken(base_url: str, api_key: str, task: Any) -> float:
    openai_sync(base_url, api_key, task)
    raise RuntimeError("the agent's own bug")


def odd(base_url: str, api_key: str, task: Any) -> Any:
    openai_sync(base_url, api_key, task)
    return "very good"


def endless(base_url: str, api_key: str, task: Any) -> None:
    """Asks until it is ended."""
    import httpx

    history: Any = [*task.messages]
    while True:
        answer = httpx.post(
            f"{base_url}/chat/completions",
            json={"model": "policy", "messages": history},
            headers={"authorization": f"Bearer {api_key}"},
        )
        if answer.status_code != 200:
            time.sleep(0.01)
            if answer.status_code == 401:
                return
            history = [{"role": "user", "content": f"Summary: {len(history)}."}]
            continue
        history += [answer.json()["choices"][0]["message"], {"role": "user", "content": "On."}]


def capped(base_url: str, api_key: str, task: Any) -> float:
    """Asks for three tokens at most, and breaks of its own bug."""
    import httpx

    body = {"model": "policy", "messages": list(task.messages), "max_tokens": 3}
    httpx.post(f"{base_url}/chat/completions", json=body, headers={"authorization": f"Bearer {api_key}"})
    raise RuntimeError("the agent's own bug")


async def slow_calculator(base_url: str, api_key: str, task: Any) -> None:
    """The calculator's agent with a slow tool: weight updates, and kills, find its conversations half done."""
    import asyncio
    from zlib import crc32

    from treadle.recipes.openai_sdk_agent import agent

    asked = crc32(str(task.messages[-1]["content"]).encode())
    await asyncio.sleep(asked % 8 / 10)
    await agent.solve(base_url, api_key, task)
