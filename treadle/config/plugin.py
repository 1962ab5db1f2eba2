"""Finds the user's own code: objects that a config names by import path."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from treadle.errors import ConfigError, Mistake, nearest


def load_object(path: str, key: str) -> Any:
    """The object at `package.module:name`. Anything wrong is a mistake of `key`.

    Modules are found as Python finds them, and in the working directory, whichever command was started.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise _mistake(key, path, f"{path!r} is not an import path", "write package.module:name")
    module = _import(module_name, path, key)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise _mistake(key, path, f"{module_name} has no {name!r}", nearest(name, dir(module)))
        value = getattr(value, part)
    return value


def _import(name: str, path: str, key: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        problem = f"there is no module {error.name!r}"
        raise _mistake(key, path, problem, "install it, or start from the directory that holds it") from error
    except Exception as error:
        raise _mistake(key, path, f"importing {name} failed: {type(error).__name__}: {error}", None) from error


def _mistake(key: str, path: str, problem: str, fix: str | None) -> ConfigError:
    return ConfigError([Mistake(key, problem, path, fix=fix)])
