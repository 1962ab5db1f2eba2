"""Finds a part of the algorithm by name, or the user's own by import path."""

from collections.abc import Mapping
from typing import TypeVar

from treadle.config.plugin import load_object
from treadle.errors import ConfigError, Mistake, nearest

Part = TypeVar("Part")


def choose(name: str, known: Mapping[str, Part], key: str) -> Part:
    """The part called `name`, or the function at that import path. Anything else is a mistake of `key`."""
    if name in known:
        return known[name]
    if ":" not in name:
        problem = f"nothing is called {name!r}; known: {', '.join(known)}"
        fix = nearest(name, known) or "or give an import path, as package.module:function"
        raise ConfigError([Mistake(key, problem, name, fix=fix)])
    found: Part = load_object(name, key)
    if not callable(found):
        raise ConfigError([Mistake(key, f"{name} is not a function", name)])
    return found
