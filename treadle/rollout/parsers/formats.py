"""Tool-call formats: the shapes that models write calls in.

    TaggedJson         a tag, then the call as JSON, or a name, a separator and the arguments as JSON
    TaggedParameters   tags that hold the name: `<parameter=a>1</parameter>`
    PairedArguments    pairs of key and value tags
    BareJson           a turn that is nothing but JSON objects with a name and parameters (Llama)
    Harmony            messages with a header that names a channel and a recipient (gpt-oss)

Owns the walk over a turn that they share: content around calls, the limit on calls, and where to go on after a
malformed one. The text of a tagged argument does not say its type, so it is passed on as `Untyped`, for the tool's
schema to decide.
Invariant: the position only moves forward, so a parse is linear; a closing tag inside a JSON string does not end the
call, since the JSON is decoded first.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

from treadle.rollout.parsers.base import (
    MAX_CALL_CHARS,
    MAX_CALLS,
    MAX_NAME_CHARS,
    MalformedCall,
    Parsed,
    Untyped,
    arguments_of,
    call_from_json,
    check_name,
    decode,
    quote,
    skip_blank,
)
from treadle.types import ToolCall

ReadCall = Callable[[str, int], tuple[Iterable[ToolCall], int]]
"""Reads what follows an opening tag: the calls, and the position after them. Raises MalformedCall."""

_REASONING_END = "</think>"


def after_reasoning(text: str) -> int:
    """Where speech begins: a call that is only thought about, before `</think>`, is not made."""
    found = text.find(_REASONING_END)
    return 0 if found < 0 else found + len(_REASONING_END)


def scan(text: str, start: str, end: str, read: ReadCall, wrappers: tuple[str, ...] = ()) -> Parsed:
    """The calls between `start` and `end`, and the text around them without the `wrappers`."""
    opening = text.find(start, after_reasoning(text))
    if opening < 0:
        return Parsed(text, ())
    calls: list[ToolCall] = []
    pieces: list[str] = []
    at = 0
    while opening >= 0 and len(calls) <= MAX_CALLS:
        pieces.append(text[at:opening])
        at = opening + len(start)
        try:
            found, at = read(text, at)
            calls.extend(found)
        except MalformedCall as malformed:
            calls.append(malformed.call())
            at = _resume(text, start, end, at)
        opening = text.find(start, at)
    pieces.append(text[at:] if opening < 0 else "")
    return Parsed(_join(pieces, wrappers), limit_calls(calls))


def expect(text: str, tag: str, at: int, name: str = "") -> int:
    """The position after `tag`, which must stand at `at`."""
    if text.startswith(tag, at):
        return at + len(tag)
    raise MalformedCall(
        f"the call is not closed with {tag}" if at >= len(text) else f"expected {tag} after the call", name
    )


def limit_calls(calls: list[ToolCall]) -> tuple[ToolCall, ...]:
    """The calls of a turn; those over the limit become one problem."""
    if len(calls) > MAX_CALLS:
        calls[MAX_CALLS:] = [MalformedCall(f"more than {MAX_CALLS} calls in one turn").call()]
    return tuple(calls)


def _resume(text: str, start: str, end: str, at: int) -> int:
    """Where to go on after a malformed call: after its closing tag, else at the next call, else nowhere."""
    following = text.find(start, at)
    closing = text.find(end, at, None if following < 0 else following) if end else -1
    if closing >= 0:
        return closing + len(end)
    return len(text) if following < 0 else following


def _join(pieces: list[str], wrappers: tuple[str, ...]) -> str:
    content = "".join(pieces)
    for wrapper in wrappers:
        content = content.replace(wrapper, "")
    return content.strip()


Identify = Callable[[str], tuple[str, str]]
"""Splits what stands where the name is expected into name and call id."""


def name_only(label: str) -> tuple[str, str]:
    """The label is the name, and calls have no id."""
    return label, ""


def name_and_call_id(label: str) -> tuple[str, str]:
    """`add[CALL_ID]a1b2` calls add."""
    name, _, identity = label.partition("[CALL_ID]")
    return name.strip(), identity.strip()


def numbered_function(label: str) -> tuple[str, str]:
    """`functions.add:0` calls add; the whole label is the call's id."""
    return label.removeprefix("functions.").rpartition(":")[0] or label, label


@dataclass(frozen=True, slots=True)
class TaggedJson:
    """`start`, JSON, `end`; or with a `separator`: `start`, name, `separator`, JSON, `end`. An empty `end` is none."""

    start: str
    end: str
    separator: str = ""
    identify: Identify = name_only
    wrappers: tuple[str, ...] = ()
    frames_turns: ClassVar[bool] = False

    @property
    def marker(self) -> str:
        return self.start

    @property
    def starts(self) -> tuple[str, ...]:
        return self.start, *self.wrappers

    def opening(self, name: str) -> str:
        start = "".join(self.wrappers[:1]) + self.start
        if not name:
            return start
        if not self.separator:
            return f'{start}\n{{"name": {json.dumps(name)}, "arguments": '
        return f"{start}{name}{self.separator}" if self.identify is name_only else ""

    def parse(self, text: str) -> Parsed:
        return scan(text, self.start, self.end, self._read, self.wrappers)

    def _read(self, text: str, at: int) -> tuple[Iterable[ToolCall], int]:
        at = skip_blank(text, at)
        if self.separator and text[at : at + 1] not in ("{", "["):
            return self._read_named(text, at)
        value, at = decode(text, at)
        at = self._close(text, at)
        if type(value) is list:
            return map(_call_or_problem, value), at
        return (call_from_json(value),), at

    def _read_named(self, text: str, at: int) -> tuple[Iterable[ToolCall], int]:
        found = text.find(self.separator, at, at + 2 * MAX_NAME_CHARS + len(self.separator))
        if found < 0:
            raise MalformedCall(f"expected the name of a tool and {self.separator.strip()}")
        name, identity = self.identify(text[at:found].strip())
        check_name(name)
        try:
            value, at = decode(text, skip_blank(text, found + len(self.separator)))
        except MalformedCall as malformed:
            raise MalformedCall(f"the arguments are {malformed.problem}", name) from None
        at = self._close(text, at, name)
        return (ToolCall(name, arguments_of(value, name), identity),), at

    def _close(self, text: str, at: int, name: str = "") -> int:
        return expect(text, self.end, skip_blank(text, at), name) if self.end else at


def _call_or_problem(value: object) -> ToolCall:
    """One call of a list; a malformed one leaves the others alone."""
    try:
        return call_from_json(value)
    except MalformedCall as malformed:
        return malformed.call()


_STRING_FLAG = '" string="'


@dataclass(frozen=True, slots=True)
class TaggedParameters:
    """`call` name `opened` then `parameter` key `opened` text `parameter_end` any number of times, then `call_end`."""

    call: str
    call_end: str
    parameter: str
    parameter_end: str
    opened: str
    wrappers: tuple[str, ...] = ()
    frames_turns: ClassVar[bool] = False

    @property
    def marker(self) -> str:
        return self.call

    @property
    def starts(self) -> tuple[str, ...]:
        return self.call, *self.wrappers

    def opening(self, name: str) -> str:
        start = "".join(f"{wrapper}\n" for wrapper in self.wrappers[:1])
        return f"{start}{self.call}{name}{self.opened}" if name else start + self.call

    def parse(self, text: str) -> Parsed:
        return scan(text, self.call, self.call_end, self._read, self.wrappers)

    def _read(self, text: str, at: int) -> tuple[Iterable[ToolCall], int]:
        label, at = _upto(text, self.opened, at, MAX_NAME_CHARS, "the name of the tool")
        name = check_name(label)
        arguments: dict[str, str] = {}
        first, at = at, skip_blank(text, at)
        while text.startswith(self.parameter, at):
            label, at = _upto(text, self.opened, at + len(self.parameter), MAX_NAME_CHARS, "a parameter", name)
            value, at = _upto(text, self.parameter_end, at, MAX_CALL_CHARS, f"parameter {quote(label)}", name)
            _add_argument(arguments, *_typed(label, value), name)
            at = skip_blank(text, at)
            if at - first > MAX_CALL_CHARS:
                raise MalformedCall(f"over {MAX_CALL_CHARS} characters", name)
        at = expect(text, self.call_end, at, name)
        return (ToolCall(name, arguments),), at


@dataclass(frozen=True, slots=True)
class PairedArguments:
    """`call` name, then `key` text `key_end` `value` text `value_end` any number of times, then `call_end`."""

    call: str
    call_end: str
    key: str
    key_end: str
    value: str
    value_end: str
    frames_turns: ClassVar[bool] = False

    @property
    def marker(self) -> str:
        return self.call

    @property
    def starts(self) -> tuple[str, ...]:
        return (self.call,)

    def opening(self, name: str) -> str:
        return f"{self.call}{name}"

    def parse(self, text: str) -> Parsed:
        return scan(text, self.call, self.call_end, self._read)

    def _read(self, text: str, at: int) -> tuple[Iterable[ToolCall], int]:
        name, at = self._name(text, at)
        arguments: dict[str, str] = {}
        first = at
        while text.startswith(self.key, at):
            label, at = _upto(text, self.key_end, at + len(self.key), MAX_NAME_CHARS, "a key", name)
            at = expect(text, self.value, skip_blank(text, at), name)
            value, at = _upto(text, self.value_end, at, MAX_CALL_CHARS, f"the value of {quote(label)}", name)
            _add_argument(arguments, label.strip(), Untyped(value), name)
            at = skip_blank(text, at)
            if at - first > MAX_CALL_CHARS:
                raise MalformedCall(f"over {MAX_CALL_CHARS} characters", name)
        return (ToolCall(name, arguments),), expect(text, self.call_end, at, name)

    def _name(self, text: str, at: int) -> tuple[str, int]:
        """The name, which ends where the first key or the end of the call begins."""
        window = text[at : at + 2 * MAX_NAME_CHARS]
        ends = [end for end in (window.find(self.key), window.find(self.call_end)) if end >= 0]
        if not ends:
            raise MalformedCall(f"expected the name of a tool, then {self.key} or {self.call_end}")
        return check_name(window[: min(ends)].strip()), at + min(ends)


def _upto(text: str, tag: str, at: int, most: int, what: str, name: str = "") -> tuple[str, int]:
    """The text before the next `tag`, at most `most` characters, and the position after it."""
    found = text.find(tag, at, at + most + len(tag))
    if found < 0:
        long = len(text) - at > most
        raise MalformedCall(f"{what} is not closed with {tag}{f' within {most} characters' if long else ''}", name)
    return text[at:found], found + len(tag)


def _typed(label: str, value: str) -> tuple[str, str]:
    """The key and its value: a format may say beside the key that the value is a string."""
    key, _, flag = label.partition(_STRING_FLAG)
    return key.strip(), value if flag == "true" else Untyped(_trim(value))


def _trim(value: str) -> str:
    """Without the line breaks that set a value apart from its tags."""
    return value.removeprefix("\n").removesuffix("\n")


def _add_argument(arguments: dict[str, str], key: str, value: str, name: str) -> None:
    if key in arguments:
        raise MalformedCall(f"the argument {quote(key)} is given more than once", name)
    arguments[key] = value


@dataclass(frozen=True, slots=True)
class BareJson:
    """Objects at the start of the turn or after `tag`, apart by `separator`. An object without a name is speech."""

    tag: str
    separator: str
    frames_turns: ClassVar[bool] = False

    @property
    def marker(self) -> str:
        return '"name"'

    @property
    def starts(self) -> tuple[str, ...]:
        return "{", self.tag

    def opening(self, name: str) -> str:
        return f'{{"name": {json.dumps(name)}, "parameters": ' if name else '{"name": "'

    def parse(self, text: str) -> Parsed:
        spoken = after_reasoning(text)
        tagged = text.find(self.tag, spoken)
        content, at = (text[:tagged], tagged + len(self.tag)) if tagged >= 0 else (text[:spoken], spoken)
        at = skip_blank(text, at)
        if not text.startswith("{", at) or self.marker not in text:
            return Parsed(text, ())
        calls, at = self._read(text, at)
        return Parsed(f"{content}{text[at:]}".strip(), limit_calls(calls)) if calls else Parsed(text, ())

    def _read(self, text: str, at: int) -> tuple[list[ToolCall], int]:
        calls: list[ToolCall] = []
        while text.startswith("{", at) and len(calls) <= MAX_CALLS:
            try:
                value, end = decode(text, at)
                if "name" not in value:
                    return calls, at
                calls.append(call_from_json(value))
            except MalformedCall as malformed:
                if text.find(self.marker, at, at + MAX_NAME_CHARS) < 0:
                    return calls, at
                calls.append(malformed.call())
                return calls, len(text)
            at = skip_blank(text, end)
            at = skip_blank(text, at + len(self.separator)) if text.startswith(self.separator, at) else at
        return calls, at


_MESSAGE = "<|message|>"
_ENDS = re.compile(r"<\|(?:call|end|return|start|channel)\|>")
_RECIPIENT = re.compile(r"to=([^\s<]+)")


@dataclass(frozen=True, slots=True)
class Harmony:
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>`."""

    marker: str = _MESSAGE
    starts: tuple[str, ...] = ()
    frames_turns: ClassVar[bool] = True

    def opening(self, name: str) -> str:
        return f"<|channel|>commentary to=functions.{name}"

    def parse(self, text: str) -> Parsed:
        message = text.find(_MESSAGE)
        if message < 0:
            return Parsed(text, ())
        calls: list[ToolCall] = []
        said: list[str] = []
        thought: list[str] = []
        at = 0
        while message >= 0 and len(calls) <= MAX_CALLS:
            header, start = text[at:message], message + len(_MESSAGE)
            closing = _ENDS.search(text, start)
            at = closing.start() if closing else len(text)
            recipient = _RECIPIENT.search(header)
            if recipient:
                calls.append(_harmony_call(recipient[1], text[start:at]))
            else:
                (thought if "analysis" in header else said).append(text[start:at])
            message = text.find(_MESSAGE, at)
        return Parsed("\n".join(said).strip(), limit_calls(calls), "\n".join(thought).strip())


def _harmony_call(recipient: str, body: str) -> ToolCall:
    name = recipient.removeprefix("functions.")
    try:
        check_name(name)
        if len(body) > MAX_CALL_CHARS:
            raise MalformedCall(f"over {MAX_CALL_CHARS} characters", name)
        return ToolCall(name, arguments_of(body, name))
    except MalformedCall as malformed:
        return malformed.call()
