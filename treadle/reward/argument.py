"""What a reward function can ask for by parameter name, and where each value comes from.

Owns the names. Knows nothing about functions, processes or how values travel.
A function of scope sample sees one trajectory, one of scope group all those of a task that did not fail, in the order
of their samples.
Invariant: every name is filled for every trajectory; a model that said nothing gives an empty `response`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
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


GROUP_ARGUMENTS: Mapping[str, Callable[[Task, Sequence[Trajectory]], Any]] = {
    "task": lambda task, trajectories: task,
    "trajectories": lambda task, trajectories: list(trajectories),
    "responses": lambda task, trajectories: [_read_response(task, item) for item in trajectories],
    "ground_truth": lambda task, trajectories: task.ground_truth,
    "messages": lambda task, trajectories: [item.messages for item in trajectories],
    "scores": lambda task, trajectories: [0.0 if item.reward is None else item.reward.value for item in trajectories],
    "parts": lambda task, trajectories: [{} if item.reward is None else item.reward.parts for item in trajectories],
    "data_source": lambda task, trajectories: task.data_source,
    "extra": lambda task, trajectories: task.extra,
    "solution_strs": lambda task, trajectories: [_read_response(task, item) for item in trajectories],
    "extra_info": lambda task, trajectories: _read_extra_info(task, trajectories[0]),
}
"""The same for functions of scope group. `scores` and `parts` are what functions and models of scope sample gave."""

PARAMETERS: Mapping[str, Iterable[str]] = {"sample": tuple(ARGUMENTS), "group": tuple(GROUP_ARGUMENTS)}
"""The names that are filled, by scope."""

Gather = Callable[[Iterable[str]], dict[str, Any]]
"""The values for parameter names, of what is to be scored."""


def gather(names: Iterable[str], task: Task, trajectory: Trajectory) -> dict[str, Any]:
    """The values for these parameter names; those of other scopes are left out."""
    return {name: ARGUMENTS[name](task, trajectory) for name in names if name in ARGUMENTS}


def gather_group(names: Iterable[str], task: Task, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """The same for all samples of a task at once."""
    return {name: GROUP_ARGUMENTS[name](task, trajectories) for name in names if name in GROUP_ARGUMENTS}
