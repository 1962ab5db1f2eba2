"""Any agent of any dialect, with reasoning, engines that fail and connections that break: each sampled token once."""

import asyncio
import json
from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gateways import DIALECTS, Agent, agent, babble, trained
from treadle.gateway.request import Overloaded
from treadle.types import Request

SCHEMA = {"type": "object"}
TOOLS = {
    "chat": [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}],
    "messages": [{"name": "add", "input_schema": SCHEMA}],
    "responses": [{"type": "function", "name": "add", "parameters": SCHEMA}],
}
KINDS = ("go on", "lose", "twice", "edit", "back", "parallel", "several", "compact", "other", "drop")
MAX_TRIES = 50


def think(request: Request, rng: Random) -> str:
    """What `babble` says, after some reasoning at times."""
    said = babble(request, rng)
    return f"<think>\nhm {rng.randint(0, 10**6)}\n</think>\n\n{said}" if rng.random() < 0.6 else said


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def after_chat(response: dict[str, Any], drops: bool) -> list[Any]:
    message = {key: value for key, value in response["choices"][0]["message"].items() if value is not None}
    if drops:
        message.pop("reasoning_content", None)
    calls = message.get("tool_calls") or ()
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "is"} for call in calls]
    return [message, *(results or [user("Go on.")])]


def after_messages(response: dict[str, Any], drops: bool) -> list[Any]:
    blocks = response["content"]
    if drops:
        blocks = [block for block in blocks if block["type"] != "thinking"] or blocks
    uses = [block for block in blocks if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": use["id"], "content": "is"} for use in uses]
    return [{"role": "assistant", "content": blocks}, {"role": "user", "content": results or "Go on."}]


def after_responses(response: dict[str, Any], drops: bool) -> list[Any]:
    items = response["output"]
    if drops:
        items = [item for item in items if item["type"] != "reasoning"] or items
    calls = [item for item in items if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "is"} for call in calls]
    return [*items, *(results or [user("Go on.")])]


AFTER = {"chat": after_chat, "messages": after_messages, "responses": after_responses}
"""A response and what follows it, as an agent sends them back, with its reasoning or without."""


def is_text(item: Any) -> bool:
    return item.get("role") == "user" and isinstance(item["content"], str)


def changed(history: list[Any], kind: str, pick: int) -> list[Any]:
    """The history that a step asks with, where it is not the one that the agent holds."""
    texts = [at for at, item in enumerate(history) if is_text(item)]
    at = texts[pick % len(texts)]
    if kind == "edit":
        return [*history[:at], user(f"edited {pick}"), *history[at + 1 :]]
    if kind == "back":
        return history[: at + 1]
    if kind == "compact":
        return [user(f"Summary {pick}: {len(history)} messages.")]
    if kind == "drop" and len(history) > 3:
        return [history[0], *history[3:]]
    return history


class FuzzedAgent:
    """Histories that an agent of one dialect holds, and what it does with them."""

    def __init__(self, it: Agent, dialect: str) -> None:
        self.it, self.dialect = it, dialect
        self.histories: list[list[Any]] = [[user("Add 1.")]]

    def body(self, history: list[Any], model: str) -> dict[str, Any]:
        given = "input" if self.dialect == "responses" else "messages"
        most = {"max_tokens": 200} if self.dialect == "messages" else {}
        return {"model": model, "tools": TOOLS[self.dialect], given: history, **most}

    async def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """An answer, asked for until the engine gives one."""
        for _ in range(MAX_TRIES):
            try:
                exchange = self.it.send(body, self.dialect)
                answer = await self.it.answer(exchange)
            except Overloaded:
                continue
            self.it.conversation.deliver(exchange)
            return json.loads(json.dumps(DIALECTS[self.dialect].format_response(answer)))  # type: ignore[no-any-return]
        raise AssertionError("the engine never answered")

    async def lose(self, body: dict[str, Any], *, is_sampled: bool) -> None:
        """Ask, and break the connection."""
        exchange = self.it.send(body, self.dialect)
        if is_sampled:
            await asyncio.wait({exchange.task})
        self.it.conversation.lose(exchange)

    async def step(self, kind: str, pick: int, drops: bool) -> None:
        held = self.histories[pick % len(self.histories)]
        history = changed(held, kind, pick)
        body = self.body(history, "small" if kind == "other" else "policy")
        if kind == "several" and self.dialect == "chat":  # the only API with `n`
            body["n"] = 2 + pick % 2
        if kind == "lose":
            await self.lose(body, is_sampled=bool(pick % 2))
        if kind == "twice":
            await self.ask(body)
        answers = await asyncio.gather(*(self.ask(body) for _ in range(2 if kind == "parallel" else 1)))
        if "n" in body:
            (answer,) = answers
            assert len(answer["choices"]) == body["n"]
            answers = [{"choices": [choice]} for choice in answer["choices"]]
        if kind != "other":
            self.histories += [[*history, *AFTER[self.dialect](answer, drops)] for answer in answers]


STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 7), st.booleans()), min_size=1, max_size=14)


@pytest.mark.parametrize("dialect", TOOLS)
@settings(max_examples=60, deadline=None)
@given(steps=STEPS, train=st.sampled_from(["main", "all"]), failure_rate=st.sampled_from([0.0, 0.2]))
def test_each_sampled_token_trains_once_or_is_listed(
    dialect: str, steps: list[tuple[str, int, bool]], train: str, failure_rate: float
) -> None:
    async def main() -> None:
        async with agent(think, train=train, failure_rate=failure_rate, retries=10**6) as it:
            fuzzed = FuzzedAgent(it, dialect)
            for kind, pick, drops in steps:
                await fuzzed.step(kind, pick, drops)
            sampled, found = Counter(it.engine.sampled), trained(await it.rows())
            untrained = it.session.extra["gateway"].get("untrained", [])
            assert found <= sampled, "something trains in another context than it was sampled in"
            assert found.total() + len(untrained) == sampled.total()
            assert train == "main" or not untrained

    asyncio.run(main())
