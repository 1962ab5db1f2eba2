"""Request body: the bytes of a request as a JSON object, within bounds.

Owns what a body may hold, and that reading a large one holds up no other session: it is read in a thread, and refused
before where that would hold the interpreter.
"""

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from treadle.gateway.request import RequestError

LARGE_BODY_BYTES = 100_000
"""What is larger is read and rendered in a thread."""

MAX_JSON_MARKS = 500_000
"""Values of a body, about: to read JSON holds the interpreter, in a thread too."""

_SURROGATE = re.compile(rb"\\u[dD]")
"""An escape that may be half of a surrogate pair."""

T = TypeVar("T")


class TooManyValues(RequestError):
    """A body of more values than are read."""

    kind = "request_too_large"
    status = 413


async def read_body(body: bytes) -> Mapping[str, Any]:
    """The JSON object of a body; RequestError where it is none."""
    return await parse_body(body, lambda value: value)


async def parse_body(body: bytes, parse: Callable[[Mapping[str, Any]], T]) -> T:
    """What `parse` makes of the JSON object of a body."""
    if len(body) <= LARGE_BODY_BYTES:
        return parse(_read_json(body))
    if sum(map(body.count, (b"[", b"{", b","))) > MAX_JSON_MARKS:
        raise TooManyValues(f"the body has more than {MAX_JSON_MARKS} brackets and commas")
    return await asyncio.to_thread(lambda: parse(_read_json(body)))


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
