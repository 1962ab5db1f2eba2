"""Streams that show a turn while it is sampled: what is held back, and that the pieces are the whole answer."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI

from tests.gateways import DIALECTS, TOOLS, Agent, agent
from tests.rollouts import CALL, renderer, say
from tests.unit.test_gateway_server import Served, served
from treadle.gateway.event_stream import PartialStream, write_whole
from treadle.gateway.request import ReplySet
from treadle.gateway.turn_reader import PartialTurn

BODIES = {
    "chat": {"messages": [{"role": "user", "content": "Go."}]},
    "messages": {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 500},
    "responses": {"input": "Go."},
}
ANTHROPIC_TOOLS = [{"name": "add", "description": "Add.", "input_schema": {"type": "object"}}]
RESPONSES_TOOLS = [{"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object"}}]
OFFERED = {"chat": TOOLS, "messages": ANTHROPIC_TOOLS, "responses": RESPONSES_TOOLS}


def collect(dialect: str, events: Any) -> tuple[str, str, list[Any]]:
    """The reasoning, the text and the calls that a client reads from a stream."""
    reasoning, text, calls = "", "", []
    for name, data in events:
        if dialect == "chat" and isinstance(data, dict) and data["choices"]:
            delta = data["choices"][0]["delta"]
            reasoning += delta.get("reasoning_content", "")
            text += delta.get("content") or ""
            calls += [call["function"]["name"] for call in delta.get("tool_calls", ()) if "id" in call]
        elif name == "content_block_delta":
            reasoning += data["delta"].get("thinking", "")
            text += data["delta"].get("text", "")
        elif name == "content_block_start" and data["content_block"]["type"] == "tool_use":
            calls.append(data["content_block"]["name"])
        elif name == "response.reasoning_summary_text.delta":
            reasoning += data["delta"]
        elif name == "response.output_text.delta":
            text += data["delta"]
        elif name == "response.output_item.added" and data["item"]["type"] == "function_call":
            calls.append(data["item"]["name"])
    return reasoning, text, calls


async def stream(it: Agent, dialect: str, **options: Any) -> tuple[list[Any], ReplySet, Any]:
    """The events before a turn is whole, its answer, and the events after that; None where it began otherwise."""
    exchange = it.send({"model": "policy", **BODIES[dialect], "stream": True, **options}, dialect)
    request = exchange.request
    shown = PartialStream(DIALECTS[dialect].open_events(), exchange.partials, ReplySet((), request.model))
    answer = await it.answer(exchange)
    early = list(shown.events())
    rest = shown.finish(answer)
    return early, answer, None if rest is None else list(rest)


PIECES = [
    *("<think>", "</think>", "<thi", "</thin", "<tool_call>", "</tool_call>", "<tool", " ", "\n", "é", "漢🙂"),
    *("word", "STOP", "ST", "<", "{", '{"name": "add", "arguments": {"a":  1}}', "<|im_end", "."),
]


@pytest.mark.parametrize("dialect", BODIES)
@settings(max_examples=120, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=9), tools=st.booleans(), stops=st.booleans())
@example(pieces=["<think>", "</think>"], tools=False, stops=False)
def test_whatever_a_model_writes_the_pieces_of_a_stream_are_the_whole_answer(
    dialect: str, pieces: list[str], tools: bool, stops: bool
) -> None:
    async def main() -> None:
        async with agent(say("".join(pieces) + "x"), tells=True) as it:
            options: dict[str, Any] = {"tools": OFFERED[dialect]} if tools else {}
            if stops and dialect != "responses":
                options["stop" if dialect == "chat" else "stop_sequences"] = ["STOP"]
            early, answer, rest = await stream(it, dialect, **options)
            assert rest is not None, "what was shown is not what came"
            reply = answer.replies[0]
            found = collect(dialect, [*early, *rest])
            assert found == (reply.reasoning, reply.text, [call.name for call in reply.calls])
            whole = collect(dialect, write_whole(DIALECTS[dialect].open_events(), answer))
            assert found == whole

    asyncio.run(main())


@pytest.mark.parametrize("dialect", BODIES)
def test_reasoning_and_text_are_shown_before_the_turn_is_whole_and_calls_are_not(dialect: str) -> None:
    async def main() -> None:
        async with agent(say(f"<think>\nHm, well.\n</think>\n\nI will add. {CALL}"), tells=True) as it:
            early, _, rest = await stream(it, dialect, tools=OFFERED[dialect])
            assert collect(dialect, early) == ("Hm, well.", "I will add.", [])
            assert len(early) > 5, "piece by piece"
            assert rest is not None and collect(dialect, rest)[2] == ["add"]
            if dialect == "responses":
                numbers = [data["sequence_number"] for _, data in (*early, *rest)]
                assert numbers == list(range(len(numbers)))

    asyncio.run(main())


def partial(text_of: Any = None, **fields: Any) -> PartialTurn:
    options: dict[str, Any] = {"stops": (), "call_starts": None, "is_thinking": False, **fields}
    return PartialTurn(text_of or renderer().decode, mark="m", created=0, prompt_tokens=1, **options)


def test_half_of_a_character_is_held_back() -> None:
    data = "né🙂!".encode()
    turn = partial(lambda ids: bytes(ids).decode("utf-8", "replace"))
    for at, byte in enumerate(data):
        turn.feed(at, (byte,))
    assert [text for _, text in turn.pieces] == ["n", "é", "🙂", "!"]


def test_tokens_that_are_told_again_are_shown_once_and_others_in_their_place_are_not_shown() -> None:
    turn = partial(lambda ids: "".join(map(chr, ids)))
    turn.feed(0, (97, 98))
    turn.feed(0, (97, 98, 99))
    assert [text for _, text in turn.pieces] == ["ab", "c"]
    turn.feed(1, (120, 121, 122, 123))
    turn.feed(5, (124,))
    assert [text for _, text in turn.pieces] == ["ab", "c"]
    late = partial(lambda ids: "".join(map(chr, ids)))
    late.feed(3, (97,))
    assert not late.pieces, "what came before is not known"


def test_a_prompt_that_opens_the_reasoning_makes_the_first_text_reasoning() -> None:
    turn = partial(lambda ids: "".join(map(chr, ids)), is_thinking=True)
    for at, letter in enumerate("Hm.\n</think>\n\nYes."):
        turn.feed(at, (ord(letter),))
    kinds = {kind: "".join(text for other, text in turn.pieces if other == kind) for kind in ("reasoning", "text")}
    assert kinds == {"reasoning": "Hm.", "text": "Yes."}


def test_a_client_reads_tokens_before_the_turn_is_whole_and_the_end_after_it_is_committed() -> None:
    async def use(it: Served) -> None:
        it.it.engine.told = asyncio.Event()
        async with AsyncOpenAI(base_url=f"{it.gateway.url}/v1", api_key=it.opened.key, max_retries=0) as client:
            chunks = await client.chat.completions.create(
                model="policy",
                messages=[{"role": "user", "content": "Go."}],
                stream=True,
                stream_options={"include_usage": True},
            )
            read, finish = "", None
            async for chunk in chunks:
                if chunk.choices:
                    read += chunk.choices[0].delta.content or ""
                    finish = chunk.choices[0].finish_reason or finish
                if read == "One two" and not it.it.engine.told.is_set():
                    assert not it.it.conversation._tree.turns, "it is still being sampled"
                    it.it.engine.told.set()
            assert (read, finish) == ("One two three.", "stop")
            assert chunk.usage is not None and chunk.usage.completion_tokens > 3
            assert it.it.conversation._tree.turns[0].delivered_at is not None

    async def first_two(it: Served) -> None:
        tell = it.it.engine.inner.generate

        async def generate(request: Any) -> Any:
            completion = await tell(request)
            ids = completion.ids
            request.on_tokens(0, ids[: next(n for n in range(len(ids)) if renderer().decode(ids[:n]) == "One two")])
            return completion

        it.it.engine.inner.generate, it.it.engine.tells = generate, False
        await use(it)

    served(first_two, script=say("One two three."), tells=True)


def test_a_stream_that_breaks_off_is_given_again_from_its_start() -> None:
    async def use(it: Served) -> None:
        it.it.engine.told = asyncio.Event()
        body = {"model": "policy", "messages": [{"role": "user", "content": "Go."}], "stream": True}
        async with it.http.stream("POST", "/v1/chat/completions", json=body) as response:
            seen = ""
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    seen += collect("chat", [("", json.loads(line.removeprefix("data: ")))])[1]
                if "One" in seen:
                    break
        (exchange,) = next(iter(it.it.conversation._exchanges.values()))
        while exchange.is_awaited:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        it.it.engine.told.set()
        again = await it.http.post("/v1/chat/completions", json=body)
        lines = [line.removeprefix("data: ") for line in again.text.split("\n\n") if line.startswith("data: {")]
        text = collect("chat", [("", json.loads(line)) for line in lines])[1]
        assert text == "One two three." and len(it.it.engine.sampled) == 1

    served(use, script=say("One two three."), tells=True)


def test_an_answer_that_goes_on_otherwise_than_it_began_is_an_error_and_then_the_whole_answer() -> None:
    async def use(it: Served) -> None:
        tell = it.it.engine.inner.generate

        async def generate(request: Any) -> Any:
            request.on_tokens(0, renderer().encode("Something else entirely. "))
            await asyncio.sleep(0.01)
            return await tell(request)

        it.it.engine.inner.generate, it.it.engine.tells = generate, False
        body = {"model": "policy", "messages": [{"role": "user", "content": "Go."}], "stream": True}
        first = await it.http.post("/v1/chat/completions", json=body)
        assert "Something" in first.text and "server_is_overloaded" in first.text and "[DONE]" not in first.text
        again = await it.http.post("/v1/chat/completions", json={**body, "stream": False})
        assert again.json()["choices"][0]["message"]["content"] == "One two three."
        assert len(it.it.engine.sampled) == 1 and it.it.conversation.counters.replayed == 1

    served(use, script=say("One two three."), tells=True)
