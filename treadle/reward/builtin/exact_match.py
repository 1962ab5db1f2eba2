"""Exact match: 1.0 where the answer is the ground truth, letter for letter.

    correct: {path: exact_match, kwargs: {tag: answer, ignore_case: true}}

A ground truth that is a list holds every accepted answer. With `tag`, only the text inside the last such tag counts
(`read_tag`, linear in the length of the text), and a response without it is wrong.
"""

from typing import Any


def read_tag(text: str, tag: str) -> str | None:
    """The text inside the last complete pair of tags, stripped; None where there is no pair."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return None if end < 0 or start < 0 else text[start + len(tag) + 2 : end].strip()


def prepare(ignore_case: bool = False, tag: str | None = None) -> None:
    """Nothing to get ready; the signature is the check."""


def score(response: str, ground_truth: Any, ignore_case: bool = False, tag: str | None = None) -> float:
    if ground_truth is None:
        raise ValueError("the task has no ground truth")
    answer = response if tag is None else read_tag(response, tag)
    accepted = ground_truth if isinstance(ground_truth, list | tuple) else (ground_truth,)
    return float(answer is not None and any(_same(answer, str(truth), ignore_case) for truth in accepted))


def _same(answer: str, truth: str, ignore_case: bool) -> bool:
    answer, truth = answer.strip(), truth.strip()
    return answer.casefold() == truth.casefold() if ignore_case else answer == truth
