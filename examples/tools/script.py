"""Stands in for a model: multiplies, notes the result, multiplies again, answers."""

import json
import re
from random import Random
from typing import Any

from treadle.types import Request


def answer(request: Request, rng: Random) -> str:
    """The next turn: a tool call in hermes format, or the answer."""
    a, b, c = map(int, re.findall(r"\d+", request.messages[0]["content"]))
    results = [message["content"] for message in request.messages if message["role"] == "tool"]
    if not results:
        return call("multiply", a=a, b=b)
    if len(results) == 1:
        return call("write_note", text=results[0])
    if len(results) == 2:
        return call("multiply", a=int(results[0]), b=c)
    return f"It is {results[2]}."


def call(name: str, **arguments: Any) -> str:
    """A tool call in hermes format."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
