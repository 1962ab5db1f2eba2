"""Reasoning in every format that models write it: apart from the text in three dialects, and never a matter of ids."""

import asyncio
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.gateways import DIALECTS, TOOLS, Agent, agent, trained
from tests.golden.test_real_templates import renderer_of
from tests.rollouts import save_model, say
from tests.unit.test_gateway_fuzz import AFTER
from tests.unit.test_gateway_streams import BODIES, OFFERED, collect, stream
from treadle.config import ModelConfig
from treadle.data.chat_template import CHANNELS, THINK, ReasoningTags
from treadle.data.renderer import Renderer
from treadle.gateway.event_stream import write_whole
from treadle.types import Request

BRACKETS = """{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.content is string %}{{- message.content }}{%- else %}{%- for block in message.content %}
{{- '[THINK]' + block.thinking + '[/THINK]' if block.type == 'thinking' else block.text }}{%- endfor %}{%- endif %}
{{- '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
"""Takes reasoning as a block of its own, as Magistral's template does."""

TOLD = "{{- '<|im_start|>system\nThink [THINK]like this[/THINK], then answer.<|im_end|>\n' }}" + BRACKETS.replace(
    "[THINK]' + block.thinking + '[/THINK]' if", "' if"
)
OPENED = BRACKETS.replace("<|im_start|>assistant\n' }}{%- endif", "<|im_start|>assistant\n[THINK]\n' }}{%- endif")


@cache
def made(template: str) -> Renderer:
    """A renderer of a template's text, or of a real one by name."""
    if "{" not in template:
        return renderer_of(template)
    with TemporaryDirectory() as directory:
        model = save_model(Path(directory))
        return Renderer.create(ModelConfig(path=model.path, custom_chat_template=template))


BRACKETED = ReasoningTags("[THINK]", "[/THINK]")


@pytest.mark.parametrize(
    ("template", "tags"),
    [
        *((name, THINK) for name in ("qwen3", "qwen3_5_think", "glm4moe", "smollm2", "llama3_1", "nemotron_3_nano")),
        ("gptoss", CHANNELS),
        (BRACKETS, BRACKETED),
        (TOLD, BRACKETED),
        (BRACKETS.replace("THINK]", "seed:think>").replace("[", "<", 1), THINK),
    ],
)
def test_a_template_shows_what_its_models_reasoning_stands_between(template: str, tags: ReasoningTags) -> None:
    assert made(template).reasoning_tags == tags


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
FRAMED_CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
FRAMED = "<|channel|>analysis<|message|>Hm, well.<|end|><|start|>assistant<|channel|>{}<|message|>{}"
FORMATS = {
    "think": ("qwen3", "hermes", "<think>\nHm, well.\n</think>\n\n{}", CALL),
    "opened": ("qwen3_5_think", "hermes", "Hm, well.\n</think>\n\n{}", CALL),
    "brackets": (BRACKETS, "mistral", "[THINK]Hm, well.[/THINK]{}", '[TOOL_CALLS]add[ARGS]{"a": 1}'),
    "brackets opened": (OPENED, "mistral", "Hm, well.[/THINK]{}", '[TOOL_CALLS]add[ARGS]{"a": 1}'),
    "channels": ("gptoss", "gpt-oss", FRAMED.format("final", "{}"), f"<|end|><|start|>assistant{FRAMED_CALL}"),
}
"""A template, a format of calls, a turn with reasoning, and a call."""


def of(kind: str, text: str) -> tuple[dict[str, Any], str]:
    template, form, turn, _ = FORMATS[kind]
    return {"renderer": made(template), "form": form}, turn.replace("{}", text)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("dialect", BODIES)
def test_reasoning_is_apart_from_the_text_whole_and_as_a_stream(dialect: str, tools: bool, kind: str) -> None:
    fields, turn = of(kind, "It is 3.")

    async def main() -> None:
        async with agent(say(turn), tells=True, **fields) as it:
            options = {"tools": OFFERED[dialect]} if tools else {}
            early, answer, rest = await stream(it, dialect, **options)
            assert rest is not None and collect(dialect, [*early, *rest]) == ("Hm, well.", "It is 3.", [])
            whole = collect(dialect, write_whole(DIALECTS[dialect].open_events(), answer))
            assert whole == ("Hm, well.", "It is 3.", [])
            assert not early if kind == "channels" else early, "channels are sent when the turn is whole"

    asyncio.run(main())


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dialect", BODIES)
def test_a_call_after_reasoning_is_made_and_one_that_is_only_thought_about_is_not(dialect: str, kind: str) -> None:
    fields, turn = of(kind, f"Now.{FORMATS[kind][3]}")
    turn = turn.replace("well.", f"{CALL if kind != 'channels' else 'add(2)'} well.")

    async def main() -> None:
        async with agent(say(turn), tells=True, **fields) as it:
            early, answer, rest = await stream(it, dialect, tools=OFFERED[dialect])
            reasoning, text, calls = collect(dialect, [*early, *(rest or ())])
            assert rest is not None and (text, calls) == ("Now.", ["add"]) and reasoning.startswith("Hm, ")
            assert answer.replies[0].reasoning == reasoning

    asyncio.run(main())


def count(request: Request, rng: Any) -> str:
    return f"turn {sum(message['role'] == 'assistant' for message in request.messages)}"


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind != "brackets opened"])  # its template ends there
@pytest.mark.parametrize("dialect", BODIES)
def test_what_is_sampled_trains_once_whatever_the_format_and_the_echo(dialect: str, kind: str, drops: bool) -> None:
    fields, turn = of(kind, "{}")

    async def use(it: Agent) -> None:
        given = "input" if dialect == "responses" else "messages"
        history: list[Any] = [{"role": "user", "content": "Go."}]
        for _ in range(3):
            body = {"model": "policy", given: history, "max_tokens": 500}
            exchange = it.send(body, dialect)
            answer = await it.answer(exchange)
            it.conversation.deliver(exchange)
            history = [*history, *AFTER[dialect](DIALECTS[dialect].format_response(answer), drops)]
        rows = await it.rows()
        assert trained(rows) == {pair: 1 for pair in it.engine.sampled} and len(it.engine.sampled) == 3
        assert drops or it.conversation.counters.echoes == {"exact": 2}
        assert drops or len(rows) == 1

    async def main() -> None:
        async with agent(lambda request, rng: turn.replace("{}", count(request, rng)), **fields) as it:
            await use(it)

    asyncio.run(main())


def test_a_call_of_gpt_oss_where_no_tool_is_offered_stays_text() -> None:
    async def main() -> None:
        async with agent(say(FRAMED_CALL), renderer=made("gptoss"), form="hermes") as it:
            body = {"model": "policy", "messages": [{"role": "user", "content": "Go."}]}
            plain = (await it.answer(it.send(body))).replies[0]
            assert plain.text.startswith("<|channel|>commentary") and not plain.calls
            offered = (await it.answer(it.send({**body, "tools": TOOLS}))).replies[0]
            assert [call.name for call in offered.calls] == ["add"], "the template says what the model writes"

    asyncio.run(main())
