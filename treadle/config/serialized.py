"""Serialized functions: functions and classes of a script, a REPL or a notebook, in files that a config can name.

A config names code by import path. What no other process can import (a lambda, a closure, a function of `__main__` or
of a cell) is serialized by value with cloudpickle, together with the globals it uses; `NAME-DIGEST.pkl:NAME` is its
path. Owns the form of such a file: a header, then the function.
Invariant: the name of a file says what is in it. The same code with the same values has the same digest in every
process, wherever it is defined, so that a run whose script is started again goes on, and one whose function was changed
is told so.
"""

import dis
import inspect
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from treadle.errors import ConfigError, Mistake

SUFFIX = ".pkl"
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_NOT_CODE = frozenset(
    [
        "__dict__",
        "__weakref__",
        "__module__",
        "__doc__",
        "__firstlineno__",
        "__static_attributes__",
        "__abstractmethods__",
    ]
)
"""Attributes of a class that do not say what it does."""
_REDUCES = frozenset(["__reduce__", "__reduce_ex__", "__getstate__"])
_GLOBALS = frozenset(["LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME"])


@dataclass(frozen=True, slots=True)
class SerializedFunction:
    """A function as it is written to a file."""

    name: str
    file_name: str
    content: bytes
    source: str | None
    """For people to read, where it can be had."""

    def path(self, directory: Path) -> str:
        """What a config writes for it."""
        return f"{directory / self.file_name}:{self.name}"


def import_path(value: Callable[..., Any]) -> str | None:
    """`module:name` of a function or class that other processes can import; None where they cannot."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__" or "<" in name:
        return None
    loaded = sys.modules.get(module)
    found: Any = loaded
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is value and _can_be_found(module) else None


def _can_be_found(module: str) -> bool:
    """Whether a process with this one's search path would find a module, and not only this one, which has loaded it."""
    own = getattr(sys.modules.get(module), "__spec__", None)
    if own is None:  # made up by exec
        return False
    first = module.partition(".")[0]
    finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
    found = next((spec for find in finders if find and (spec := find(first, None)) is not None), None)
    return found is not None and (first != module or found.origin == own.origin)


def script_directory(value: Callable[..., Any]) -> Path | None:
    """The directory of the script that runs, where a function is found there and not from the working directory.

    Python puts that directory on the search path of the script; a command that is typed here does not have it.
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    top = sys.modules.get(str(getattr(value, "__module__", "")).partition(".")[0])
    file = getattr(top, "__file__", None)
    if script is None or file is None:
        return None
    directory, found = Path(script).resolve().parent, Path(file).resolve()
    place = found.parents[1] if found.name == "__init__.py" else found.parent
    return directory if place == directory != Path.cwd().resolve() else None


def name_of(value: Any, otherwise: str) -> str:
    """A name for a function: its own, where it has one that a config can write."""
    if isinstance(value, partial):
        return name_of(value.func, otherwise)
    own = getattr(value, "__name__", None) or type(value).__name__
    return own if isinstance(own, str) and own.isidentifier() else otherwise


def serialize(value: Any, name: str, key: str) -> SerializedFunction:
    """A function or class by value; a ConfigError about `key` where it holds something that cannot be copied."""
    try:
        content = _dump(value)
        digest = digest_of(value)
    except Exception as error:  # whatever a value breaks with when it is copied
        what = f"the {'class' if isinstance(value, type) else 'function'} {name!r}"
        problem = f"{what} cannot be copied to other processes: {error}{_find_uncopyable(value)}"
        fix = "make that inside the function, or put both into a module and import the function from there"
        raise ConfigError([Mistake(key, problem, fix=fix)]) from error
    head = pickle.dumps({"name": name, "python": _PYTHON})
    return SerializedFunction(name, f"{name}-{digest}{SUFFIX}", head + content, _source(value))


def _dump(value: Any) -> bytes:
    import cloudpickle

    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or _can_be_found(module.__name__):
        return bytes(cloudpickle.dumps(value))
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(value))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def load_serialized(file: Path, name: str, key: str) -> Any:
    """The function in a file that `serialize` made; anything wrong is a mistake of `key`."""
    path = f"{file}:{name}"
    try:
        content = BytesIO(file.read_bytes())
        head = pickle.load(content)
    except FileNotFoundError:
        fix = "paths start from the working directory, or with / or ~"
        raise ConfigError([Mistake(key, f"there is no file {file}", str(file), fix=fix, missing="file")]) from None
    except Exception as error:
        raise ConfigError([Mistake(key, f"{file} holds no function: {error}", path)]) from error
    if not isinstance(head, dict) or head.get("name") != name:
        raise ConfigError([Mistake(key, f"{file} has no {name!r}", path)])
    if head["python"] != _PYTHON:
        problem = f"{file} was written by Python {head['python']}, and this is Python {_PYTHON}"
        fix = f"use Python {head['python']}, or put the function into a module: {file.with_suffix('.py')} shows it"
        raise ConfigError([Mistake(key, problem, path, fix=fix)])
    try:
        return pickle.load(content)
    except ModuleNotFoundError as error:
        problem, fix = (
            f"{file} needs the module {error.name!r}",
            "install it, or start from the directory that holds it",
        )
        raise ConfigError([Mistake(key, problem, error.name, fix=fix, missing="Python module")]) from error
    except Exception as error:
        raise ConfigError([Mistake(key, f"{file} cannot be loaded: {type(error).__name__}: {error}", path)]) from error


def _find_uncopyable(value: Any) -> str:
    """Which of the values that a function uses cannot be copied, as the end of a sentence."""
    for name, used in _used(value).items():
        try:
            _dump(used)
        except Exception:  # noqa: BLE001  the one that breaks is what is asked for
            return f" ({name} is a {type(used).__name__})"
    return ""


def _source(value: Any) -> str | None:
    try:
        return inspect.cleandoc("\n" + inspect.getsource(value))
    except (OSError, TypeError):
        return None


Seen = dict[int, Any]
"""Values met so far, by id; they are held, so that no id is used twice."""


def digest_of(value: Any) -> str:
    """Stands for what a function does: its code and every value it uses, not the file and the line it stands at."""
    digest = blake2b(digest_size=6)
    for part in _parts(value, {}):
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def _parts(value: Any, seen: Seen) -> Iterator[str]:
    """A value in words that are the same in every process."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield f"{type(value).__name__} {value!r}"
    elif isinstance(value, ModuleType):
        yield value.__name__
    elif id(value) in seen:
        yield "again"
    else:
        seen[id(value)] = value
        yield type(value).__name__
        if isinstance(value, set | frozenset):
            yield from sorted("\0".join(_parts(item, dict(seen))) for item in value)
        elif isinstance(value, list | tuple | Mapping):
            for item in value.items() if isinstance(value, Mapping) else value:
                yield from _parts(item, seen)
        else:
            path = import_path(value)
            yield from _parts_of_object(value, seen) if path is None else [path]


def _parts_of_object(value: Any, seen: Seen) -> Iterator[str]:
    if isinstance(value, CodeType):
        yield from (value.co_code.hex(), repr(value.co_names), repr(value.co_varnames), repr(value.co_flags))
        yield from _parts(value.co_consts, seen)
    elif isinstance(value, FunctionType):
        yield from _parts(value.__code__, seen)
        yield from _parts((value.__defaults__, value.__kwdefaults__, _used(value), vars(value)), seen)
    elif isinstance(value, MethodType):
        yield from _parts((value.__func__, value.__self__), seen)
    elif isinstance(value, partial):
        yield from _parts((value.func, value.args, value.keywords), seen)
    elif isinstance(value, staticmethod | classmethod):
        yield from _parts(value.__func__, seen)
    elif isinstance(value, property):
        yield from _parts((value.fget, value.fset, value.fdel), seen)
    elif isinstance(value, type):
        yield value.__qualname__
        yield from _parts(value.__bases__, seen)
        yield from _parts({name: item for name, item in vars(value).items() if _is_code(name)}, seen)
    elif hasattr(value, "__dict__") and not any(_REDUCES & vars(base).keys() for base in type(value).__mro__[:-1]):
        yield from _parts((type(value), vars(value)), seen)
    else:
        yield _dump(value).hex()


def _is_code(name: str) -> bool:
    return name not in _NOT_CODE and not name.startswith("_abc_")


def _used(value: Any) -> dict[str, Any]:
    """The globals and the variables of enclosing functions that a function reads, by name."""
    if isinstance(value, MethodType | staticmethod | classmethod):
        return _used(value.__func__)
    if isinstance(value, type):
        return {f"{value.__name__}.{name}": item for name, item in vars(value).items() if _is_code(name)}
    if not isinstance(value, FunctionType):
        return {}
    names = sorted(_global_names(value.__code__))
    used = {name: value.__globals__[name] for name in names if name in value.__globals__}
    for name, variable in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            used[name] = variable.cell_contents
        except ValueError:  # not set yet
            continue
    return used


def _global_names(code: CodeType) -> set[str]:
    own = {str(item.argval) for item in dis.get_instructions(code) if item.opname in _GLOBALS}
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return own.union(*(_global_names(part) for part in inner))
