"""Reward arguments: what fills each parameter of a reward function, from the task, its trajectories and the row.

Owns the names that are filled for every trajectory, and the columns of a row, which fill parameters of their names.
Where the two share a name, the former is meant. Knows no functions: what a signature asks for is read in `function`.
Invariant: every name of `PARAMETERS` is filled for every trajectory; a model that said nothing gives an empty
`response`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from treadle.types import Task, Trajectory


def _read_response(_: Task, trajectory: Trajectory) -> str:
    """Text of the model's last turn; content in OpenAI's list of parts is joined."""
    spoken: object = trajectory.response_text
    if isinstance(spoken, str):
        return spoken
    parts = spoken if isinstance(spoken, list | tuple) else ()
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))


def _read_prompt(task: Task) -> Any:
    """The prompt as text where it is one user message, beside a system message; else its messages."""
    spoken = [message for message in task.messages if message["role"] != "system"]
    is_text = len(spoken) == 1 and spoken[0]["role"] == "user" and isinstance(spoken[0].get("content"), str)
    return spoken[0]["content"] if is_text else list(task.messages)


def _read_extra_info(task: Task, *_: Any) -> Mapping[str, Any]:
    """A row in verl's layout has a field of this name; any other row offers all its further fields."""
    nested = task.extra.get("extra_info")
    return nested if isinstance(nested, Mapping) else task.extra


_OF_TASK: Mapping[str, Callable[[Task, Any], Any]] = {
    "task": lambda task, _: task,
    "prompt": lambda task, _: _read_prompt(task),
    "ground_truth": lambda task, _: task.ground_truth,
    "answer": lambda task, _: task.ground_truth,
    "data_source": lambda task, _: task.data_source,
    "extra": lambda task, _: task.extra,
    "extra_info": _read_extra_info,
}

ARGUMENTS: Mapping[str, Callable[[Task, Trajectory], Any]] = {
    "response": _read_response,
    "messages": lambda task, trajectory: trajectory.messages,
    "trajectory": lambda task, trajectory: trajectory,
    **_OF_TASK,
    "solution_str": _read_response,
}
"""Parameter names and what fills them. `answer` is the field of a row that the ground truth is in by default;
`solution_str` and `extra_info` are verl's names for `response` and `extra`."""

GROUP_ARGUMENTS: Mapping[str, Callable[[Task, Sequence[Trajectory]], Any]] = {
    "responses": lambda task, trajectories: [_read_response(task, item) for item in trajectories],
    "messages": lambda task, trajectories: [item.messages for item in trajectories],
    "trajectories": lambda task, trajectories: list(trajectories),
    "scores": lambda task, trajectories: [0.0 if item.reward is None else item.reward.value for item in trajectories],
    "parts": lambda task, trajectories: [{} if item.reward is None else item.reward.parts for item in trajectories],
    **_OF_TASK,
    "solution_strs": lambda task, trajectories: [_read_response(task, item) for item in trajectories],
}
"""The same for functions of scope group. `scores` and `parts` are what functions and models of scope sample gave."""

PARAMETERS: Mapping[str, Iterable[str]] = {"sample": tuple(ARGUMENTS), "group": tuple(GROUP_ARGUMENTS)}
"""The names that are always filled, by scope."""

RECORDS = frozenset({"task", "trajectory", "trajectories"})
"""Those of them that are filled with records of treadle; the others with values that JSON has."""

GROUND_TRUTH = frozenset({"ground_truth", "answer"})
"""Those of them that hold the ground truth, which is None where a row has none."""

ALL_COLUMNS = "**"
"""What a function with `**kwargs` takes: every column, by name."""

CollectArguments = Callable[[Iterable[str]], dict[str, Any]]
"""The values for parameter names, of what is to be scored."""


_RESERVED = ARGUMENTS.keys() | GROUP_ARGUMENTS.keys()


def parameter_of(name: str, task: Task) -> str:
    """What fills a parameter of this name: a column that `data` names is what it is named for, as `answer`."""
    return name if name in _RESERVED else task.renamed.get(name, name)


def is_filled(name: str, task: Task) -> bool:
    """Whether a parameter of this name has a value: always, but for columns that the row does not have."""
    return parameter_of(name, task) in _RESERVED or name in task.extra


def read_columns(task: Task) -> dict[str, Any]:
    """The row's columns by their own names, without those that it does not have."""
    return {**_named_columns(task), **task.extra}


def _named_columns(task: Task) -> dict[str, Any]:
    """The columns that `data` names, by their own names."""
    own = {parameter: column for column, parameter in task.renamed.items()}
    held = {"prompt": _read_prompt(task), "answer": task.ground_truth, "data_source": task.data_source}
    return {own.get(name, name): value for name, value in held.items() if value not in (None, "", [])}


def collect_arguments(names: Iterable[str], task: Task, trajectory: Trajectory) -> dict[str, Any]:
    """The values for these names; names of other scopes, and columns that the row does not have, are left out."""
    return dict(_collect(names, task, {name: partial(read, task, trajectory) for name, read in ARGUMENTS.items()}))


def collect_group_arguments(names: Iterable[str], task: Task, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Arguments of a function that sees all samples of a task at once."""
    readers = {name: partial(read, task, trajectories) for name, read in GROUP_ARGUMENTS.items()}
    return dict(_collect(names, task, readers))


def _collect(names: Iterable[str], task: Task, readers: Mapping[str, Callable[[], Any]]) -> Iterator[tuple[str, Any]]:
    for name in names:
        if name == ALL_COLUMNS:
            further = {column: value for column, value in task.extra.items() if column not in _RESERVED}
            yield name, _named_columns(task) | further
        elif (parameter := parameter_of(name, task)) in readers:
            yield name, readers[parameter]()
        elif name in task.extra and name not in _RESERVED:
            yield name, task.extra[name]
