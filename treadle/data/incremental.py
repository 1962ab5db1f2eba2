"""Incremental rendering: what a chat template writes between two assistant turns (close, messages, next header).

Owns two ways to that text. `IncrementalTemplate.render` calls the template each time: exact, slow. `learn` calls it
once, with placeholders, and gets a `TurnPattern`: literal text around the contents. Knows nothing about tokens.
Invariant: a pattern exists only if it writes, for every text in `HOSTILE`, what the template itself writes.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from treadle.data.chat_template import MARK, PROBE, ChatTemplate
from treadle.data.encoder import HOSTILE
from treadle.errors import PromptFailure
from treadle.types import Message

Tools = Sequence[Mapping[str, Any]]

FIELDS = ("content", "name", "tool_call_id")
"""Fields of a message that a pattern can fill in; a message with any other is rendered by the template."""

MAX_MESSAGES = 16
"""Longer sequences of new messages are rare enough to be left to the template."""

NAMELESS = "zq_nameless"
PROBE_TOOLS, OTHER_TOOLS = (
    tuple(
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "A tool.",
                "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "A text."}}},
            },
        }
        for name in names
    )
    for names in (["zq_probe"], ["zq_probe", "zq_other"])
)
PROBE_IDS = ("abcDEF123", 'a"b\\c\nd e', "αβγδεζηθι")
"""Call ids to probe with; nine characters, since some templates require that."""

MessageShape = tuple[tuple[str, ...], ...]
"""For each message its role, then a field and whether it is empty, and so on: what a pattern depends on."""


def _escape(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


WRITERS: tuple[Callable[[str], str], ...] = (str, str.strip, _escape)
"""Known transformations of a text by templates: none, trim it, or write it as a JSON string."""


@dataclass(frozen=True, slots=True)
class PatternSlot:
    """A place where one field of one message is written."""

    message: int
    field: str
    write: Callable[[str], str] = str


@dataclass(frozen=True, slots=True)
class TurnPattern:
    """Literal text with slots between: literal, slot, literal, …, literal."""

    literals: tuple[str, ...]
    slots: tuple[PatternSlot, ...]

    def fill(self, messages: Sequence[Message]) -> str:
        parts = [self.literals[0]]
        for slot, literal in zip(self.slots, self.literals[1:], strict=True):
            parts += (slot.write(messages[slot.message][slot.field]), literal)
        return "".join(parts)

    def written_by(self, field: str, write: Callable[[str], str]) -> "TurnPattern":
        """This pattern with another writer for one field."""
        slots = (PatternSlot(slot.message, field, write) if slot.field == field else slot for slot in self.slots)
        return TurnPattern(self.literals, tuple(slots))


def shape_of(messages: Sequence[Message]) -> MessageShape | None:
    """The shape of some messages; None if they hold anything but texts in known fields."""
    shape = []
    for message in messages:
        entry = []
        for field, value in message.items():
            if type(value) is not str or (field not in FIELDS and field != "role"):
                return None
            entry.append(value if field == "role" else field if value else f"no {field}")
        shape.append(tuple(entry))
    return tuple(shape)


class IncrementalTemplate:
    """The text between two assistant turns, by one template, for a model that ends its turns with one of `stops`.

    `closer` is what ends every message in the template's output, where that is not what a model ends a turn with.
    """

    def __init__(self, template: ChatTemplate, stops: Sequence[str], closer: str = "") -> None:
        self._template = template
        self._stops = tuple(stop for stop in stops if stop)
        self._closers = (closer,) if closer else ()

    def render(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """What the template writes after the end-of-turn token of an assistant turn that `messages` follow."""
        refusal = PromptFailure("the chat template leaves out the assistant turn before the new messages")
        for turn in _turns_before(messages):
            try:
                text = self._after(turn, messages, tools)
            except PromptFailure as failure:
                refusal = failure
                continue
            if text is not None and _is_nameless(messages) and NAMELESS in text:
                raise PromptFailure("the chat template writes the name of the tool: tool messages need a name")
            if text is not None:
                return text
        raise refusal

    def learn(self, messages: Sequence[Message], *, tools: bool) -> TurnPattern | None:
        """The pattern for messages of this shape, with or without tools; None if only the template can write them."""
        if len(messages) > MAX_MESSAGES:
            return None
        try:
            patterns = [self._learn(messages, some) for some in ((PROBE_TOOLS, OTHER_TOOLS) if tools else ((),))]
        except PromptFailure:
            return None
        return patterns[0] if patterns[0] == patterns[-1] else None

    def _after(self, turn: Message, messages: Sequence[Message], tools: Tools) -> str | None:
        """The text that follows `turn`; None if the template does not show where that turn ends."""
        _, found, rest = self._template.render([*PROBE, turn, *messages], tools).partition(MARK)
        if not found:
            return None
        closed = self._template.render([*PROBE, turn], tools, ask=False).partition(MARK)[2]
        end = self._end_of_turn(closed)
        if end and rest.startswith(closed[:end]):
            return rest[end:]
        if "tool_calls" in turn:
            return None
        # where the next header is itself a stop token, the model has sampled that header; where turns of the past are
        # closed with another token than the last one, that token stands in the place of the one that was sampled
        return rest[next((len(stop) for stop in (*self._stops, *self._closers) if rest.startswith(stop)), 0) :]

    def _end_of_turn(self, text: str) -> int:
        """Where the first stop token ends; 0 if there is none."""
        return min((at + len(stop) for stop in self._stops if (at := text.find(stop)) >= 0), default=0)

    def _learn(self, messages: Sequence[Message], tools: Tools) -> TurnPattern | None:
        holders = {_placeholder(at, field): PatternSlot(at, field) for at, field in _texts(messages)}
        blank = _fill(messages, lambda at, field: _placeholder(at, field))
        text = self.render(blank, tools)
        parts = re.split(f"({'|'.join(holders)})", text) if holders else [text]
        pattern = TurnPattern(tuple(parts[::2]), tuple(holders[part] for part in parts[1::2]))
        for field in {slot.field for slot in pattern.slots}:
            fitting = (pattern.written_by(field, write) for write in WRITERS)
            probes = list(_probe(blank, field))
            found = next((option for option in fitting if self._holds(option, probes, tools)), None)
            if found is None:
                return None
            pattern = found
        return pattern if self._holds(pattern, list(_probe(blank)), tools) else None

    def _holds(self, pattern: TurnPattern, probes: Sequence[Sequence[Message]], tools: Tools) -> bool:
        return all(pattern.fill(probe) == self.render(probe, tools) for probe in probes)


def _is_nameless(messages: Sequence[Message]) -> bool:
    return any(message.get("role") == "tool" and not message.get("name") for message in messages)


def _turns_before(messages: Sequence[Message]) -> Iterator[Message]:
    """Assistant turns that such messages may follow, likeliest first: templates may require calls before tools."""
    tools = list(takewhile(lambda message: message.get("role") == "tool", messages))
    if tools:
        calls = [_call(at, message, MARK if at == len(tools) - 1 else "") for at, message in enumerate(tools)]
        yield {"role": "assistant", "content": "", "tool_calls": calls}
    yield {"role": "assistant", "content": MARK}


def _call(at: int, result: Message, text: str) -> Message:
    function = {"name": result.get("name") or NAMELESS, "arguments": {"x": text}}
    return {"id": result.get("tool_call_id") or f"zqcall{at:03d}", "type": "function", "function": function}


def _placeholder(message: int, field: str) -> str:
    return f"Zq{field[0]}{message:04d}qZ"


def _texts(messages: Sequence[Message]) -> list[tuple[int, str]]:
    return [(at, field) for at, message in enumerate(messages) for field in FIELDS if message.get(field)]


def _fill(messages: Sequence[Message], text: Callable[[int, str], str]) -> list[Message]:
    """The messages with other texts where they have any."""
    fields = set(_texts(messages))
    return [
        {field: text(at, field) if (at, field) in fields else value for field, value in message.items()}
        for at, message in enumerate(messages)
    ]


def _probe(messages: Sequence[Message], only: str | None = None) -> Iterator[Sequence[Message]]:
    """The messages with hard texts in one field, or in all: each message gets each text in turn."""

    def text(turn: int) -> Callable[[int, str], str]:
        def pick(at: int, field: str) -> str:
            if only not in (None, field):
                return str(messages[at][field])
            texts = PROBE_IDS if field == "tool_call_id" else HOSTILE
            return texts[(turn + at) % len(texts)]

        return pick

    for turn in range(len(HOSTILE)):
        yield _fill(messages, text(turn))
