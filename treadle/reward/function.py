"""A reward function: found by name or import path, its signature read once.

Owns loading and the rules for parameters. Runs wherever the function will run: in a worker for user code, in the
parent for built-ins that are pure and bounded. Knows nothing about processes.
Invariant: a Function that exists can be called with the values of `needs`; mistakes are found before the first score.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from treadle.errors import ConfigError, Mistake, nearest
from treadle.reward.argument import PARAMETERS
from treadle.reward.builtin import BUILTINS, Builtin
from treadle.reward.verdict import Answer, read_score, read_scores


@dataclass(frozen=True, slots=True)
class Function:
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
        return self.builtin is not None and not self.builtin.evaluates_text and not self.builtin.starts_processes

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """What the function returns, or an awaitable of it. `values` may hold more than it needs."""
        return self.call(**{name: values[name] for name in self.needs}, **self.kwargs)

    def read(self, result: Any) -> Answer:
        """What the function returned, as a score, or as one for each sample of a group."""
        return read_scores(result) if self.scope == "group" else read_score(result)


def load_function(name: str, path: str, kwargs: Mapping[str, Any], scope: str = "sample") -> Function:
    """The function at `path`; a ConfigError with keys relative to its section where it cannot be used."""
    builtin = BUILTINS.get(path)
    call = import_module(builtin.module).score if builtin else _load_callable(path)
    parameters = _read_parameters(call, path)
    mistakes = list(_check_parameters(path, parameters, kwargs, scope))
    if mistakes:
        raise ConfigError(mistakes)
    if builtin:
        _prepare(import_module(builtin.module), path, kwargs)
    needs = tuple(parameter for parameter in parameters if parameter in PARAMETERS[scope])
    return Function(name, call, needs, kwargs, builtin, scope)


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
    return f"set kwargs.{name}, or use one of {', '.join(PARAMETERS[scope])}"


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
