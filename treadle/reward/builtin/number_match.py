"""1.0 where the answer is the same number as the ground truth, in the manner of GSM8K.

    correct: {path: number_match, kwargs: {strict: false, tolerance: 0}}

The answer is the first number after the last `####`; without that mark it is the last number of the response, or, if
`strict`, there is none. The ground truth may be a number or a whole GSM8K solution. Thousands separators, signs,
currency signs and decimals are understood; fractions and exponents are not (that is what `math` is for).
Invariant: linear in the length of the text, and usually in the length of its end.
"""

import re
from decimal import Decimal
from typing import Any

MARK = "####"
TAIL = 512
MAX_DIGITS = 1000
MARGIN = 8
"""A match this far from the edge of the tail would be the same in the whole text."""

_FORWARD = re.compile(
    r"(?:(?<![\w)])[-−+][$€£]?)?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<!\w)\.[0-9]+)"
)
# The same in a mirror: on reversed text the first match is the last number, found without reading the rest.
_BACKWARD = re.compile(
    r"(?:[0-9]+\.(?!\w)|(?:[0-9]+\.)?(?:(?:[0-9]{3},)+[0-9]{1,3}(?![0-9])|[0-9]+))"
    r"(?:[$€£]?[-−+](?![\w)]))?"
)
_CLEAN = str.maketrans({",": None, "$": None, "€": None, "£": None, "−": "-"})


def prepare(strict: bool = False, tolerance: float = 0.0) -> None:
    """Check that the tolerance is a distance."""
    if not tolerance >= 0:
        raise ValueError(f"tolerance must be ≥ 0, got {tolerance}")


def score(response: str, ground_truth: Any, strict: bool = False, tolerance: float = 0.0) -> float:
    if ground_truth is None:
        raise ValueError("the task has no ground truth")
    truth = read_answer(str(ground_truth))
    if truth is None:
        raise ValueError(f"the ground truth {str(ground_truth)[:80]!r} holds no number")
    answer = read_answer(response, strict)
    if answer is None:
        return 0.0
    return float(answer == truth or (tolerance > 0 and abs(answer - truth) <= Decimal(tolerance)))


def read_answer(text: str, strict: bool = False) -> Decimal | None:
    """The number a solution ends in; None where there is none."""
    mark = text.rfind(MARK)
    marked = _FORWARD.search(text, mark + len(MARK)) if mark >= 0 else None
    if marked:
        return _to_number(marked[0])
    return None if strict else _read_last(text)


def _read_last(text: str) -> Decimal | None:
    mirror = text[-TAIL:][::-1]
    match = _BACKWARD.search(mirror)
    if len(text) > TAIL and (match is None or match.end() > TAIL - MARGIN):
        match = _BACKWARD.search(text[::-1])
    return _to_number(match[0][::-1]) if match else None


def _to_number(digits: str) -> Decimal | None:
    """None for a number longer than any real answer: arithmetic on it would overflow."""
    return Decimal(digits.translate(_CLEAN)) if len(digits) <= MAX_DIGITS else None
