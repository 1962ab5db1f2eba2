"""Tasks that are made, not read: `reasoning_gym:NAME`, and `package.module:function` of one's own.

Owns the call of the reasoning-gym package and that of the function, with the arguments `data.source_kwargs` has for
them. Validation draws from reasoning-gym with a seed far from training's, so the same generator in `data.train_files`
and `data.val_files` gives different tasks; a function is called as it is asked to be. Knows nothing about what the
rows of a function mean.
Invariant: the same name, arguments and seed give the same tasks of reasoning-gym. Whatever a function breaks with is a
ConfigError that names it.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from treadle.config.data import DataConfig
from treadle.config.plugin import load_object
from treadle.errors import ConfigError, Mistake, TreadleError, nearest
from treadle.types import Task

PREFIX = "reasoning_gym:"
VALIDATION_SEED_SHIFT = 1_000_003_000

_IMPORT_PATH = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")


def is_function(source: str) -> bool:
    """Does an entry of a file list name a function? A file of that name comes first."""
    is_path = _IMPORT_PATH.fullmatch(source) is not None and not source.startswith(PREFIX)
    return is_path and not Path(source).is_file()


def generate_tasks(source: str, data: DataConfig, key: str, *, validation: bool) -> Iterator[Task]:
    """The tasks of one dataset of reasoning-gym; `source` is as it stands under the config key `key`."""
    name = source.removeprefix(PREFIX)
    options = _read_options(name, data)
    if not isinstance(options.get("seed", 0), int):
        raise ConfigError([Mistake(f"data.source_kwargs.{name}.seed", "must be a whole number", options["seed"])])
    seed = options.pop("seed", data.seed) + (VALIDATION_SEED_SHIFT if validation else 0)
    made = _make_dataset(name, {**options, "seed": seed}, source, key)
    for index in range(len(made)):
        entry = made[index]
        messages = ({"role": "user", "content": entry["question"]},)
        uid = f"{source}@{seed}:{index}"
        yield Task(uid, messages, entry["answer"], data_source=source, extra={"entry": entry})


def generate_rows(source: str, data: DataConfig, key: str) -> Iterator[Any]:
    """What a function makes, row by row; nothing is checked about the rows themselves."""
    function = load_object(source, key)
    if not callable(function):
        raise ConfigError([Mistake(key, f"{source} is not a function: {type(function).__name__}", source)])
    name = source if source in data.source_kwargs else name_function(source)
    options = _read_options(name, data)
    _check_arguments(function, options, f"data.source_kwargs.{name}", source)
    count = 0
    try:
        for row in _as_rows(function(**options), source, key):
            yield row
            count += 1
    except TreadleError:
        raise
    except Exception as error:
        problem = f"{source} broke after {count} rows: {type(error).__name__}: {error}"
        raise ConfigError([Mistake(key, problem, source)]) from error


def name_function(source: str) -> str:
    """The function's own name, which stands for it in `data.source_kwargs` and in ids."""
    return source.partition(":")[2]


def check_source_kwargs(data: DataConfig) -> None:
    """Arguments for a generator that no file list names would be ignored in silence: refuse them."""
    sources = (*data.train_files, *data.val_files)
    functions = [source for source in sources if is_function(source)]
    gym = {source.removeprefix(PREFIX) for source in sources if source.startswith(PREFIX)}
    used = {*gym, *functions, *map(name_function, functions)}
    problem = "no generator of this name in data.train_files or data.val_files"
    mistakes = [
        Mistake(f"data.source_kwargs.{name}", problem, fix=nearest(name, used))
        for name in data.source_kwargs
        if name not in used
    ]
    twice = {source for source in functions if {source, name_function(source)} <= data.source_kwargs.keys()}
    for source in sorted(twice):
        problem = f"{name_function(source)} has arguments of its own there, too"
        mistakes.append(Mistake(f"data.source_kwargs.{source}", problem, fix="keep one of the two"))
    if mistakes:
        raise ConfigError(mistakes)


def _read_options(name: str, data: DataConfig) -> dict[str, Any]:
    options = data.source_kwargs.get(name, {})
    if not isinstance(options, Mapping):
        raise ConfigError([Mistake(f"data.source_kwargs.{name}", f"must be a map of arguments, got {options!r}")])
    return dict(options)


def _check_arguments(function: Callable[..., Any], options: Mapping[str, Any], key: str, source: str) -> None:
    try:
        accepted = signature(function)
    except ValueError:  # built-in functions may have none
        return
    try:
        accepted.bind(**options)
    except TypeError as error:
        problem = f"{source} does not take these arguments: {error}"
        fix = f"it takes {accepted}"
        raise ConfigError([Mistake(key, problem, value=dict(options), fix=fix)]) from error


def _as_rows(made: Any, source: str, key: str) -> Iterable[Any]:
    if isinstance(made, Iterable) and not isinstance(made, str | bytes | Mapping):
        return made
    problem = f"{source} must return rows, one after another, it returned {type(made).__name__} {str(made)[:60]!r}"
    raise ConfigError([Mistake(key, problem, source)])


def _make_dataset(name: str, options: Mapping[str, Any], source: str, key: str) -> Any:
    try:
        from reasoning_gym import create_dataset
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        fix = "pip install 'treadle[reasoning-gym]'"
        problem, package = f"{source} needs the package reasoning-gym", "reasoning-gym"
        raise ConfigError([Mistake(key, problem, package, fix=fix, missing="package")]) from error
    if name not in DATASETS:
        fix = nearest(name, DATASETS) or f"it has {len(DATASETS)}, such as {', '.join(sorted(DATASETS)[:5])}"
        raise ConfigError([Mistake(key, f"reasoning-gym has no dataset {name!r}", source, fix=fix)])
    try:
        return create_dataset(name, **options)
    except (TypeError, ValueError, AssertionError) as error:
        problem = f"reasoning-gym refuses these arguments: {error}"
        raise ConfigError([Mistake(f"data.source_kwargs.{name}", problem, value=dict(options))]) from error
