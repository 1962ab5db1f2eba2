"""Tool-call parser protocol: text of one assistant turn in, calls and the remaining text out; and strict JSON decoding.

Owns the protocol, its records and limits, and what counts as a well-formed call. Refused: duplicate keys, NaN and
Infinity, numbers beyond a float, lone surrogates, deep nesting, great size. Accepted: raw line breaks inside strings,
since their meaning is plain, and arguments that are an object written as a JSON string. Knows no format and no tool:
whether a tool exists and its arguments fit is decided where it is called.
Invariant: `parse` never raises, takes time linear in the text, and gives at most `MAX_CALLS + 1` calls.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from treadle.types import ToolCall

MAX_CALL_CHARS = 262_144
"""Characters of one call, tags aside; a longer call is a problem."""

MAX_CALLS = 64
"""Calls of one turn; what follows is one problem."""

MAX_DEPTH = 64
"""Nesting of arguments; deeper ones are a problem, since code that walks them later would run out of stack."""

MAX_NAME_CHARS = 128


@dataclass(frozen=True, slots=True)
class Parsed:
    """One assistant turn: its text, and its calls. Without calls, `content` is the text as it was.

    `reasoning` is what a format that frames turns has as such; in all others it is part of the text.
    """

    content: str
    calls: tuple[ToolCall, ...]
    reasoning: str = ""


class Untyped(str):
    """An argument that a format writes without its type: the tool's schema decides whether `7` is a number."""

    __slots__ = ()


class ToolParser(Protocol):
    """One tool-call format."""

    @property
    def marker(self) -> str:
        """Text that every turn with a call contains, so that `marker not in text` can stand for a parse."""
        ...

    @property
    def frames_turns(self) -> bool:
        """Whether all that a model says is written in this format, calls or not."""
        ...

    @property
    def starts(self) -> tuple[str, ...]:
        """Texts one of which is where the first call, or a wrapper of calls, begins; empty where that is unknown."""
        ...

    def opening(self, name: str) -> str:
        """What a turn begins with that calls this tool, or any where `name` is empty; empty where that is unknown."""
        ...

    def parse(self, text: str) -> Parsed:
        """Find the calls. A malformed one is a call with a `problem`, never an exception."""
        ...


class MalformedCall(Exception):
    """A call that cannot be made: why, and its name as far as it is known."""

    def __init__(self, problem: str, name: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.name = name

    def call(self) -> ToolCall:
        return ToolCall(self.name, {}, problem=self.problem)


_SPECIAL_TOKEN_STARTS = re.compile(r"<|\[(?=/?[A-Z])|\](?=[<~])")
"""What the spellings of special tokens begin with."""


def quote(value: str) -> str:
    """A text that a model wrote, for a message that it will read: as Python writes it, no longer than a name."""
    return escape_special_tokens(repr(value[:MAX_NAME_CHARS]))


def escape_special_tokens(text: str) -> str:
    """An error message without special tokens: none is spelled where it is rendered, at an endpoint for instance."""
    return _SPECIAL_TOKEN_STARTS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = _first_repeated([name for name, _ in pairs])
        raise MalformedCall(f"the key {quote(twice)} is given more than once")
    return found


def _first_repeated(names: Sequence[str]) -> str:
    """The first repeated name, in one pass."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            break
        seen.add(name)
    return name


def _refuse_constant(word: str) -> NoReturn:
    raise MalformedCall(f"{word} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise MalformedCall(f"the number {digits[:MAX_NAME_CHARS]} is too large")
    return number


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite, strict=False
)
_BLANK = re.compile(r"\s*")


def skip_blank(text: str, at: int) -> int:
    """The position of the next character that is not white space."""
    match = _BLANK.match(text, at)
    assert match is not None
    return match.end()


def decode(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that starts at `at`, and where it ends; MalformedCall if there is none within the limits."""
    cut = len(text) - at > MAX_CALL_CHARS
    source, start = (text[at : at + MAX_CALL_CHARS], 0) if cut else (text, at)
    try:
        value, end = _DECODER.raw_decode(source, start)
    except json.JSONDecodeError as error:
        if cut and (error.pos >= MAX_CALL_CHARS - 1 or error.msg.startswith("Unterminated")):
            raise MalformedCall(f"over {MAX_CALL_CHARS} characters") from None
        raise MalformedCall(f"not JSON: {error.msg} at character {error.pos - start}") from None
    except RecursionError:
        raise MalformedCall(f"nested more than {MAX_DEPTH} deep") from None
    except ValueError as error:  # a whole number with thousands of digits
        raise MalformedCall(f"not JSON: {error}") from None
    if source.count("{", start, end) + source.count("[", start, end) > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise MalformedCall(f"nested more than {MAX_DEPTH} deep")
    if source.find("\\u", start, end) >= 0 and not _is_text(value):
        raise MalformedCall("a string holds half of a surrogate pair, which is not text")
    return value, end + at - start


def decode_all(text: str) -> Any:
    """The JSON value that is all of `text`, white space aside."""
    value, end = decode(text, skip_blank(text, 0))
    if skip_blank(text, end) != len(text):
        raise MalformedCall(f"not JSON: there is more text after the value, at character {end}")
    return value


def call_from_json(value: Any) -> ToolCall:
    """The call that a JSON object with a name and arguments describes."""
    if type(value) is not dict:
        raise MalformedCall("a call must be an object with a name and arguments")
    name = check_name(value.get("name"))
    given = value.get("arguments", value.get("parameters"))
    identity = value.get("id", "")
    arguments = given if type(given) is dict else arguments_of(given, name)
    return ToolCall(name, arguments, identity if type(identity) is str else "")


def check_name(name: Any) -> str:
    """`name`, if it can be a tool's."""
    if type(name) is not str or not name.strip():
        raise MalformedCall("a call must name its tool, as a string")
    if len(name) > MAX_NAME_CHARS:
        raise MalformedCall(f"the name of the tool is over {MAX_NAME_CHARS} characters")
    return name


def arguments_of(given: Any, name: str) -> dict[str, Any]:
    """Arguments as an object, also where they were left out or written as a JSON string."""
    if isinstance(given, str):
        try:
            given = decode_all(given)
        except MalformedCall as malformed:
            raise MalformedCall(f"the arguments are {malformed.problem}", name) from None
    if given is None:
        return {}
    if type(given) is not dict:
        raise MalformedCall("the arguments must be an object", name)
    return given


def _depth(value: Any) -> int:
    """How deep lists and objects are nested, without recursion."""
    depth, level = 0, [value]
    while level := [part for part in level if type(part) in (dict, list)]:
        depth += 1
        level = [part for item in level for part in (item.values() if type(item) is dict else item)]
    return depth


def _is_text(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
