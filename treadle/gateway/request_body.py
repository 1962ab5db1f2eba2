"""Gateway request body: the JSON object of a request, bounded; tools that come again are not read again.

Owns what a body may hold, and the tools of a session's last requests. A large body is read in a thread, and refused
before where that would hold the interpreter. Knows no dialect.
Invariant: requests of a session whose tools are the same JSON get the same objects: agents send tens of kilobytes of
them with every request, and they are read and hashed once.
"""

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from secrets import token_hex
from typing import Any, NoReturn, TypeVar

from treadle.gateway.request import ParsedTools, RequestError

LARGE_BODY_BYTES = 100_000
"""What is larger is read and rendered in a thread."""

MAX_JSON_MARKS = 500_000
"""Values of a body, about: to read JSON holds the interpreter, in a thread too."""

_SURROGATE = re.compile(rb"\\u[dD]")
"""An escape that may be half of a surrogate pair."""

KNOWN_TOOLS = 4
"""Sets of tools that a session keeps: its sub-agents have some of their own."""

_TOOLS = re.compile(rb'"tools"\s*:\s*')
_KNOWN = f"known tools {token_hex(16)}"
"""Stands for known tools in a body that is read: no client can know it."""

MIN_KNOWN_BYTES, MAX_KNOWN_BYTES = 1_000, 200_000
"""Of the text of tools that is kept: less is read as fast, and more would be much to keep for each session."""

T = TypeVar("T")


class TooManyValues(RequestError):
    """A body of more values than are read."""

    kind = "request_too_large"
    status = 413


async def read_body(body: bytes) -> Mapping[str, Any]:
    """The JSON object of a body; RequestError where it is none."""
    return await parse_body(body, lambda value: value)


async def parse_body(body: bytes, parse: Callable[[Mapping[str, Any]], T], known: "KnownTools | None" = None) -> T:
    """What `parse` makes of the JSON object of a body; `known`: tools that are not read again."""
    read = _read_json if known is None else known.read
    if len(body) <= LARGE_BODY_BYTES:
        return parse(read(body))
    if sum(map(body.count, (b"[", b"{", b","))) > MAX_JSON_MARKS:
        raise TooManyValues(f"the body has more than {MAX_JSON_MARKS} brackets and commas")
    return await asyncio.to_thread(lambda: parse(read(body)))


def _read_json(body: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
        if b"\\" in body and _SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError("the body holds half of a surrogate pair, which is not text") from None
    except (ValueError, RecursionError):
        raise RequestError("the body is not JSON") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    return value


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


class KnownTools:
    """Tools of the last requests of a session: as text, as JSON and as they were parsed."""

    def __init__(self) -> None:
        self._known: list[tuple[Any, ParsedTools]] = []
        self._texts: list[tuple[bytes, Any]] = []

    def read(self, body: bytes) -> Mapping[str, Any]:
        """The JSON object of a body. Tools that came before, letter for letter, are the same objects, and not read."""
        place = _TOOLS.search(body)
        if place is None:
            return _read_json(body)
        start = place.end()
        for text, tools in self._texts:
            if body.startswith(text, start):
                found = _read_short(body[:start], body[start + len(text) :])
                if found.get("tools") == _KNOWN:
                    return {**found, "tools": tools}
                break  # they are a part of something else, or the body is none
        found = _read_json(body)
        text = _array_text(body, start, found.get("tools"))
        if text:
            self._texts = [(text, found["tools"]), *self._texts[: KNOWN_TOOLS - 1]]
        return found

    def parse(self, raw: Any, parse: Callable[[Any], ParsedTools]) -> ParsedTools:
        """RequestError for tools that cannot be shown. Threads may call it at the same time."""
        known = self._known
        for sent, parsed in known:
            if sent == raw:
                return parsed
        parsed = parse(raw)
        self._known = [(raw, parsed), *known[: KNOWN_TOOLS - 1]]
        return parsed


def _read_short(before: bytes, after: bytes) -> Mapping[str, Any]:
    """A body with a mark in the place of a value that is known to be JSON; empty where it is no request."""
    try:
        return _read_json(b"".join((before, json.dumps(_KNOWN).encode(), after)))
    except RequestError:
        return {}


def _array_text(body: bytes, start: int, tools: Any) -> bytes:
    """The text of an array that begins at `start`, if it is these tools; empty if it is not, or not worth keeping."""
    if not isinstance(tools, list) or len(body) - start < MIN_KNOWN_BYTES:
        return b""
    try:
        text = body[start : start + MAX_KNOWN_BYTES].decode("utf-8", "ignore")
        value, end = json.JSONDecoder().raw_decode(text)
        is_same = json.dumps(value) == json.dumps(tools)  # of values, Python's 1 is True
    except (ValueError, RecursionError):
        return b""
    written = text[:end].encode()
    return written if is_same and len(written) >= MIN_KNOWN_BYTES else b""
