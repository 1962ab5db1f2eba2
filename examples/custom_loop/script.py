"""Stands in for a model: wavers at first, and is sure in the end."""

from random import Random

from treadle.types import Request


def answer(request: Request, rng: Random) -> str:
    """The next turn."""
    truth = "yes" if "97" in request.messages[0]["content"] else "no"
    turns = sum(message["role"] == "assistant" for message in request.messages)
    return truth if turns or rng.random() < 0.5 else "maybe"
