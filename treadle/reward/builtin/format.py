"""1.0 where the response has the wanted form: a regular expression is found in it.

    form: {path: format, kwargs: {pattern: '(?s)^<think>.*</think>\\s*<answer>.*</answer>\\s*$'}}

Anchors are the pattern's own business. The pattern is compiled once. A search that takes longer than `TIMEOUT_S` is
past its deadline: a failure, or `reward.on_timeout`. Patterns with nested repeats get there, and `<a>.*</a>` does on a
long response that repeats `<a>`.
"""

from functools import cache
from importlib import import_module
from typing import Any

from treadle.reward.result import Fault, ScoreFailure

regex = import_module("regex")
"""Unlike the standard library's module, this one can give up; transformers needs it too."""

TIMEOUT_S = 0.1


def prepare(pattern: str) -> None:
    """Compile the pattern, so that a wrong one is found before the first score."""
    try:
        _compile(pattern)
    except regex.error as error:
        raise ValueError(f"pattern {pattern!r}: {error}") from error


def score(response: str, pattern: str) -> float:
    try:
        return float(_compile(pattern).search(response, timeout=TIMEOUT_S, concurrent=False) is not None)
    except TimeoutError as error:
        problem = f"searched {len(response):,} characters for more than {TIMEOUT_S:g} s"
        raise ScoreFailure(Fault.TIMEOUT, problem, past_deadline=True, computed=True) from error


@cache
def _compile(pattern: str) -> Any:
    return regex.compile(pattern)
