"""Stands in for a model: asks the server's tool, then says what it heard."""

import json
from random import Random

from treadle.types import Request


def answer(request: Request, rng: Random) -> str:
    """The next turn."""
    heard = [message["content"] for message in request.messages if message["role"] == "tool"]
    if heard:
        return str(heard[-1])
    city = request.messages[0]["content"].removesuffix("?").split()[-1]
    return f"<tool_call>{json.dumps({'name': 'weather', 'arguments': {'city': city}})}</tool_call>"
