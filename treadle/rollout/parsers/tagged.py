"""Formats that write a call as JSON after a tag.

Owns two shapes: the whole call as JSON (one object or a list of them), and a name, a separator and the arguments.
Invariant: a closing tag inside a JSON string does not end the call, since the JSON is decoded first.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from treadle.rollout.parsers.payload import Malformed, arguments_of, call_of, check_name, decode, skip_blank
from treadle.rollout.parsers.protocol import MAX_NAME_CHARS, Parsed
from treadle.rollout.parsers.scan import expect, scan
from treadle.types import ToolCall

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

    @property
    def marker(self) -> str:
        return self.start

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
        return (call_of(value),), at

    def _read_named(self, text: str, at: int) -> tuple[Iterable[ToolCall], int]:
        found = text.find(self.separator, at, at + 2 * MAX_NAME_CHARS + len(self.separator))
        if found < 0:
            raise Malformed(f"expected the name of a tool and {self.separator.strip()}")
        name, identity = self.identify(text[at:found].strip())
        check_name(name)
        try:
            value, at = decode(text, skip_blank(text, found + len(self.separator)))
        except Malformed as malformed:
            raise Malformed(f"the arguments are {malformed.problem}", name) from None
        at = self._close(text, at, name)
        return (ToolCall(name, arguments_of(value, name), identity),), at

    def _close(self, text: str, at: int, name: str = "") -> int:
        return expect(text, self.end, skip_blank(text, at), name) if self.end else at


def _call_or_problem(value: object) -> ToolCall:
    """One call of a list; a malformed one leaves the others alone."""
    try:
        return call_of(value)
    except Malformed as malformed:
        return malformed.call()
