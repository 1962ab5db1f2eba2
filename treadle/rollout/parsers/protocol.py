"""What a tool-call parser is: text of one assistant turn in, calls and the remaining text out.

Owns the protocol, its records and its limits. Knows no format and no tool: whether a tool exists and its arguments
fit is decided where it is called.
Invariant: `parse` never raises, takes time linear in the text, and gives at most `MAX_CALLS + 1` calls.
"""

from dataclasses import dataclass
from typing import Protocol

from treadle.types import ToolCall

MAX_CALL_CHARS = 262_144
"""Characters of one call, tags aside; a longer call is a problem."""

MAX_CALLS = 64
"""Calls of one turn; what follows is one problem."""

MAX_DEPTH = 64
"""Nesting of arguments; deeper ones are a problem, since whoever walks them later would run out of stack."""

MAX_NAME_CHARS = 128


@dataclass(frozen=True, slots=True)
class Parsed:
    """One assistant turn: what it says, and what it calls. Without calls, `content` is the text as it was."""

    content: str
    calls: tuple[ToolCall, ...]


class Untyped(str):
    """An argument that a format writes without saying its type: the tool's schema decides whether `7` is a number."""

    __slots__ = ()


class ToolParser(Protocol):
    """One tool-call format."""

    @property
    def marker(self) -> str:
        """Text that every turn with a call contains, so that `marker not in text` can stand for a parse."""
        ...

    def parse(self, text: str) -> Parsed:
        """Find the calls. A malformed one is a call with a `problem`, never an exception."""
        ...
