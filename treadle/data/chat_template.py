"""Chat template: messages in, text out.

Owns the only call of `apply_chat_template` in treadle, and what has to be done to messages so that a template shows
all of them: templates differ in the form they need for arguments (an object, or JSON text), contents (a text, or a list
of parts) and an empty list of tools. All that is tried out once, by `create`. Knows nothing about tokens or turns.

A template that ignores `tools` gets them through messages instead (`write_tools`): schemas stand in the system message,
calls of earlier turns in the text of their assistant message, and results in user messages, all in the format of
Hermes, which the parser `hermes` reads.
What a model's reasoning stands between is read off the template, too (`find_tags`): it is given a turn with reasoning
in each of the forms that templates take. Text only: no id depends on what is found there.
Invariant: a template shows each message it is given, or there is a `PromptFailure` with the template's own message
or the role that it leaves out. Messages without tools are left alone.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from treadle.config.rollout import ModelConfig
from treadle.errors import ConfigError, Mistake, PromptFailure, blame
from treadle.model.tokenizer import ChatTokenizer
from treadle.types import Message

FALLBACK_FORMAT = "hermes"
"""The tool-call format that the fallback teaches; `rollout.multi_turn.format` must be the same."""

_BEFORE = """# Tools

You may call one or more of these functions to answer. Each is described by a JSON schema:

<tools>
"""
_AFTER = """
</tools>

To call a function, write a JSON object with its name and its arguments inside <tool_call></tool_call> tags:

<tool_call>
{"name": "<name of the function>", "arguments": {"<name of an argument>": <value>}}
</tool_call>

You may write several calls one after the other. The results come back inside <tool_response></tool_response> tags."""


def write_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, has_system: bool = True
) -> list[dict[str, Any]]:
    """The conversation with its tools in the text: of the system message, or of the first by a user."""
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    block = f"{_BEFORE}{schemas}{_AFTER}"
    written: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            response = f"<tool_response>\n{_text(message)}\n</tool_response>"
            if written and written[-1].get("responses"):
                written[-1]["content"] += f"\n{response}"
            else:
                written.append({"role": "user", "content": response, "responses": True})
        else:
            written.append(_write_calls(message))
    plain = [{key: value for key, value in message.items() if key != "responses"} for message in written]
    return _introduce(plain, block, has_system)


def _write_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its calls as text."""
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    texts = [
        "<tool_call>\n"
        + json.dumps({"name": call.get("name"), "arguments": call.get("arguments")}, ensure_ascii=False)
        + "\n</tool_call>"
        for call in calls
    ]
    if texts:
        kept["content"] = "\n".join([*([_text(message)] if _text(message) else []), *texts])
    return kept


def _introduce(messages: list[dict[str, Any]], block: str, has_system: bool) -> list[dict[str, Any]]:
    first = messages[0]
    if first["role"] == "system" and has_system:
        return [{**first, "content": f"{_text(first)}\n\n{block}"}, *messages[1:]]
    if has_system:
        return [{"role": "system", "content": block}, *messages]
    at = next((at for at, message in enumerate(messages) if message["role"] == "user"), None)
    if at is None:
        return messages
    changed = {**messages[at], "content": f"{block}\n\n{_text(messages[at])}"}
    return [*messages[:at], changed, *messages[at + 1 :]]


def _text(message: Mapping[str, Any]) -> str:
    """A content as text; OpenAI's list of parts is joined."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


MARK = "918273645546372"
"""Placeholder for the model's text; digits, which no template changes the case of."""

PROBE: tuple[Message, ...] = ({"role": "user", "content": "Hello."},)

_WORD = "zqword"
_TOOL = "zq_shown"
_NOTE = "Zq note of a tool."
_SCHEMA = {
    "type": "function",
    "function": {
        "name": _TOOL,
        "description": _NOTE,
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "A text."}}},
    },
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """Dialect of a template: the forms of input it needs, and what it does not show."""

    text_arguments: bool = False
    """The arguments of a call as JSON text, not as an object."""
    content_parts: bool = False
    """Contents as lists of parts, not as texts."""
    empty_tools: bool = False
    """An empty list in place of no tools."""
    ignores_tools: bool = False
    """Schemas of tools are not shown, so they are written into messages."""
    has_system: bool = True
    """System messages are shown."""
    leaves_out: frozenset[str] = frozenset()
    """Roles whose messages are not shown."""
    ignores_calls: bool = False
    """Calls of earlier assistant turns are not shown."""


class ChatTemplate:
    """A tokenizer's chat template, or the one that replaces it, with the configured extra variables."""

    def __init__(self, tokenizer: ChatTokenizer, model: ModelConfig, dialect: Dialect | None = None) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._options = {**model.apply_chat_template_kwargs, "tokenize": False}
        if model.custom_chat_template is not None:
            self._options["chat_template"] = model.custom_chat_template
        self.dialect = dialect or Dialect()

    @classmethod
    def create(cls, tokenizer: ChatTokenizer, model: ModelConfig) -> "ChatTemplate":
        """A template that renders a message; a ConfigError if there is none, or if it cannot."""
        if model.custom_chat_template is None and not tokenizer.chat_template:
            problem = f"the tokenizer of {model.path!r} has no chat template"
            fix = "set it to a Jinja chat template, or use the tokenizer of an instruction-tuned model"
            raise ConfigError([Mistake("model.custom_chat_template", problem, fix=fix)])
        template = cls(tokenizer, model)
        template.dialect = template._find_dialect()
        try:
            template.render(PROBE)
            if not template._shows(_WORD, [{"role": "user", "content": _WORD}]):
                raise PromptFailure("it leaves out the text of the message")
        except PromptFailure as failure:
            key = "model.path" if model.custom_chat_template is None else "model.custom_chat_template"
            problem = f"the chat template cannot render a single user message: {failure}"
            raise ConfigError([Mistake(key, problem, origin=model.origin(key.removeprefix("model.")))]) from failure
        return template

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, ask: bool = True) -> str:
        """The whole conversation as text; `ask` adds the header of the next assistant turn."""
        return self.render_plain(json.loads(to_json(messages)), json.loads(to_json(tools)), ask=ask)

    def render_plain(self, messages: list[Any], tools: Sequence[Any], *, ask: bool = True) -> str:
        """Like `render`, from plain lists and dicts; the messages are changed in place."""
        _check_messages(messages)
        open_arguments(messages)
        if tools and self.dialect.ignores_tools:
            messages, tools = write_tools(messages, tools, has_system=self.dialect.has_system), []
        self._refuse_unshown(messages)
        try:
            with blame(PromptFailure):
                return self._apply(messages, tools, ask)
        except PromptFailure as failure:
            roles = ", ".join(message["role"] for message in messages)
            reason = _template_message(failure.__cause__) or str(failure)
            raise PromptFailure(f"the chat template refuses a conversation of {roles}: {reason}") from failure

    def _refuse_unshown(self, messages: Sequence[Mapping[str, Any]]) -> None:
        for message in messages:
            if message["role"] in self.dialect.leaves_out:
                raise PromptFailure(f"the chat template leaves out messages of the role {message['role']!r}")
            if self.dialect.ignores_calls and message.get("tool_calls"):
                raise PromptFailure("the chat template leaves out the tool calls of assistant turns")

    def _apply(self, messages: list[dict[str, Any]], tools: Sequence[Any], ask: bool) -> str:
        for message in messages:
            if self.dialect.text_arguments:
                _close_arguments(message)
            if self.dialect.content_parts and isinstance(message.get("content"), str):
                message["content"] = [{"type": "text", "text": message["content"]}]
        given = list(tools) or ([] if self.dialect.empty_tools else None)
        return cast(
            str,
            self._tokenizer.apply_chat_template(messages, tools=given, add_generation_prompt=ask, **self._options),
        )

    def _shows(self, word: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> bool | None:
        """Whether a word is in the rendering; None if the template refuses the conversation."""
        try:
            return word.casefold() in self.render(messages, tools).casefold()
        except PromptFailure:
            return None

    def _find_dialect(self) -> Dialect:
        """Try each dialect, and keep the first that shows what it should; the plain one where none does."""
        said: list[Message] = [{"role": "user", "content": _WORD}]
        ways = (Dialect(), Dialect(empty_tools=True), Dialect(content_parts=True))
        base = next((way for way in ways if self._with_dialect(way)._shows(_WORD, said)), None)
        if base is None:
            return Dialect()
        turn: Message = {"role": "assistant", "content": "", "tool_calls": [_probe_call({_WORD: _WORD})]}
        found = replace(base, ignores_calls=self._with_dialect(base)._shows(_WORD, [*PROBE, turn]) is False)
        text = replace(base, text_arguments=True)
        if not found.ignores_calls and self._with_dialect(base)._shows(_WORD, [*PROBE, turn]) is None:
            found = text if self._with_dialect(text)._shows(_WORD, [*PROBE, turn]) else base
        system: list[Message] = [{"role": "system", "content": _WORD}, *PROBE]
        shows_system = self._with_dialect(found)._shows(_WORD, system) is True
        found = replace(found, has_system=shows_system, leaves_out=self._with_dialect(found)._find_left_out())
        ignores = self._model.describe_tools and not self._with_dialect(found)._shows_tools()
        return replace(found, ignores_tools=ignores)

    def _with_dialect(self, dialect: Dialect) -> "ChatTemplate":
        return ChatTemplate(self._tokenizer, self._model, dialect)

    def _find_left_out(self) -> frozenset[str]:
        """Roles that a template renders without an error and without their text."""
        result: Message = {"role": "tool", "content": _WORD, "name": _TOOL, "tool_call_id": "zqcall000"}
        calls: Message = {"role": "assistant", "content": "", "tool_calls": [_probe_call({"x": "1"})]}
        plain: Message = {"role": "assistant", "content": "Done."}
        cases: list[tuple[str, list[Message]]] = [
            ("system", [{"role": "system", "content": _WORD}, *PROBE]),
            ("assistant", [*PROBE, {"role": "assistant", "content": _WORD}, *PROBE]),
            *(("tool", [*PROBE, turn, result]) for turn in (plain, calls)),
        ]
        found = [(role, self._shows(_WORD, messages)) for role, messages in cases]
        shown = {role for role, seen in found if seen}
        return frozenset(role for role, seen in found if seen is False and role not in shown)

    def _shows_tools(self) -> bool:
        """Whether the name and the description of a tool reach the model, with a system message and without."""
        system: Message = {"role": "system", "content": "Be brief."}
        starts: list[list[Message]] = [[*PROBE], [system, *PROBE]]
        shown = [self._shows(word, start, [_SCHEMA]) for word in (_TOOL, _NOTE) for start in starts]
        return False not in shown and True in shown


def to_json(items: Sequence[Mapping[str, Any]]) -> str:
    """Messages or tools as JSON: plain lists and dicts for the template, and a key that stands for the content."""
    try:
        return _WRITER.encode(items)
    except (TypeError, ValueError) as error:
        raise PromptFailure(f"messages and tools must be plain JSON values: {error}") from error


def _as_dict(value: object) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"found {value!r} ({type(value).__name__})")


_WRITER = json.JSONEncoder(ensure_ascii=False, default=_as_dict)


def _probe_call(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": "zqcall000", "type": "function", "function": {"name": _TOOL, "arguments": arguments}}


def _check_messages(messages: list[Any]) -> None:
    if not messages:
        raise PromptFailure("a conversation needs at least one message")
    for at, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str):
            raise PromptFailure(f"message {at} has no role: {str(message)[:80]}")
        if not role.replace("-", "_").isidentifier():
            raise PromptFailure(f"message {at} has a role that is no word: {role[:80]!r}")


def _template_message(cause: BaseException | None) -> str:
    """The template's own message, if it raised; other errors with the name of their type."""
    from jinja2 import TemplateError

    return str(cause) if isinstance(cause, TemplateError) else ""


def open_arguments(messages: list[dict[str, Any]]) -> None:
    """OpenAI writes the arguments of a call as JSON text, templates expect an object: parse them in place."""
    for function in _functions(messages):
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"])
            except (ValueError, RecursionError):
                continue  # not JSON after all; the template shows the text as it is


def _close_arguments(message: dict[str, Any]) -> None:
    """The reverse, for templates that write the text as it is."""
    for function in _functions([message]):
        if not isinstance(function.get("arguments"), str):
            function["arguments"] = json.dumps(function.get("arguments"), ensure_ascii=False)


def _functions(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    calls = [call for message in messages for call in message.get("tool_calls") or () if isinstance(call, dict)]
    functions = (call.get("function", call) for call in calls)
    return [function for function in functions if isinstance(function, dict)]


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """A pair of texts; reasoning stands between them at the start of a turn."""

    open: str = "<think>"
    close: str = "</think>"


THINK = ReasoningTags()
CHANNELS = ReasoningTags("<|channel|>analysis<|message|>", "<|end|>")
"""Of gpt-oss: all that it says has a header with a channel, and its reasoning is in the channel `analysis`."""

_OPENING = re.compile(r"<[\w:]+>\Z|\[[A-Z_]+\]\Z|<\|START_\w+\|>\Z")
_SPELLED = (ReasoningTags("[THINK]", "[/THINK]"),)
"""Tags that a template may only tell its model about."""


def find_tags(template: ChatTemplate) -> ReasoningTags:
    """The tags of a template; `<think>` where it writes none."""
    for turn in _turns():
        try:
            before, found, after = template.render([*PROBE, turn], ask=False).partition(MARK)
        except PromptFailure:
            continue
        if not found:
            continue
        if before.endswith(CHANNELS.open):
            return CHANNELS
        opening = _OPENING.search(before.rstrip())
        closing = _closing(opening[0]) if opening else ""
        if opening and after.lstrip().startswith(closing):
            return ReasoningTags(opening[0], closing)
    prompt = template.render(PROBE)
    return next((tags for tags in _SPELLED if tags.open in prompt and tags.close in prompt), THINK)


def _turns() -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": "Well.", "reasoning_content": MARK}
    yield {"role": "assistant", "content": "Well.", "thinking": MARK}
    blocks = [{"type": "thinking", "thinking": MARK}, {"type": "text", "text": "Well."}]
    yield {"role": "assistant", "content": blocks}


def _closing(opening: str) -> str:
    if opening.startswith("<|"):
        return opening.replace("START_", "END_", 1)
    return f"{opening[0]}/{opening[1:]}"
