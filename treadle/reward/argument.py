"""What a reward function can ask for by parameter name, and where each value comes from.

Owns the names. Knows nothing about functions, processes or how values travel.
Invariant: every name is filled for every trajectory; a model that said nothing gives an empty `response`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from treadle.types import Task, Trajectory


def _read_response(_: Task, trajectory: Trajectory) -> str:
    """What the model said last, as text; content in OpenAI's list of parts is joined."""
    spoken: object = trajectory.response_text
    if isinstance(spoken, str):
        return spoken
    parts = spoken if isinstance(spoken, list | tuple) else ()
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))


def _read_extra_info(task: Task, _: Trajectory) -> Mapping[str, Any]:
    """A row in verl's layout has a field of this name; any other row offers all its further fields."""
    nested = task.extra.get("extra_info")
    return nested if isinstance(nested, Mapping) else task.extra


ARGUMENTS: Mapping[str, Callable[[Task, Trajectory], Any]] = {
    "task": lambda task, trajectory: task,
    "trajectory": lambda task, trajectory: trajectory,
    "response": _read_response,
    "ground_truth": lambda task, trajectory: task.ground_truth,
    "messages": lambda task, trajectory: trajectory.messages,
    "data_source": lambda task, trajectory: task.data_source,
    "extra": lambda task, trajectory: task.extra,
    "solution_str": _read_response,
    "extra_info": _read_extra_info,
}
"""Parameter names and what fills them. The last two are verl's words for `response` and `extra`."""


def gather(names: Iterable[str], task: Task, trajectory: Trajectory) -> dict[str, Any]:
    """The values for these parameter names."""
    return {name: ARGUMENTS[name](task, trajectory) for name in names}
