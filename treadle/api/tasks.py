"""Tasks as Python has them: rows in memory, data sets, generators and functions, as the JSONL file that a run reads.

Owns which objects are tasks and how their rows are written. Files, reasoning-gym and import paths are left as they are:
a run reads them itself. Rows get a uid where they have none, so that a file's name is no part of it.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from treadle.api.hints import refuse_texts
from treadle.data.file_formats import HUB, read_records
from treadle.errors import ConfigError, Mistake
from treadle.types import Task

Tasks = (
    str
    | os.PathLike[str]
    | Sequence[str]
    | Iterable[Mapping[str, Any] | Task]
    | Callable[[], Iterable[Mapping[str, Any] | Task]]
)
"""A file, several, rows, a `datasets.Dataset`, a pandas DataFrame, a generator, or a function that returns rows."""

MAX_ROWS = 1_000_000
"""Rows that are held in memory and written; more belong into a file."""

_FORMS = "rows as dicts, a file, a datasets.Dataset, or a function that returns rows"


@dataclass(frozen=True, slots=True)
class ReadTasks:
    """Files as they were named, or the content of one that is still to be written."""

    files: tuple[str, ...] = ()
    content: bytes | None = None
    num_rows: int | None = None
    """None where the files would have to be read."""

    @property
    def digest(self) -> str:
        return blake2b(self.content or b"", digest_size=6).hexdigest()


def read_tasks(tasks: Tasks, argument: str) -> ReadTasks:
    """The tasks of an argument; a ConfigError about it where they are none."""
    if isinstance(tasks, str | os.PathLike):
        refuse_texts([os.fspath(tasks)], argument)
        return ReadTasks((os.fspath(tasks),))
    if isinstance(tasks, Sequence) and tasks and all(isinstance(item, str | os.PathLike) for item in tasks):
        refuse_texts([os.fspath(item) for item in tasks], argument)
        return ReadTasks(tuple(os.fspath(item) for item in tasks))
    rows = _rows(tasks, argument)
    lines: list[str] = []
    for at, row in enumerate(rows):
        if at == MAX_ROWS:
            problem = f"has more than {MAX_ROWS:,} rows: it may have no end"
            raise _wrong(argument, problem, "take some with itertools.islice, or write them to a file")
        lines.append(_as_line(row, at, argument))
    if not lines:
        raise _wrong(argument, "has no rows", f"give {_FORMS}")
    return ReadTasks(content=("\n".join(lines) + "\n").encode(), num_rows=len(lines))


def count_rows(files: Sequence[str], most: int) -> int | None:
    """How many rows files have; None where there are `most` or more, or where something else makes the rows."""
    if not all(source.startswith(HUB) or Path(source).expanduser().exists() for source in files):
        return None
    try:
        rows = (row for file in files for row in read_records(file, file, "data.train_files"))
        count = sum(1 for _ in islice(rows, most))
    except ConfigError:
        return None  # the run names what is wrong with them
    return count if count < most else None


def _rows(tasks: Any, argument: str) -> Iterator[Any]:
    if callable(tasks):
        try:
            tasks = tasks()
        except TypeError as error:
            fix = "give a function without parameters: functools.partial or a lambda fills them"
            raise _wrong(argument, f"cannot be called: {error}", fix) from error
    if callable(getattr(tasks, "to_dict", None)) and hasattr(tasks, "columns"):  # a pandas DataFrame
        tasks = tasks.to_dict(orient="records")
    if isinstance(tasks, Mapping):
        splits = ", ".join(repr(name) for name in list(tasks)[:5])
        raise _wrong(argument, f"is a map with {splits}, not rows", f"give one of its parts, or {_FORMS}")
    if not isinstance(tasks, Iterable) or isinstance(tasks, bytes):
        raise _wrong(argument, f"must be {_FORMS}, got {type(tasks).__name__}", None)
    return iter(tasks)


def _as_line(row: Any, at: int, argument: str) -> str:
    place = f"{argument}[{at}]"
    if isinstance(row, Task):
        row = _task_row(row)
    if not isinstance(row, Mapping):
        problem = f"must be a dict with named fields, got {type(row).__name__} {str(row)[:60]!r}"
        raise _wrong(place, problem, "write {'prompt': …, 'answer': …}")
    fields = {"uid": f"{argument.removesuffix('s')}-{at}", **row} if row.get("uid") is None else dict(row)
    try:
        return json.dumps(fields, ensure_ascii=False, allow_nan=False, default=_as_json)
    except (TypeError, ValueError, RecursionError) as error:
        broken = next((name for name, value in fields.items() if not _is_json(value)), "?")
        fix = "give numbers, texts, lists and dicts: a row is written to a file"
        raise _wrong(f"{place}[{broken!r}]", f"cannot be written as JSON: {error}", fix) from error


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False, default=_as_json)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _as_json(value: Any) -> Any:
    """Numbers and arrays of numpy and torch, and maps and tuples of ours, as Python's own; dates as ISO texts."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _task_row(task: Task) -> dict[str, Any]:
    known = {
        "uid": task.uid,
        "prompt": [dict(message) for message in task.messages],
        "answer": task.ground_truth,
        "data_source": task.data_source,
        "agent": task.agent,
        "n": task.n,
        "tools": None if task.tools is None else list(task.tools),
        "tool_kwargs": dict(task.tool_kwargs),
        "environment_kwargs": dict(task.environment_kwargs),
    }
    return {**task.extra, **{name: value for name, value in known.items() if value not in (None, "", {})}}


def _wrong(argument: str, problem: str, fix: str | None) -> ConfigError:
    return ConfigError([Mistake(argument, problem, fix=fix)])
