"""The chat template: messages in, text out.

Owns the only call of `apply_chat_template` in treadle. Knows nothing about tokens or turns.
Invariant: whatever a template does with messages it cannot take is a `PromptFailure` with the template's own words.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from treadle.config.model import ModelConfig
from treadle.errors import ConfigError, Mistake, PromptFailure, blame
from treadle.model.tokenizer import ChatTokenizer
from treadle.types import Message

PROBE: tuple[Message, ...] = ({"role": "user", "content": "Hello."},)


class ChatTemplate:
    """A tokenizer's chat template, or the one that replaces it, with the configured extra variables."""

    def __init__(self, tokenizer: ChatTokenizer, model: ModelConfig) -> None:
        self._tokenizer = tokenizer
        self._options = {**model.apply_chat_template_kwargs, "tokenize": False}
        if model.custom_chat_template is not None:
            self._options["chat_template"] = model.custom_chat_template

    @classmethod
    def create(cls, tokenizer: ChatTokenizer, model: ModelConfig) -> "ChatTemplate":
        """A template that has rendered a message; a ConfigError if there is none, or if it cannot even do that."""
        if model.custom_chat_template is None and not tokenizer.chat_template:
            problem = f"the tokenizer of {model.path!r} has no chat template"
            fix = "set it to a Jinja chat template, or use the tokenizer of an instruction-tuned model"
            raise ConfigError([Mistake("model.custom_chat_template", problem, fix=fix)])
        template = cls(tokenizer, model)
        try:
            template.render(PROBE)
        except PromptFailure as failure:
            key = "model.path" if model.custom_chat_template is None else "model.custom_chat_template"
            problem = f"the chat template cannot render a single user message: {failure}"
            raise ConfigError([Mistake(key, problem, origin=model.origin(key.removeprefix("model.")))]) from failure
        return template

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, ask: bool = True) -> str:
        """The whole conversation as text; `ask` adds the header of the next assistant turn."""
        return self.render_json(to_json(messages, tools), ask=ask)

    def render_json(self, conversation: str, *, ask: bool = True) -> str:
        """Like `render`, from what `to_json` wrote."""
        messages, tools = json.loads(conversation)
        _check(messages)
        try:
            with blame(PromptFailure):
                return self._apply(messages, tools or None, ask)
        except PromptFailure as failure:
            roles = ", ".join(message["role"] for message in messages)
            reason = _words_of(failure.__cause__) or str(failure)
            raise PromptFailure(f"the chat template refuses a conversation of {roles}: {reason}") from failure

    def _apply(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, ask: bool) -> str:
        _open_arguments(messages)
        return cast(
            str,
            self._tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=ask, **self._options),
        )


def to_json(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """A conversation as JSON: plain lists and dicts for the template, and a key that stands for the content."""
    try:
        return _WRITER.encode((messages, tools))
    except (TypeError, ValueError) as error:
        raise PromptFailure(f"messages and tools must be plain JSON values: {error}") from error


def _as_dict(value: object) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"found {value!r} ({type(value).__name__})")


_WRITER = json.JSONEncoder(ensure_ascii=False, default=_as_dict)


def _check(messages: list[Any]) -> None:
    if not messages:
        raise PromptFailure("a conversation needs at least one message")
    for at, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise PromptFailure(f"message {at} has no role: {str(message)[:80]}")


def _words_of(cause: BaseException | None) -> str:
    """What the template itself said, if it raised; other errors are worth their type's name too."""
    from jinja2 import TemplateError

    return str(cause) if isinstance(cause, TemplateError) else ""


def _open_arguments(messages: list[dict[str, Any]]) -> None:
    """OpenAI writes the arguments of a call as JSON text, templates expect an object: parse them in place."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            if isinstance(function.get("arguments"), str):
                try:
                    function["arguments"] = json.loads(function["arguments"])
                except ValueError:
                    continue  # not JSON after all; the template shows the text as it is
