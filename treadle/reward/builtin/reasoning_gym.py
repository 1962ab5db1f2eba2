"""The score that reasoning-gym's own data set gives to an answer.

    correct: {path: reasoning_gym}

Reads the entry from the task's `entry` field, as the `reasoning_gym:NAME` task source writes it; rows made elsewhere
may have `metadata` beside question and answer. The answer is the text inside the last `<answer>` tag, or the whole
response where there is none. An answer on which a scorer of the package breaks, where it does not break on the
entry's own answer, is wrong.

Nine of the package's scorers would run the answer as Python, and two more a text of the row. Those that read a list
read a literal here; bitwise_arithmetic is compared with the row's own answer; those that read mathematics (countdown,
puzzle24, polynomial_multiplication, simple_integration and intermediate_integration) are
replaced by rules over `treadle.reward.builtin.expression`. These keep the package's scores, with three differences:
`^` is a power, 24 must be reached exactly, and with the numbers that were given.
Invariant: no text of a model or of a row is compiled or evaluated as code.
"""

import re
from ast import literal_eval
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from treadle.reward.builtin.exact_match import read_tag
from treadle.reward.builtin.expression import ExpressionError, evaluate, expand, is_antiderivative, parse
from treadle.types import Task

EXTRA = "reasoning-gym"
MAX_CHARS = 20_000
LITERAL_READERS = (
    "algorithmic.binary_matrix",
    "algorithmic.number_sorting",
    "algorithmic.spiral_matrix",
    "algorithmic.string_insertion",
    "games.n_queens",
)
"""Modules whose scorers call eval to read a list: on the answer, and number_sorting on that of the row."""

_INTEGER = re.compile(r"\b\d+\b")
_HUGE_EXPONENT = re.compile(r"\d\.?e[-+]?\d{4}|\d{1000}", re.IGNORECASE)
"""As in 1e999999999, which a fraction would write out."""


def prepare(dataset: str | None = None, tag: str = "answer") -> None:
    """Import the package, and the data set where one is named; put rules of our own where it would run the answer."""
    import_module("reasoning_gym")
    for name in LITERAL_READERS:
        import_module(f"reasoning_gym.{name}").eval = literal_eval  # type: ignore[attr-defined]
    for place, rule in RULES.items():
        module, _, owner = place.partition(":")
        getattr(import_module(f"reasoning_gym.{module}"), owner).score_answer = rule
    if dataset:
        _find_scorer(dataset)


def score(response: str, task: Task, dataset: str | None = None, tag: str = "answer") -> float:
    entry = _read_entry(task)
    name = dataset or entry["metadata"].get("source_dataset") or task.data_source.rpartition(":")[2]
    answer = read_tag(response, tag)
    answer = response.strip() if answer is None else answer
    if len(answer) > MAX_CHARS or _HUGE_EXPONENT.search(answer):
        return 0.0
    scorer = _find_scorer(name)
    try:
        return float(scorer(answer=answer, entry=entry))
    except Exception:  # noqa: BLE001  whatever the package raises on a text it cannot read
        scorer(answer=entry["answer"], entry=entry)  # raises where the entry is at fault
        return 0.0  # the scorer cannot read this answer


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


Entry = Mapping[str, Any]


def _score_countdown(_: Any, answer: str | None, entry: Entry) -> float:
    """1 for the target from the numbers given; 0.05 for arithmetic that misses it, 0.01 for anything else."""
    try:
        value = evaluate(parse(answer or ""))
    except ExpressionError:
        return 0.01
    same_numbers = _integers(answer) == sorted(entry["metadata"]["numbers"])
    target = entry["metadata"]["target"]
    return 1.0 if same_numbers and abs(value - target) <= 1e-6 + 1e-5 * abs(target) else 0.05


def _score_puzzle24(_: Any, answer: str | None, entry: Entry) -> float:
    """1 for 24 from the four numbers given, 0.01 for anything else."""
    try:
        value = evaluate(parse(answer or ""))
    except ExpressionError:
        return 0.01
    return 1.0 if value == 24 and _integers(answer) == sorted(entry["metadata"]["numbers"]) else 0.01


def _integers(answer: str | None) -> list[int]:
    return sorted(map(int, _INTEGER.findall(answer or "")))


def _score_bitwise(_: Any, answer: str | None, entry: Entry) -> float:
    """1 for the number of the row's answer, hexadecimal, binary, octal or decimal."""
    truth = int(str(entry["answer"]), 0)
    try:
        return float(int(answer or "", 0) == truth)
    except ValueError:
        return 0.0


def _score_polynomial(_: Any, answer: str | None, entry: Entry) -> float:
    """1 for the product written out: the question's own factors are no answer."""
    truth = expand(parse(entry["answer"]))
    try:
        return float(expand(parse(answer or "")) == truth)
    except ExpressionError:
        return 0.0


def _score_integral(_: Any, answer: str | None, entry: Entry) -> float:
    """1 where the derivative of the answer is the integrand."""
    variable, integrand = entry["metadata"]["variable"], parse(entry["metadata"]["integrand"])
    try:
        return float(is_antiderivative(parse(answer or ""), integrand, variable))
    except ExpressionError:
        return 0.0


RULES: Mapping[str, Callable[[Any, str | None, Entry], float]] = {
    "games.countdown:CountdownDataset": _score_countdown,
    "games.puzzle24:Puzzle24Dataset": _score_puzzle24,
    "arithmetic.bitwise_arithmetic:BitwiseArithmeticDataset": _score_bitwise,
    "algebra.polynomial_multiplication:PolynomialMultiplicationDataset": _score_polynomial,
    "algebra.simple_integration:SimpleIntegrationDataset": _score_integral,
    "algebra.intermediate_integration:IntermediateIntegrationDataset": _score_integral,
}
"""The rule for each data set that would run the answer or a text of the row, by module and class."""
