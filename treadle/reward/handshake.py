"""How a worker begins: the program it is started with, what it is told, and what it answers.

Owns both forms and their reading. Knows nothing about processes or scores.
Invariant: the worker's answer is JSON, and nothing in it is trusted; nonsense is a failure.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treadle.errors import Mistake
from treadle.reward.failure import Fault, ScoreFailure
from treadle.reward.function import Function

BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from treadle.reward.worker import main; main()"
"""The program text of a worker. Arguments: the parent's import path, the channel, the lifeline."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message to a worker: what to load (name, path, kwargs, scope), and the limits."""

    functions: tuple[tuple[str, str, Mapping[str, Any], str], ...]
    cpu_time_s: float
    memory_mb: int


@dataclass(frozen=True, slots=True)
class Report:
    """The first message from a worker: the arguments its functions need, or what is wrong with them, by name."""

    needs: tuple[str, ...]
    mistakes: Mapping[str, tuple[Mistake, ...]]


def write_report(functions: Sequence[Function], mistakes: Mapping[str, Sequence[Mistake]]) -> bytes:
    """A report as JSON."""
    needs = sorted({need for function in functions for need in function.needs})
    listed = {name: [[item.key, item.problem, item.fix] for item in found] for name, found in mistakes.items()}
    return json.dumps({"needs": needs, "mistakes": listed}).encode()


def read_report(data: bytes) -> Report:
    """A report as its parent reads it."""
    try:
        fields = json.loads(data)
        mistakes = {
            name: tuple(Mistake(key, problem, fix=fix) for key, problem, fix in found)
            for name, found in fields["mistakes"].items()
        }
        return Report(tuple(fields["needs"]), mistakes)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ScoreFailure(Fault.CRASH, "garbled its worker's first answer") from error
