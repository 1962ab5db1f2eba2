"""The walk over one turn that all tagged formats share: find a tag, read a call, go on after it.

Owns content, the limit on calls, and how to find the way again after a malformed call. Knows no format.
Invariant: the position only moves forward, so a walk is linear.
"""

from collections.abc import Callable, Iterable

from treadle.rollout.parsers.payload import Malformed
from treadle.rollout.parsers.protocol import MAX_CALLS, Parsed
from treadle.types import ToolCall

Read = Callable[[str, int], tuple[Iterable[ToolCall], int]]
"""Reads what follows an opening tag: the calls, and the position after them. Raises Malformed."""

_THOUGHT_END = "</think>"


def after_thought(text: str) -> int:
    """Where speech begins: a call that is only thought about, before `</think>`, is not made."""
    found = text.find(_THOUGHT_END)
    return 0 if found < 0 else found + len(_THOUGHT_END)


def scan(text: str, start: str, end: str, read: Read, wrappers: tuple[str, ...] = ()) -> Parsed:
    """The calls between `start` and `end`, and the text around them without the `wrappers`."""
    opening = text.find(start, after_thought(text))
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
        except Malformed as malformed:
            calls.append(malformed.call())
            at = _resume(text, start, end, at)
        opening = text.find(start, at)
    pieces.append(text[at:] if opening < 0 else "")
    return Parsed(_join(pieces, wrappers), limit(calls))


def expect(text: str, tag: str, at: int, name: str = "") -> int:
    """The position after `tag`, which must stand at `at`."""
    if text.startswith(tag, at):
        return at + len(tag)
    raise Malformed(f"the call is not closed with {tag}" if at >= len(text) else f"expected {tag} after the call", name)


def limit(calls: list[ToolCall]) -> tuple[ToolCall, ...]:
    """The calls of a turn; those over the limit become one problem."""
    if len(calls) > MAX_CALLS:
        calls[MAX_CALLS:] = [Malformed(f"more than {MAX_CALLS} calls in one turn").call()]
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
