"""Which tools a config offers: import paths read, kinds told apart, names kept unique.

Owns the errors for all that. A path names a function, a `FunctionTool`, or a class with one instance per session.
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from treadle.config.plugin import load_object
from treadle.errors import ConfigError, Mistake
from treadle.rollout.tools.function import FunctionTool
from treadle.rollout.tools.spec import Tool
from treadle.rollout.tools.stateful import tools_of

KEY = "rollout.multi_turn.tools"


def load_tools(paths: Iterable[str]) -> list[Tool]:
    """The tools that import paths name; a ConfigError carries what is wrong with every path."""
    tools: list[Tool] = []
    mistakes: list[Mistake] = []
    for path in paths:
        try:
            tools += _tools_from(load_object(path, KEY), path)
        except ConfigError as error:
            mistakes += [replace(mistake, problem=f"{path!r}: {mistake.problem}") for mistake in error.mistakes]
        except ValueError as error:
            mistakes.append(Mistake(KEY, str(error), value=path))
    if mistakes:
        raise ConfigError(mistakes)
    return tools


def _tools_from(found: Any, path: str) -> tuple[Tool, ...]:
    if isinstance(found, FunctionTool):
        return (found,)
    if isinstance(found, type):
        return tools_of(found, path)
    if inspect.isroutine(found):
        return (FunctionTool.of(found, path),)
    raise ValueError(
        f"{path!r} is a {type(found).__name__}; a tool is a function, or a class with one instance a session"
    )


def unite(tools: Iterable[Tool]) -> Mapping[str, Tool]:
    """The tools by name; a ConfigError names both origins where two share one."""
    named: dict[str, Tool] = {}
    mistakes: list[Mistake] = []
    for tool in tools:
        spec = tool.spec
        if spec.name in named:
            problem = (
                f"two tools are called {spec.name!r}: one from {named[spec.name].spec.origin}, one from {spec.origin}"
            )
            mistakes.append(
                Mistake(KEY, problem, value=spec.origin, fix="rename one with @tool(name=...), or leave it out")
            )
        named[spec.name] = tool
    if mistakes:
        raise ConfigError(mistakes)
    return named
