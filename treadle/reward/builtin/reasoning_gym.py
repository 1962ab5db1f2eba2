"""The score that reasoning-gym's own data set gives to an answer.

    correct: {path: reasoning_gym}

Reads the entry from the task's `entry` field, as the `reasoning_gym:NAME` task source writes it; rows made elsewhere
may have `metadata` beside question and answer. The answer is the text inside the last `<answer>` tag, or the whole
response where there is none. Some of the package's scorers evaluate the answer as Python: this runs only in a worker
process, behind the fence, and the ones that mean to read a literal read a literal.
"""

from ast import literal_eval
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from treadle.reward.builtin.tag import read_tag
from treadle.types import Task

EXTRA = "reasoning-gym"
LITERAL_READERS = (
    "algorithmic.binary_matrix",
    "algorithmic.spiral_matrix",
    "algorithmic.string_insertion",
    "games.n_queens",
)
"""Modules whose scorers call eval on the answer to read a list."""


def prepare(dataset: str | None = None, tag: str = "answer") -> None:
    """Import the package, and the data set where one is named."""
    import_module("reasoning_gym")
    for name in LITERAL_READERS:
        import_module(f"reasoning_gym.{name}").eval = literal_eval  # type: ignore[attr-defined]
    if dataset:
        _find_scorer(dataset)


def score(response: str, task: Task, dataset: str | None = None, tag: str = "answer") -> float:
    entry = _read_entry(task)
    name = dataset or entry["metadata"].get("source_dataset") or task.data_source.rpartition(":")[2]
    answer = read_tag(response, tag)
    return float(_find_scorer(name)(answer=response.strip() if answer is None else answer, entry=entry))


def _read_entry(task: Task) -> dict[str, Any]:
    entry = task.extra.get("entry", task.extra)
    if not isinstance(entry, Mapping) or not isinstance(entry.get("metadata"), Mapping):
        raise ValueError(f"task {task.uid!r} has no reasoning-gym entry; its extra fields are {', '.join(task.extra)}")
    question = task.messages[-1]["content"] if task.messages else ""
    return {"question": question, "answer": task.ground_truth, **entry}


@cache
def _find_scorer(name: str) -> Callable[..., float]:
    scorer: Callable[..., float] = import_module("reasoning_gym").get_score_answer_fn(name)
    return scorer
