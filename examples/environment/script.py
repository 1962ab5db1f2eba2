"""Stands in for a model: asks whether the number is even, then halves what is left."""

from random import Random

from treadle.types import Request


def answer(request: Request, rng: Random) -> str:
    """The next turn: the tool call, or a guess."""
    low, high, even, guess = 0, 9, None, -1
    for message in request.messages[1:]:
        content = str(message["content"])
        if message["role"] == "tool":
            even = content == "True"
        elif message["role"] == "assistant" and content.isdecimal():
            guess = int(content)
        elif message["role"] == "user":
            low, high = (guess + 1, high) if content == "higher" else (low, guess - 1)
    if even is None:
        return '<tool_call>{"name": "is_even", "arguments": {}}</tool_call>'
    left = [number for number in range(low, high + 1) if (number % 2 == 0) == even]
    return str(left[len(left) // 2])
