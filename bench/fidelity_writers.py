"""Scripted models for the harness-fidelity table: the same turns in the format of each chat template, spelled two ways.

serializer   exactly as the template writes a turn with this call, its end-of-turn token included
model        as a model of that family may spell it: JSON without spaces, parameters on one line
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.golden.test_real_templates import FORMATS, renderer_of
from treadle.data.chat_template import CHANNELS
from treadle.data.renderer import Renderer
from treadle.rollout.parsers import parser
from treadle.types import Request

TEMPLATES = ("qwen2_5", "qwen3", "qwen3_5_think", "llama3_1", "glm4moe", "gptoss")
SPELLINGS = ("serializer", "model")
REASONING = "One and two."
SHELLS = {"Bash": "command", "exec_command": "cmd", "bash": "command"}
"""Shell tools of command-line agents, and the argument that holds the command."""

ANSWER = "It is 3."
_USER = {"role": "user", "content": "Add."}


@dataclass(frozen=True)
class ScriptedModel:
    """Writes a call, twice, then an answer."""

    template: str
    spelling: str
    reasons: bool

    @property
    def renderer(self) -> Renderer:
        return renderer_of(self.template)

    @property
    def form(self) -> str:
        """The format of its tool calls."""
        return FORMATS[self.template] or ""

    def can_reason(self) -> bool:
        """Whether its template writes reasoning at all."""
        return self._written(ANSWER, None, (), REASONING) != self._written(ANSWER, None, (), "")

    def __call__(self, request: Request, rng: Random) -> str | Sequence[int]:
        turns = sum(message["role"] == "assistant" for message in request.messages)
        tools = {tool["function"]["name"] for tool in request.tools}
        if "final_answer" in tools:  # smolagents: calls are forced, and the answer is a call
            call = ("add", {"a": 1, "b": 2}) if turns < 2 else ("final_answer", {"answer": "3"})
            return self._forced(*call, request.tools)
        call = self._next_call(turns, tools)
        return self.write(ANSWER if call is None else "", call, request.tools)

    def _next_call(self, turns: int, tools: set[str]) -> tuple[str, dict[str, Any]] | None:
        if shell := tools & SHELLS.keys():
            (name,) = shell
            command = "expr 1 + 2" if turns < 2 else "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
            return (name, {SHELLS[name]: command}) if turns < 2 or name == "bash" else None
        return ("add", {"a": 1, "b": 2}) if turns < 2 else None

    def _forced(self, name: str, arguments: dict[str, Any], tools: Sequence[Mapping[str, Any]]) -> str:
        """What follows the opening of a call that is given."""
        opening = parser(self.form).opening("")
        written = self.renderer._encoder.decode(self._written("", (name, arguments), tools, ""))
        if self.spelling == "model" or opening not in written:
            written = self._spelled(name, arguments)
        return written[written.index(opening) + len(opening) :]

    def write(
        self, text: str, call: tuple[str, dict[str, Any]] | None, tools: Sequence[Mapping[str, Any]]
    ) -> str | Sequence[int]:
        """One turn."""
        whole = self._written(text, call, tools, REASONING if self.reasons else "")
        if self.spelling == "serializer":
            return whole
        said = text if call is None else self._spelled(*call)
        return self._thought(said, is_final=call is None) + self.renderer._encoder.decode(whole[-1:])

    def _written(
        self,
        text: str,
        call: tuple[str, dict[str, Any]] | None,
        tools: Sequence[Mapping[str, Any]],
        reasoning: str,
    ) -> Sequence[int]:
        """The ids of a turn as the template writes it, and the token that ends it."""
        turn: dict[str, Any] = {"role": "assistant", "content": text}
        following: list[dict[str, Any]] = [_USER]
        if reasoning:
            turn["thinking" if self.renderer.reasoning_tags == CHANNELS else "reasoning_content"] = reasoning
        if call is not None:
            function = {"name": call[0], "arguments": call[1]}
            turn["tool_calls"] = [{"id": "call00001", "type": "function", "function": function}]
            following = [{"role": "tool", "name": call[0], "tool_call_id": "call00001", "content": "3"}]
        return self.renderer.turn([_USER, turn], tools, following)

    def _thought(self, said: str, *, is_final: bool) -> str:
        tags = self.renderer.reasoning_tags
        if tags == CHANNELS:
            said = f"<|channel|>final<|message|>{said}" if is_final else said
            return f"{tags.open}{REASONING}{tags.close}<|start|>assistant{said}" if self.reasons else said
        is_opened = self.renderer._template.render([_USER]).rstrip().endswith(tags.open)
        if not self.reasons and not is_opened:
            return said
        start = "" if is_opened else f"{tags.open}\n"
        return f"{start}{REASONING if self.reasons else ''}\n{tags.close}\n\n{said}"

    def _spelled(self, name: str, arguments: dict[str, Any]) -> str:
        compact = json.dumps(arguments, separators=(",", ":"))
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
        if self.form == "llama3_json":
            return f'{{"name": "{name}", "parameters":{compact}}}'
        if self.form == "glm":
            pairs = (f"<arg_key>{key}</arg_key><arg_value>{text}</arg_value>" for key, text in texts.items())
            return f"<tool_call>{name}{''.join(pairs)}</tool_call>"
        if self.form == "qwen3_coder":
            pairs = (f"<parameter={key}>{text}</parameter>\n" for key, text in texts.items())
            return f"<tool_call>\n<function={name}>\n{''.join(pairs)}</function>\n</tool_call>"
        if self.form == "gpt-oss":
            return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{compact}"
        return f'<tool_call>\n{{"name": "{name}", "arguments":{compact}}}\n</tool_call>'


def cells() -> list[ScriptedModel]:
    """Every model of the table."""
    models = [
        ScriptedModel(name, spelling, reasons) for name in TEMPLATES for spelling in SPELLINGS for reasons in (0, 1)
    ]  # type: ignore[arg-type]
    return [model for model in models if not model.reasons or model.can_reason()]
