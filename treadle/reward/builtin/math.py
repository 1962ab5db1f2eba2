"""1.0 where the answer equals the ground truth as mathematics, judged by math-verify.

    correct: {path: math}

The last boxed, LaTeX or plain expression of the response counts. math-verify hands text to a parser that evaluates
Python and can run for ever, so this runs only in a worker process, behind the fence, and the worker's own limits stand
in for the package's timeouts: an answer nobody could compare in time is a failure, never a zero.
"""

from functools import lru_cache
from importlib import import_module
from typing import Any

EXTRA = "math"


def prepare() -> None:
    """Import the package and use it once; the first use builds its tables."""
    score("1", "1")


def score(response: str, ground_truth: Any) -> float:
    truth, answer = _parse_truth(str(ground_truth)), _parse(response)
    return float(import_module("math_verify").verify(truth, answer, timeout_seconds=None))


def _parse(text: str) -> list[Any]:
    parsed: list[Any] = import_module("math_verify").parse(text, parsing_timeout=None)
    return parsed


@lru_cache(maxsize=1024)
def _parse_truth(truth: str) -> list[Any]:
    """The ground truth as expressions: a bare answer, or a solution that marks its own."""
    truth = truth.rpartition("####")[2].strip()
    marked = "\\boxed" in truth or "$" in truth or "\\(" in truth or "\\[" in truth
    parsed = _parse(truth if marked else f"\\boxed{{{truth}}}")
    if not parsed:
        raise ValueError(f"the ground truth {truth[:80]!r} is no expression that math-verify can read")
    return parsed
