"""What a reward model is asked: a Jinja template, filled with the fields of a task and its trajectory.

Owns the template's names and the border between what its author wrote and what a trajectory said. Refuses to know who
reads the text. Templates run in a sandbox that changes nothing it is given; a field that is missing is a failure, never
an empty text.
Invariant: special tokens in the result are the author's; see `guard` for what happens to those of a trajectory.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from treadle.errors import ConfigError, Mistake, nearest
from treadle.reward.argument import ARGUMENTS, GROUP_ARGUMENTS
from treadle.reward.failure import Fault, ScoreFailure, describe
from treadle.reward.guard import Guard
from treadle.types import Message, Task, Trajectory


def read_question(task: Task, _: Trajectory) -> str:
    """What the user asked last."""
    asked = (message["content"] for message in reversed(task.messages) if message["role"] == "user")
    return _as_text(next(asked, ""))


def read_conversation(_: Task, trajectory: Trajectory) -> str:
    """All that was said, each message after the name of its role."""
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
"""Around each value while a template is rendered. No model ever reads these two characters, whoever writes them."""

_MARK = re.compile(f"([{_OPEN}{_CLOSE}])")


class Prompt:
    """A template and the fields it uses. Built by `create`."""

    def __init__(self, template: Template, needs: Sequence[str], guard: Guard) -> None:
        self._template, self._needs, self._guard = template, needs, guard

    @classmethod
    def create(cls, text: str, guard: Guard, scope: str = "sample") -> "Prompt":
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
        """The same for all samples of a task, with a template of scope group."""
        return self._render(lambda name: GROUP_FIELDS[name](task, trajectories))

    def _render(self, read: Callable[[str], Any]) -> str:
        try:
            text = self._template.render({name: read(name) for name in self._needs})
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise ScoreFailure(Fault.PROMPT, f"has a prompt that cannot be filled: {describe(error)}") from error
        return self._guard.settle(*_unmark(text))


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
    """A value between marks. What a block captured has marks of its own; nobody closes one that was opened outside."""
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
