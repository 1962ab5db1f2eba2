"""Environment schemes: what `rollout.multi_turn.environment` names, found here or in another interpreter.

Owns which adapter a scheme is, and how an environment is found before any session begins: an unknown name, a missing
package or a server that does not answer is a ConfigError.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from treadle.config.plugin import load_object
from treadle.config.rollout import MultiTurnConfig, RolloutConfig
from treadle.errors import ConfigError, EnvironmentFailure, Mistake, RunError
from treadle.process.foreign import ForeignError, ForeignHandle, ForeignInterpreter, ForeignTarget, as_record
from treadle.process.foreign import import_mistake as foreign_mistake
from treadle.types import Task

KEY = "rollout.multi_turn.environment"
PYTHON_KEY = "rollout.multi_turn.environment_python"


@dataclass(frozen=True, slots=True)
class Scheme:
    """An adapter: its file beside this one, its class, and the package that it needs."""

    module: str
    environment: str
    package: str
    """As it is imported."""
    install: str
    """As pip calls it."""


SCHEMES: Mapping[str, Scheme] = {
    "textarena": Scheme("textarena_adapter", "TextArenaGame", "textarena", "textarena"),
    "gem": Scheme("gem_adapter", "GemEnvironment", "gem", "gem-llm"),
    "skyrl_gym": Scheme("skyrl_adapter", "SkyRLEnvironment", "skyrl_gym", "skyrl-gym"),
    "openenv": Scheme("openenv_adapter", "OpenEnvSession", "openenv", "openenv"),
    "gymnasium": Scheme("gymnasium_adapter", "GymnasiumEnvironment", "gymnasium", "gymnasium"),
}


@dataclass(frozen=True, slots=True)
class EnvironmentSource:
    """An environment that was found in this interpreter."""

    build: Callable[..., Any]
    takes_task: bool
    """Whether it is built with the task; one with `reset` is told of it there."""


def split_scheme(path: str) -> tuple[Scheme | None, str]:
    """The scheme of a path and the name after it; None for an import path."""
    scheme, _, name = path.partition(":")
    return (SCHEMES[scheme], name) if scheme in SCHEMES else (None, path)


@cache
def find_environment(path: str) -> EnvironmentSource:
    """The environment that a path names, in this interpreter; a ConfigError where there is none."""
    scheme, name = split_scheme(path)
    if scheme is None:
        build = load_object(path, KEY)
        has_reset = hasattr(build, "reset")
        return EnvironmentSource(build, not (isinstance(build, type) and has_reset))
    if scheme.package == "openenv" and "://" not in name:
        problem = "starts the server of a package, which belongs to a process beside this one"
        fix = f"set {PYTHON_KEY}: to {sys.executable} where that has the package"
        raise ConfigError([Mistake(KEY, problem, path, fix=fix)])
    adapter = import_module(f"treadle.rollout.environments.{scheme.module}")
    try:
        adapter.check(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != scheme.package:
            raise ConfigError([Mistake(KEY, f"importing {scheme.package} failed: {error}", path)]) from error
        fix = f"pip install {scheme.install}, or set {PYTHON_KEY} to an interpreter that has it"
        problem = f"needs the package {scheme.install}"
        raise ConfigError([Mistake(KEY, problem, path, fix=fix, missing="package")]) from error
    except LookupError as error:
        raise ConfigError([Mistake(KEY, str(error.args[0]), path)]) from error
    except Exception as error:
        raise ConfigError([Mistake(KEY, f"{type(error).__name__}: {error}", path)]) from error
    return EnvironmentSource(partial(getattr(adapter, scheme.environment), name), False)


def runs_here(multi_turn: MultiTurnConfig) -> bool:
    """Whether there is an environment in this interpreter, which it can hold up; an error where none is found."""
    if multi_turn.environment is None or multi_turn.environment_python is not None:
        return False
    find_environment(multi_turn.environment)
    return True


class ForeignEnvironments:
    """The environments of an agent worker, in another interpreter."""

    def __init__(self, interpreter: ForeignInterpreter, target: ForeignTarget, takes_task: bool) -> None:
        self.interpreter = interpreter
        self._target = target
        self._takes_task = takes_task

    @classmethod
    async def start(cls, rollout: RolloutConfig) -> "ForeignEnvironments":
        """The process, with the environment found in it; a ConfigError otherwise, and no process."""
        turns = rollout.multi_turn
        assert turns.environment is not None and turns.environment_python is not None
        python, launch_s = turns.environment_python, rollout.limits.launch_timeout_s
        interpreter = await ForeignInterpreter.start(python, PYTHON_KEY, launch_s)
        scheme, name = split_scheme(turns.environment)
        target = ForeignTarget(turns.environment)
        if scheme is not None:
            file = Path(__file__).with_name(f"{scheme.module}.py")
            target = ForeignTarget(f"{file}:{scheme.environment}", (name,), check=name)
        try:
            known = await interpreter.check(target)
        except BaseException as error:
            await interpreter.close()
            if isinstance(error, ForeignError):
                mistake = foreign_mistake(error, turns.environment, KEY, python, PYTHON_KEY)
                raise ConfigError([mistake]) from error
            if isinstance(error, RunError):
                raise ConfigError([Mistake(KEY, str(error), turns.environment)]) from error
            raise
        return cls(interpreter, target, not (known.get("is_class") and known.get("has_reset")))

    async def open(self, task: Task, keywords: Mapping[str, Any]) -> "ForeignEnvironment | ForeignShortEnvironment":
        """The environment of one session."""
        given = (_task_record(task),) if self._takes_task else ()
        handle = await self.interpreter.open(self._target, given, keywords, EnvironmentFailure)
        if not self._takes_task or await handle.has("reset"):
            return ForeignEnvironment(handle)
        return ForeignShortEnvironment(handle)

    async def close(self) -> None:
        await self.interpreter.close()


class ForeignShortEnvironment:
    """An environment of the short form in another interpreter: `step` returns a map with `text` and `reward`."""

    def __init__(self, handle: ForeignHandle) -> None:
        self._handle = handle

    async def step(self, messages: Any) -> Any:
        return await self._handle.call("step", list(messages))

    async def close(self) -> None:
        await self._handle.close()


class ForeignEnvironment:
    """An environment in another interpreter."""

    def __init__(self, handle: ForeignHandle) -> None:
        self._handle = handle

    async def reset(self, task: Task) -> Any:
        return await self._handle.call("reset", _task_record(task))

    async def step(self, action: Any) -> Any:
        calls = [as_record({"id": one.id, "name": one.name, "arguments": one.arguments}) for one in action.calls]
        fields = {"text": action.text, "calls": calls, "messages": list(action.messages), "seat": action.seat}
        return await self._handle.call("step", as_record(fields))

    async def close(self) -> None:
        await self._handle.close()


def _task_record(task: Task) -> Mapping[str, Any]:
    fields = {
        "uid": task.uid,
        "messages": list(task.messages),
        "ground_truth": task.ground_truth,
        "data_source": task.data_source,
        "environment_kwargs": dict(task.environment_kwargs),
        "extra": dict(task.extra),
    }
    return as_record(fields)
