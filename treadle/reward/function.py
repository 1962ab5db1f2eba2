"""Reward functions: loaded by name or import path, signature read once, called with what their parameters name.

Owns the rules for signatures: which parameters are filled (`arguments`), which the config gives. A function of scope
sample sees one trajectory, one of scope group all those of a task that did not fail, in the order of their samples.
Runs where the function runs: in a worker for user code, in the parent for built-ins that are pure and bounded. Knows
no processes.
Invariant: a RewardFunction that exists can be called with the values of `required`. A built-in takes nothing of a row's
columns but what has a name of its own, as the ground truth.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from treadle.errors import ConfigError, Mistake, nearest
from treadle.reward.arguments import ALL_COLUMNS, PARAMETERS, RECORDS
from treadle.reward.builtin import BUILTINS, Builtin
from treadle.reward.result import RewardResult, read_score, read_scores
from treadle.sandbox.protocol import BoxSettings


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A callable, the parameter names it takes of task, trajectory and row, and the arguments the config gives it."""

    name: str
    call: Callable[..., Any]
    needs: tuple[str, ...]
    """Names that are filled where there is something to fill them; `ALL_COLUMNS` for `**kwargs`."""
    required: tuple[str, ...]
    """Those of them without a default."""
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
        """What the function returns, or an awaitable of it. `values` may hold more than it needs."""
        given = {name: values[name] for name in self.needs if name in values}
        columns = given.pop(ALL_COLUMNS, {})
        return self.call(**{**columns, **given, **self.kwargs})

    def read(self, result: Any) -> RewardResult:
        """What the function returned, as a score, or as one for each sample of a group."""
        return read_scores(result) if self.scope == "group" else read_score(result)


def load_function(
    name: str,
    path: str,
    kwargs: Mapping[str, Any],
    scope: str = "sample",
    box: BoxSettings | None = None,
    python: str | None = None,
) -> RewardFunction:
    """The function at `path`; a ConfigError with keys relative to its section where it cannot be used.

    `box`: for built-ins that run code. `python`: the interpreter that it is found in, where that is another.
    """
    builtin = BUILTINS.get(path)
    call: Callable[..., Any]
    if python is not None:
        # Brings processes, which a worker can do without.
        from treadle.reward.foreign_function import load_foreign_function

        call, parameters = load_foreign_function(name, path, python)
    else:
        call = import_module(builtin.module).score if builtin else _load_callable(path)
        parameters = _read_parameters(call, path)
    mistakes = list(_check_parameters(path, parameters, kwargs, scope))
    if python is not None:
        mistakes += (_not_sent(path, one) for one in parameters if one in RECORDS and one not in kwargs)
    if mistakes:
        raise ConfigError(mistakes)
    if builtin:
        _prepare(import_module(builtin.module), path, kwargs)
    needs = tuple(_filled(call, parameters, kwargs, scope, columns=builtin is None))
    required = tuple(name for name in needs if name in parameters and _has_no_default(parameters[name]))
    if builtin and builtin.boxed:
        kwargs = {**kwargs, "box": box}
    return RewardFunction(name, call, needs, required, kwargs, builtin, scope)


def _has_no_default(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty


def _filled(
    call: Callable[..., Any],
    parameters: Mapping[str, inspect.Parameter],
    kwargs: Mapping[str, Any],
    scope: str,
    *,
    columns: bool,
) -> Iterator[str]:
    """The parameters that are filled: by name, and those of other names by the columns of the row."""
    bound = call.keywords if isinstance(call, partial) else {}
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            yield from (ALL_COLUMNS,) if columns else ()
        elif name in PARAMETERS[scope]:
            yield name
        elif columns and parameter.kind is not parameter.VAR_POSITIONAL and name not in {*kwargs, *bound}:
            yield from () if _other_scope(name, scope) else (name,)


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
        elif (other := _other_scope(name, scope)) and name not in kwargs and parameter.default is parameter.empty:
            problem = f"{path!r} takes {name!r}, which only functions of scope {other} see"
            yield Mistake("path", problem, path, fix=f"set scope: {other}")
        elif path in BUILTINS and name not in {*filled, *kwargs} and parameter.default is parameter.empty:
            yield Mistake("path", f"{path!r} needs a parameter {name!r}", path, fix=f"set kwargs.{name}")
    for name in kwargs:
        if name in filled:
            yield Mistake(f"kwargs.{name}", f"{name!r} is filled from each trajectory and cannot be set", kwargs[name])
        elif name not in parameters and not takes_any:
            fix = nearest(name, parameters) or f"it takes {', '.join(parameters) or 'none'}"
            yield Mistake(f"kwargs.{name}", f"{path!r} has no parameter {name!r}", kwargs[name], fix=fix)


def _not_sent(path: str, name: str) -> Mistake:
    problem = f"{path!r} takes {name!r}, a record of treadle, which another interpreter does not know"
    fix = (
        f"take what it needs of it: {', '.join(one for one in PARAMETERS['sample'] if one not in RECORDS)}, or a column"
    )
    return Mistake("path", problem, path, fix=fix)


def _other_scope(name: str, scope: str) -> str | None:
    """The scope whose functions have this name filled, where it is not this one."""
    others = (other for other, names in PARAMETERS.items() if name in names)
    return None if name in PARAMETERS[scope] else next(others, None)


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
