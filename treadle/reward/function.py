"""Reward functions: loaded by name or import path, signature read once, arguments filled by parameter name.

Owns the parameter names, where each value comes from, and the rules for them. A function of scope sample sees one
trajectory, one of scope group all those of a task that did not fail, in the order of their samples. Runs where the
function runs: in a worker for user code, in the parent for built-ins that are pure and bounded. Knows no processes.
Invariant: a RewardFunction that exists can be called with the values of `needs`; mistakes are found before the first
score. Every name is filled for every trajectory; a model that said nothing gives an empty `response`.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from treadle.errors import ConfigError, Mistake, nearest
from treadle.reward.builtin import BUILTINS, Builtin
from treadle.reward.result import RewardResult, read_score, read_scores
from treadle.sandbox.protocol import BoxSettings
from treadle.types import Task, Trajectory


def _read_response(_: Task, trajectory: Trajectory) -> str:
    """Text of the model's last turn; content in OpenAI's list of parts is joined."""
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
    "answer": lambda task, trajectory: task.ground_truth,
    "messages": lambda task, trajectory: trajectory.messages,
    "data_source": lambda task, trajectory: task.data_source,
    "extra": lambda task, trajectory: task.extra,
    "solution_str": _read_response,
    "extra_info": _read_extra_info,
}
"""Parameter names and what fills them. `answer` is the field of a row that the ground truth is in by default; the last
two are verl's names for `response` and `extra`."""


GROUP_ARGUMENTS: Mapping[str, Callable[[Task, Sequence[Trajectory]], Any]] = {
    "task": lambda task, trajectories: task,
    "trajectories": lambda task, trajectories: list(trajectories),
    "responses": lambda task, trajectories: [_read_response(task, item) for item in trajectories],
    "ground_truth": lambda task, trajectories: task.ground_truth,
    "answer": lambda task, trajectories: task.ground_truth,
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

CollectArguments = Callable[[Iterable[str]], dict[str, Any]]
"""The values for parameter names, of what is to be scored."""


def collect_arguments(names: Iterable[str], task: Task, trajectory: Trajectory) -> dict[str, Any]:
    """The values for these parameter names; those of other scopes are left out."""
    return {name: ARGUMENTS[name](task, trajectory) for name in names if name in ARGUMENTS}


def collect_group_arguments(names: Iterable[str], task: Task, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Arguments of a function that sees all samples of a task at once."""
    return {name: GROUP_ARGUMENTS[name](task, trajectories) for name in names if name in GROUP_ARGUMENTS}


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A callable, the parameter names it takes from a trajectory, and the arguments the config gives it."""

    name: str
    call: Callable[..., Any]
    needs: tuple[str, ...]
    kwargs: Mapping[str, Any]
    builtin: Builtin | None = None
    scope: str = "sample"
    """Sample, or group: then it sees all samples of a task at once, and returns a score for each."""

    @property
    def pure(self) -> bool:
        """Bounded, and leaves its arguments alone."""
        return self.builtin is not None and not self.builtin.evaluates_text and not self.builtin.boxed

    @property
    def boxed(self) -> bool:
        """Runs what a model wrote, in boxes that it waits for."""
        return self.builtin is not None and self.builtin.boxed

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """What the function returns, or an awaitable of it. `values` may hold more than it needs, and another value
        for an argument that the config gives."""
        kwargs = {name: values.get(name, value) for name, value in self.kwargs.items()}
        return self.call(**{name: values[name] for name in self.needs}, **kwargs)

    def read(self, result: Any) -> RewardResult:
        """What the function returned, as a score, or as one for each sample of a group."""
        return read_scores(result) if self.scope == "group" else read_score(result)


def load_function(
    name: str, path: str, kwargs: Mapping[str, Any], scope: str = "sample", box: BoxSettings | None = None
) -> RewardFunction:
    """The function at `path`; a ConfigError with keys relative to its section where it cannot be used.

    `box`: for built-ins that run code.
    """
    builtin = BUILTINS.get(path)
    call = import_module(builtin.module).score if builtin else _load_callable(path)
    parameters = _read_parameters(call, path)
    mistakes = list(_check_parameters(path, parameters, kwargs, scope))
    if mistakes:
        raise ConfigError(mistakes)
    if builtin:
        _prepare(import_module(builtin.module), path, kwargs)
    needs = tuple(parameter for parameter in parameters if parameter in PARAMETERS[scope])
    if builtin and builtin.boxed:
        kwargs = {**kwargs, "box": box}
    return RewardFunction(name, call, needs, kwargs, builtin, scope)


def _load_callable(path: str) -> Callable[..., Any]:
    # Brings the whole config, which a worker that runs only built-ins can do without.
    from treadle.config.plugin import load_object

    found = load_object(path, "path")
    if not callable(found):
        raise _wrong_path(path, "is not callable")
    return found  # type: ignore[no-any-return]


def _wrong_path(path: str, problem: str, fix: str | None = None) -> ConfigError:
    return ConfigError([Mistake("path", f"{path!r} {problem}", value=path, fix=fix)])


def _read_parameters(call: Callable[..., Any], path: str) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(call).parameters
    except (TypeError, ValueError) as error:
        raise _wrong_path(path, f"has no signature to read: {error}", "wrap it in a Python function") from error


def _check_parameters(
    path: str, parameters: Mapping[str, inspect.Parameter], kwargs: Mapping[str, Any], scope: str
) -> Iterator[Mistake]:
    filled = PARAMETERS[scope]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            yield Mistake("path", f"{path!r} takes {name!r} by position only; arguments are given by name", value=path)
        elif name not in filled and name not in kwargs and parameter.default is parameter.empty:
            problem = f"{path!r} needs a parameter {name!r} that nothing fills"
            yield Mistake("path", problem, path, fix=_allowed(name, scope))
    for name in kwargs:
        if name in filled:
            yield Mistake(f"kwargs.{name}", f"{name!r} is filled from each trajectory and cannot be set", kwargs[name])
        elif name not in parameters and not takes_any:
            fix = nearest(name, parameters) or f"it takes {', '.join(parameters) or 'none'}"
            yield Mistake(f"kwargs.{name}", f"{path!r} has no parameter {name!r}", kwargs[name], fix=fix)


def _allowed(name: str, scope: str) -> str:
    other = next((other for other, names in PARAMETERS.items() if name in names), None)
    if other is not None:
        return f"set scope: {other}, whose functions see it"
    others = [item for item in GROUP_ARGUMENTS if item not in ARGUMENTS] if scope == "sample" else []
    group = f"; or, with scope: group, of {', '.join(others)}" if others else ""
    return f"set kwargs.{name}, or use one of {', '.join(PARAMETERS[scope])}{group}"


def _prepare(module: Any, path: str, kwargs: Mapping[str, Any]) -> None:
    """Let a built-in check its arguments and its optional package before the first score."""
    try:
        module.prepare(**kwargs)
    except ImportError as error:
        fix = f"pip install 'treadle[{module.EXTRA}]'"
        problem, package = f"{path!r} needs an optional package: {error}", error.name or module.EXTRA
        raise ConfigError([Mistake("path", problem, package, fix=fix, missing="package")]) from error
    except (TypeError, ValueError) as error:
        raise ConfigError([Mistake("kwargs", f"{path!r} refuses them: {error}", value=dict(kwargs))]) from error
