"""Reward model prompt: a Jinja template over task and trajectory, with special tokens of foreign text escaped.

Owns the template's names, the border between what its author wrote and what a trajectory said, and how special tokens
spelled out in a trajectory are broken up. A policy is rewarded for what a reward model says: without this, an answer
that spells out the end of a turn could continue as the judge. Templates run in a sandbox that changes nothing it is
given; a missing field is a failure, never an empty text. Knows no model.
Invariant: special tokens in the result are the template author's. Where foreign text touches a special token's
spelling, that spelling is gone; all other text is unchanged.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from treadle.data.encoder import special_tokens
from treadle.errors import ConfigError, Mistake, nearest
from treadle.model.tokenizer import ChatTokenizer
from treadle.reward.arguments import ARGUMENTS, GROUP_ARGUMENTS
from treadle.reward.result import Fault, ScoreFailure, describe
from treadle.types import Message, Task, Trajectory

_WORD = r"[^<>\s]{1,64}"
_NAMES = (
    "s|bos|eos|pad|unk|mask|cls|sep|eod|eop|sop|think|tools|image|video|audio|AI|Human|SPECIAL|SYS|human|bot|system|user"
    "|assistant|tool"
)
_COMMON_SPELLINGS = re.compile(
    "|".join(
        (
            rf"[<＜][|｜]{_WORD}?[|｜]?[>＞]",  # <|im_end|>, <｜User｜>, <|turn>
            rf"[<＜]{_WORD}?[|｜][>＞]",  # <turn|>
            r"<<?/?(?:" + _NAMES + r")>>?",  # <s>, </s>, <bos>, <<SYS>>
            r"</?[A-Za-z]{1,32}(?:[_:▁-][A-Za-z0-9]{1,32}){1,8}>",  # <start_of_turn>, <tool_call>, <extra_id_0>
            r"<(?:unused|reserved|extra|special|row|col|loc|seg)_?[0-9]+>",
            r"\[/?[a-z]?[A-Z][A-Z_]{2,32}[0-9]{0,4}\]",  # [INST], [TOOL_CALLS], [gMASK]
            r"\][<~][^\s]{1,32}[\[\]>]|\[e~\[",  # MiniMax: ]~b], [e~[, ]<]minimax[>[
        )
    )
)
"""Spellings of special tokens in current model families, for a server without a local tokenizer. It is better to break
up something else that looks like one than to let one through: a judge reads `< tool_call>` as well."""

_MAX_ROUNDS = 8


class SpecialTokenEscaper:
    """The special tokens of one model, or, where they are not known, what such tokens look like."""

    def __init__(self, tokens: re.Pattern[str] | None) -> None:
        self._tokens = tokens

    @classmethod
    def of(cls, tokenizer: ChatTokenizer) -> "SpecialTokenEscaper":
        """For a model whose tokenizer this is."""
        spellings = sorted(filter(None, special_tokens(tokenizer)), key=len, reverse=True)
        return cls(re.compile("|".join(map(re.escape, spellings))) if spellings else None)

    @classmethod
    def usual(cls) -> "SpecialTokenEscaper":
        """For a model behind a server."""
        return cls(_COMMON_SPELLINGS)

    def clean(self, value: Any) -> Any:
        """Foreign text, or a message or a list of foreign text, without special tokens; a message keeps its role."""
        if isinstance(value, str):
            return self.escape_foreign(value, bytes(b"\1" * len(value)))
        if isinstance(value, Mapping):
            return {name: item if name == "role" else self.clean(item) for name, item in value.items()}
        return [self.clean(item) for item in value] if isinstance(value, list | tuple) else value

    def escape_foreign(self, text: str, foreign: bytes) -> str:
        """The text without those special tokens that `foreign`, one byte a character, has a part in."""
        for _ in range(_MAX_ROUNDS):
            broken, mask = self._break(text, foreign)
            if broken == text:
                return text
            text, foreign = broken, mask
        return text.translate(_ONLY_WORDS)

    def _break(self, text: str, foreign: bytes) -> tuple[str, bytes]:
        """One pass. Breaking a token may lay bare another inside it, hence the rounds."""
        done, mask, end = list[str](), bytearray(), 0
        for match in self._tokens.finditer(text) if self._tokens is not None else ():
            if not any(foreign[match.start() : match.end()]):
                continue
            broken = match[0][0] + " " + match[0][1:] if len(match[0]) > 1 else " "
            done += (text[end : match.start()], broken)
            mask += foreign[end : match.start()] + b"\1" * len(broken)
            end = match.end()
        return "".join([*done, text[end:]]), bytes(mask + foreign[end:])


_ONLY_WORDS = dict.fromkeys(map(ord, "<>|[]｜"), " ")
"""The last resort against spellings that contain one another for ever."""


def read_question(task: Task, _: Trajectory) -> str:
    """Text of the last user message."""
    asked = (message["content"] for message in reversed(task.messages) if message["role"] == "user")
    return _as_text(next(asked, ""))


def read_conversation(_: Task, trajectory: Trajectory) -> str:
    """All messages as text, each after the name of its role."""
    return "\n\n".join(f"{message['role']}: {_as_text(message.get('content'))}" for message in trajectory.messages)


FIELDS: Mapping[str, Callable[[Task, Trajectory], Any]] = {
    **ARGUMENTS,
    "question": read_question,
    "conversation": read_conversation,
}
"""The names a template may use: those of reward functions, and two that save it a loop over messages."""

GROUP_FIELDS: Mapping[str, Callable[[Task, Sequence[Trajectory]], Any]] = {
    **GROUP_ARGUMENTS,
    "question": lambda task, trajectories: read_question(task, trajectories[0]),
    "conversations": lambda task, trajectories: [read_conversation(task, item) for item in trajectories],
}
"""The same for a template about all samples of a task."""

_OPEN, _CLOSE = "\ue000", "\ue001"
"""Around each value while a template is rendered. No model ever reads these two characters, from whatever source."""

_MARK = re.compile(f"([{_OPEN}{_CLOSE}])")


class RewardPrompt:
    """A template and the fields it uses. Built by `create`."""

    def __init__(self, template: Template, needs: Sequence[str], guard: SpecialTokenEscaper) -> None:
        self._template, self._needs, self._guard = template, needs, guard

    @classmethod
    def create(cls, text: str, guard: SpecialTokenEscaper, scope: str = "sample") -> "RewardPrompt":
        """A ConfigError of the key `prompt` where the template cannot be used."""
        try:
            used = meta.find_undeclared_variables(_environment().parse(text))
            template = _environment().from_string(text)
        except TemplateSyntaxError as error:
            raise ConfigError([Mistake("prompt", f"line {error.lineno}: {error.message}", text)]) from error
        fields: Mapping[str, object] = GROUP_FIELDS if scope == "group" else FIELDS
        unknown = sorted(used - set(fields) - set(_environment().globals))
        if unknown:
            fix = nearest(unknown[0], fields) or f"there are {', '.join(fields)}"
            raise ConfigError([Mistake("prompt", f"no field is called {', '.join(unknown)}", text, fix=fix)])
        return cls(template, sorted(used & set(fields)), guard)

    def render(self, task: Task, trajectory: Trajectory) -> str:
        """The text for this trajectory; a ScoreFailure where the template cannot make one."""
        return self._render(lambda name: FIELDS[name](task, trajectory))

    def render_group(self, task: Task, trajectories: Sequence[Trajectory]) -> str:
        """The prompt about all samples of a task, with a template of scope group."""
        return self._render(lambda name: GROUP_FIELDS[name](task, trajectories))

    def _render(self, read: Callable[[str], Any]) -> str:
        try:
            text = self._template.render({name: read(name) for name in self._needs})
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise ScoreFailure(Fault.PROMPT, f"has a prompt that cannot be filled: {describe(error)}") from error
        return self._guard.escape_foreign(*_unmark(text))


def _unmark(text: str) -> tuple[str, bytes]:
    """The text without marks, and for each character whether it came from a value."""
    if not _is_balanced(text):
        raise ScoreFailure(Fault.PROMPT, "has a prompt that cuts a block in pieces: apply filters to single values")
    plain, foreign, depth = list[str](), bytearray(), 0
    for piece in _MARK.split(text):
        if piece in (_OPEN, _CLOSE):
            depth += 1 if piece == _OPEN else -1
        else:
            plain.append(piece)
            foreign += (b"\1" if depth > 0 else b"\0") * len(piece)
    return "".join(plain), bytes(foreign)


def _mark(value: Any) -> str:
    """A value between marks. What a block captured has marks of its own; no value closes one opened outside it."""
    text = str(value)
    return f"{_OPEN}{text if _is_balanced(text) else _MARK.sub('', text)}{_CLOSE}"


def _is_balanced(text: str) -> bool:
    depth = 0
    for mark in _MARK.findall(text):
        depth += 1 if mark == _OPEN else -1
        if depth < 0:
            return False
    return depth == 0


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    """Values are marked as they are written; a filter sees them bare."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, finalize=_mark
    )
    environment.filters["tojson"] = _to_json
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON as a model should read it: plain letters, nothing escaped for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, default=_as_plain)


def _as_plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(value)


def _as_text(content: Any) -> str:
    """A message's content; OpenAI's list of parts is joined."""
    if isinstance(content, list | tuple):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def to_messages(question: str, system: str | None) -> tuple[Message, ...]:
    """A question as the conversation a judge reads."""
    before: tuple[Message, ...] = () if system is None else ({"role": "system", "content": system},)
    return (*before, {"role": "user", "content": question})
