"""Agents without HTTP: conversations with a gateway, and the proof that rows hold what engines sampled."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from tests import rollouts
from treadle.config import RolloutConfig
from treadle.data.renderer import Renderer
from treadle.gateway import anthropic_messages, openai_chat, openai_responses
from treadle.gateway.conversation import Conversation, Exchange
from treadle.gateway.request import ReplySet
from treadle.rollout.parsers import parser
from treadle.rollout.protocol import Services
from treadle.rollout.session import Session
from treadle.rollout.trajectory_builder import SessionRecord
from treadle.types import Completion, Request, Row, SamplingParams

DIALECTS = {module.NAME: module for module in (openai_chat, anthropic_messages, openai_responses)}

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}]


@dataclass
class RecordingEngine:
    """A scripted engine that remembers what it sampled, and after which ids. `held` answers wait for `release`."""

    inner: Any
    sampled: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    held: asyncio.Event | None = None
    tells: bool = False
    """Whether it tells tokens as it samples them, one by one."""
    told: asyncio.Event | None = None
    """What has been told, all but the last token, waits for this to be whole."""

    async def generate(self, request: Request) -> Completion:
        if self.held is not None:
            await self.held.wait()
        completion: Completion = await self.inner.generate(request)
        if self.tells and request.on_tokens is not None:
            for at, token in enumerate(completion.ids[:-1]):
                request.on_tokens(request.num_begun + at, (token,))
        if self.told is not None:
            await self.told.wait()
        if completion.ids:
            self._record(request, completion.ids)
        return completion

    def _record(self, request: Request, ids: tuple[int, ...]) -> None:
        """A turn may be sampled in slices: each goes on after the ids of the one before."""
        for at, (before, sampled) in enumerate(self.sampled):
            if request.num_begun and before + sampled == request.ids:
                self.sampled[at] = before, sampled + ids
                return
        self.sampled.append((request.ids, ids))


def babble(request: Request, rng: Random) -> str:
    """Something that no other request is told: words, and at times a tool call."""
    words = " ".join(rng.choice(["alpha", "beta", "gamma", "é", "\n", "42"]) for _ in range(rng.randint(1, 6)))
    if rng.random() < 0.4:
        arguments = json.dumps({"a": rng.randint(0, 99), "b": rng.choice(["é", 'x"y', None])})
        return f'{words}\n<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    return f"{words} {rng.randint(0, 10**6)}"


class Agent:
    """An agent's end of a gateway: sends JSON of a dialect, and reads JSON."""

    def __init__(self, conversation: Conversation, session: Session, engine: RecordingEngine) -> None:
        self.conversation = conversation
        self.session = session
        self.engine = engine

    def send(self, body: dict[str, Any], dialect: str = "chat", agent_id: str = "") -> Exchange:
        request = replace(DIALECTS[dialect].parse_request(body), agent_id=agent_id)
        return self.conversation.ask(request)

    async def receive(self, exchange: Exchange, dialect: str = "chat") -> dict[str, Any]:
        answer = await self.answer(exchange)
        self.check_prompt(exchange)
        self.conversation.deliver(exchange)
        return json.loads(json.dumps(DIALECTS[dialect].format_response(answer)))

    def check_prompt(self, exchange: Exchange) -> None:
        """What the model was shown is what was asked: the text of every message, in their order."""
        for turn in exchange.turns:
            row = turn.session._row
            start = next(built.start for built in row.turns if built.sampled_end == turn.mark.num_ids)
            shown, at = self.session._services.renderer._encoder.decode([*row.prompt_ids, *row.ids[:start]]), 0
            for message in exchange.request.messages:
                found = shown.find(message.text.strip(), at)
                assert found >= 0, f"{message.text!r} is not shown after character {at}"
                at = found + len(message.text.strip())

    async def answer(self, exchange: Exchange) -> ReplySet:
        return await asyncio.shield(exchange.task)

    async def chat(self, *history: dict[str, Any], **options: Any) -> dict[str, Any]:
        """One message back for a history of messages."""
        body = {"model": "policy", "messages": [*history], "tools": TOOLS, **options}
        return (await self.receive(self.send(body)))["choices"][0]["message"]

    async def rows(self) -> tuple[Row, ...]:
        await self.conversation.close()
        return SessionRecord(self.session).rows()


@asynccontextmanager
async def agent(
    script: Any = babble,
    *,
    config: RolloutConfig | None = None,
    train: Any = "all",
    retries: int = 2,
    tells: bool = False,
    renderer: Renderer | None = None,
    form: str = "hermes",
    **fields: Any,
):
    """An agent in a session of its own. `form`: the format of its model's tool calls."""
    config = config or rollouts.rollout(response_length=4000, max_model_len=8000)
    renderer = renderer or rollouts.renderer()
    scripted = rollouts.engine(script, made=renderer, **fields)
    engine = RecordingEngine(scripted, tells=tells)
    services = Services(config, engine, renderer, parser(form))
    sampling = SamplingParams(config.response_length, stop_token_ids=renderer.stop_token_ids, seed=7)
    task = rollouts.task()
    session = Session(task, 0, services, None, (), sampling, renderer.prompt(task.messages))  # type: ignore[arg-type]
    most = config.multi_turn.max_assistant_turns
    conversation = Conversation(session, train=train, max_turns=most, retries=retries, streams_tokens=tells)
    yield Agent(conversation, session, engine)


def trained(rows: Sequence[Row]) -> Counter[tuple[tuple[int, ...], tuple[int, ...]]]:
    """What rows train: each run of sampled ids of a turn, with all ids before it."""
    found: Counter[Any] = Counter()
    for row in rows:
        assert sum(row.mask) == sum(turn.sampled_end - turn.start for turn in row.turns), (
            "a sampled id outside of turns"
        )
        for turn in row.turns:
            assert set(row.mask[turn.start : turn.sampled_end]) <= {1}
            found[(*row.prompt_ids, *row.ids[: turn.start]), row.ids[turn.start : turn.sampled_end]] += 1
    return found


def assistant(message: dict[str, Any]) -> dict[str, Any]:
    """An answer, as an SDK sends it back."""
    return {key: value for key, value in message.items() if value is not None}


def results(message: dict[str, Any]) -> list[dict[str, Any]]:
    """What follows an answer: results of its calls, else a user's message."""
    calls = message.get("tool_calls") or ()
    made = [{"role": "tool", "tool_call_id": call["id"], "content": f"is {at}"} for at, call in enumerate(calls)]
    return made or [{"role": "user", "content": "Go on."}]
