"""Stands in for a model: knows the answers, and gets them wrong now and then."""

from random import Random

from treadle.types import Request

ANSWERS = {"eggs": 24, "coins": 7, "train": 240}


def answer(request: Request, rng: Random) -> str:
    """The answer to a request, as text."""
    question = request.messages[0]["content"]
    number = next(value for word, value in ANSWERS.items() if word in question)
    return f"That makes {number if rng.random() < 0.7 else number + 1}."
