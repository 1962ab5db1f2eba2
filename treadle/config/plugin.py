"""Plugins: built-in parts by name, and the user's own objects by import path; the user's own modules, by their files.

Modules of the user are told from Python's, installed packages' and treadle's, and their sources are parsed, without an
import: a part of a package is looked for in the package's directories, as Python would import the package to find it.
Sources are parsed under a lock, and again after a SystemError: CPython counts the depth of all syntax trees that are
being made in one place, so that two threads which make one each may fail where either alone would not.
"""

import ast
import sys
import sysconfig
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from treadle.config.serialized import SUFFIX, load_serialized
from treadle.errors import ConfigError, Mistake, nearest


def load_object(path: str, key: str) -> Any:
    """The object at `package.module:name` or `path/to/file.py:name`. Anything wrong is a mistake of `key`.

    `path/to/file.pkl:name` is a serialized function of a script or a notebook. Modules are found as Python finds them,
    and in the working directory, whichever command was started.
    """
    module_name, colon, name = path.rpartition(":")
    if not colon or not module_name or not name:
        raise _mistake(key, path, f"{path!r} is not an import path", "write package.module:name, or file.py:name")
    if module_name.endswith(SUFFIX):
        return _load_serialized(Path(module_name).expanduser().resolve(), name, key)
    module = _import(module_name, path, key)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise _mistake(key, path, f"{module_name} has no {name!r}", nearest(name, dir(module)))
        value = getattr(value, part)
    return value


@cache
def _load_serialized(file: Path, name: str, key: str) -> Any:
    """Loaded once in each process: a function and a class that refers to it share what they share."""
    return load_serialized(file, name, key)


def _import(name: str, path: str, key: str) -> Any:
    find_in_working_directory()
    if name.endswith(".py") and not Path(name).expanduser().is_file():
        fix = "paths start from the working directory, or with / or ~"
        raise ConfigError([Mistake(key, f"there is no file {name}", name, fix=fix, missing="file")])
    try:
        return _import_file(Path(name).expanduser().resolve()) if name.endswith(".py") else import_module(name)
    except ModuleNotFoundError as error:
        problem, fix = f"there is no module {error.name!r}", "install it, or start from the directory that holds it"
        raise ConfigError([Mistake(key, problem, error.name, fix=fix, missing="Python module")]) from error
    except Exception as error:
        raise _mistake(key, path, f"importing {name} failed: {type(error).__name__}: {error}", None) from error


def find_in_working_directory() -> None:
    """Have modules found in the working directory too, whichever command was started."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)


def _import_file(file: Path) -> ModuleType:
    """The module of a file, imported once in each process under a name of its own."""
    name = f"{file.stem}_{sha256(str(file).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None, "a .py file always has a loader"
        module = sys.modules[name] = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _mistake(key: str, path: str, problem: str, fix: str | None) -> ConfigError:
    return ConfigError([Mistake(key, problem, path, fix=fix)])


T = TypeVar("T")


def find_by_name(name: str, known: Mapping[str, T], key: str) -> T:
    """The part called `name`, or the function at that import path. Anything else is a mistake of `key`."""
    if name in known:
        return known[name]
    if ":" not in name:
        problem = f"nothing is called {name!r}; known: {', '.join(known)}"
        fix = nearest(name, known) or "or give an import path, as package.module:function"
        raise ConfigError([Mistake(key, problem, name, fix=fix)])
    found: T = load_object(name, key)
    if not callable(found):
        raise ConfigError([Mistake(key, f"{name} is not a function", name)])
    return found


def source_file(module: str) -> Path | None:
    """The file of a module, or the file itself; None where it is no source, or not found."""
    if module.endswith((".py", ".pkl")):
        file = Path(module).expanduser()
        return file if file.is_file() else None
    try:
        spec = find_spec(module)
    except Exception:  # noqa: BLE001 - a parent package may do anything when it is imported; the real import reports it
        return None
    origin = None if spec is None else spec.origin
    return Path(origin) if origin and origin.endswith(".py") and Path(origin).is_file() else None


_PACKAGES = frozenset({"site-packages", "dist-packages"})

_INSTALLED: Sequence[str] = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


def is_own_module(module: str) -> bool:
    """Whether a module has a source file that is the user's own."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top == "treadle":
        return False
    file = find_source(module)
    return file is not None and not _is_installed(file)


def find_source(module: str) -> Path | None:
    """The source file of a module by its dotted name; None where there is none, or it is not found."""
    top, *parts = module.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):  # a module that says nothing of itself; the real import reports it
        return None
    if spec is None:
        return None
    file = Path(spec.origin) if spec.origin and spec.has_location else None
    places = list(map(Path, spec.submodule_search_locations or ()))
    for part in parts:
        file, places = _find_part(part, places)
    return file if file is not None and file.suffix == ".py" and file.is_file() else None


def _find_part(part: str, places: Sequence[Path]) -> tuple[Path | None, list[Path]]:
    """A module of a package: its file, and where its own parts are."""
    for place in places:
        if (package := place / part / "__init__.py").is_file():
            return package, [place / part]
        if (file := place / f"{part}.py").is_file():
            return file, []
    return None, [place / part for place in places if (place / part).is_dir()]


def _is_installed(file: Path) -> bool:
    """In a directory of installed packages, of this environment or of another one that this one shows."""
    return not _PACKAGES.isdisjoint(file.parts) or any(file.is_relative_to(place) for place in _INSTALLED)


_LOCK = threading.Lock()
"""For our own threads; those of other packages do not know it."""
_TRIES = 5


def parse_source(source: str | bytes) -> ast.Module:
    """The tree; SyntaxError or ValueError where it is no Python."""
    with _LOCK:
        for _ in range(_TRIES - 1):
            try:
                return ast.parse(source)
            except SystemError:
                continue
        return ast.parse(source)
