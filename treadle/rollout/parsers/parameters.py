"""Formats that write each argument as text between tags.

Owns two shapes: tags that hold the name (`<parameter=a>1</parameter>`), and pairs of key and value tags.
The text of an argument does not say its type, so it is handed on as `Untyped`, for the tool's schema to decide.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from treadle.rollout.parsers.payload import Malformed, check_name, quote, skip_blank
from treadle.rollout.parsers.protocol import MAX_CALL_CHARS, MAX_NAME_CHARS, Parsed, Untyped
from treadle.rollout.parsers.scan import expect, scan
from treadle.types import ToolCall

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

    @property
    def marker(self) -> str:
        return self.call

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
            _add(arguments, *_typed(label, value), name)
            at = skip_blank(text, at)
            if at - first > MAX_CALL_CHARS:
                raise Malformed(f"over {MAX_CALL_CHARS} characters", name)
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

    @property
    def marker(self) -> str:
        return self.call

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
            _add(arguments, label.strip(), Untyped(value), name)
            at = skip_blank(text, at)
            if at - first > MAX_CALL_CHARS:
                raise Malformed(f"over {MAX_CALL_CHARS} characters", name)
        return (ToolCall(name, arguments),), expect(text, self.call_end, at, name)

    def _name(self, text: str, at: int) -> tuple[str, int]:
        """The name, which ends where the first key or the end of the call begins."""
        window = text[at : at + 2 * MAX_NAME_CHARS]
        ends = [end for end in (window.find(self.key), window.find(self.call_end)) if end >= 0]
        if not ends:
            raise Malformed(f"expected the name of a tool, then {self.key} or {self.call_end}")
        return check_name(window[: min(ends)].strip()), at + min(ends)


def _upto(text: str, tag: str, at: int, most: int, what: str, name: str = "") -> tuple[str, int]:
    """The text before the next `tag`, at most `most` characters, and the position after it."""
    found = text.find(tag, at, at + most + len(tag))
    if found < 0:
        long = len(text) - at > most
        raise Malformed(f"{what} is not closed with {tag}{f' within {most} characters' if long else ''}", name)
    return text[at:found], found + len(tag)


def _typed(label: str, value: str) -> tuple[str, str]:
    """The key and its value: a format may say beside the key that the value is a string."""
    key, _, flag = label.partition(_STRING_FLAG)
    return key.strip(), value if flag == "true" else Untyped(_trim(value))


def _trim(value: str) -> str:
    """Without the line breaks that set a value apart from its tags."""
    return value.removeprefix("\n").removesuffix("\n")


def _add(arguments: dict[str, str], key: str, value: str, name: str) -> None:
    if key in arguments:
        raise Malformed(f"the argument {quote(key)} is given more than once", name)
    arguments[key] = value
