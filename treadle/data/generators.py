"""Task generators: tasks that no file holds, from seeds, reasoning-gym, verifiers, or a function of one's own

Owns `seeds:COUNT` for environments that write their own prompts, `reasoning_gym:NAME`, and `package.module:function`,
with the arguments of `data.source_kwargs`. Validation has seeds of its own, also for reasoning-gym, so the same
generator in `data.train_files` and `data.val_files` gives different tasks; a function is called as it is asked to be.
Invariant: the same name, arguments and seed give the same tasks of reasoning-gym; whatever a function breaks with is a
ConfigError that names it.
`verifiers:NAME` is a taskset of the verifiers project: its own interpreter lists the tasks, for `LIST_TIMEOUT_S` at
most. A task is a key of the taskset; its prompt here is for readers. The agent loop `verifiers_agent` plays it: prompt,
tools, harness and reward are the taskset's own.
"""

import json
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from treadle.config.plugin import load_object
from treadle.config.root import DataConfig
from treadle.data.file_formats import HUB, TaskRow
from treadle.data.task_files import to_task
from treadle.errors import ConfigError, Mistake, TreadleError, nearest
from treadle.types import Task

REASONING_GYM_PREFIX = "reasoning_gym:"
SEEDS_PREFIX = "seeds:"
VALIDATION_SEED_SHIFT = 1_000_003_000

_IMPORT_PATH = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")


def is_function(source: str) -> bool:
    """Whether an entry of a file list names a function. A file of that name comes first."""
    schemes = (REASONING_GYM_PREFIX, VERIFIERS_PREFIX, HARBOR_PREFIX, HUB)
    is_path = _IMPORT_PATH.fullmatch(source) is not None and not source.startswith(schemes)
    return is_path and not Path(source).is_file()


def generate_seeds(source: str, key: str, *, validation: bool) -> Iterator[Task]:
    """Tasks that are a seed and nothing else: their environment, built with `seed`, writes the prompt."""
    text = source.removeprefix(SEEDS_PREFIX)
    count = int(text) if re.fullmatch(r"[1-9]\d{0,8}", text) else 0
    if not count:
        raise ConfigError([Mistake(key, "must say how many tasks there are", source, fix="write seeds:1000")])
    first = VALIDATION_SEED_SHIFT if validation else 0
    for seed in range(first, first + count):
        yield Task(f"{SEEDS_PREFIX}{seed}", (), data_source="seeds", environment_kwargs={"seed": seed})


def generate_tasks(source: str, data: DataConfig, key: str, *, validation: bool) -> Iterator[Task]:
    """The tasks of one dataset of reasoning-gym; `source` is as it stands under the config key `key`."""
    name = source.removeprefix(REASONING_GYM_PREFIX)
    options = read_options(name, data)
    if not isinstance(options.get("seed", 0), int):
        raise ConfigError([Mistake(f"data.source_kwargs.{name}.seed", "must be a whole number", options["seed"])])
    seed = options.pop("seed", data.seed) + (VALIDATION_SEED_SHIFT if validation else 0)
    made, keys = _make_dataset(name, {**options, "seed": seed}, source, key), _gym_keys(data)
    for index in range(len(made)):
        entry, uid = made[index], f"{source}@{seed}:{index}"
        asked = to_task(TaskRow(uid, uid, {data.prompt_key: entry["question"], **entry}), keys)
        yield Task(uid, asked.messages, entry["answer"], data_source=source, extra={"entry": entry})


def _gym_keys(data: DataConfig) -> DataConfig:
    """The prompt's keys alone: entries of reasoning-gym have names of their own for the rest."""
    return DataConfig(
        prompt_key=data.prompt_key, prompt_template=data.prompt_template, system_prompt=data.system_prompt
    )


def generate_rows(source: str, data: DataConfig, key: str) -> Iterator[Any]:
    """Rows that a function generates, unchecked."""
    function = load_object(source, key)
    if not callable(function):
        raise ConfigError([Mistake(key, f"{source} is not a function: {type(function).__name__}", source)])
    name = source if source in data.source_kwargs else name_function(source)
    options = read_options(name, data)
    check_arguments(function, options, f"data.source_kwargs.{name}", source)
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
    gym = {source.removeprefix(REASONING_GYM_PREFIX) for source in sources if source.startswith(REASONING_GYM_PREFIX)}
    hubs = {source.removeprefix(VERIFIERS_PREFIX) for source in sources if source.startswith(VERIFIERS_PREFIX)}
    used = {*gym, *hubs, *functions, *map(name_function, functions)}
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


def read_options(name: str, data: DataConfig) -> dict[str, Any]:
    options = data.source_kwargs.get(name, {})
    if not isinstance(options, Mapping):
        raise ConfigError([Mistake(f"data.source_kwargs.{name}", f"must be a map of arguments, got {options!r}")])
    return dict(options)


def check_arguments(
    function: Callable[..., Any], options: Mapping[str, Any], key: str, source: str, *given: object
) -> None:
    """A ConfigError of `key` where a function or class does not take these arguments, after those that are `given`."""
    try:
        accepted = signature(function)
    except ValueError:  # built-in functions may have none
        return
    try:
        accepted.bind(*given, **options)
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


VERIFIERS_PREFIX = "verifiers:"
VERIFIERS_SHIM = Path(__file__).with_name("verifiers_shim.py")
VERIFIERS_LOOP = "verifiers_agent"

HARBOR_PREFIX = "harbor:"

LIST_TIMEOUT_S = 600.0
"""Tasksets may download their data when they are listed."""

_LOCAL: Mapping[str, Any] = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
"""verifiers' agent where nothing else is asked for: a chat loop on this machine."""


def verifiers_env(name: str, env: Mapping[str, Any]) -> str:
    """verifiers' env config as JSON: the taskset by name, and what is asked for beside that."""
    taskset = {"id": name, **env.get("taskset", {})}
    return json.dumps({"agent": _LOCAL, **env, "taskset": taskset}, sort_keys=True)


def list_verifiers_tasks(source: str, options: Mapping[str, Any], key: str) -> Iterator[Task]:
    """The tasks of a taskset; a ConfigError says why there are none."""
    name = source.removeprefix(VERIFIERS_PREFIX)
    where = f"data.source_kwargs.{name}"
    python, env, unknown = options.get("python"), options.get("env", {}), options.keys() - {"python", "env"}
    if unknown:
        raise ConfigError([Mistake(where, f"takes python and env, not {', '.join(sorted(unknown))}")])
    if not isinstance(python, str) or not Path(python).is_file():
        fix = "give the interpreter of an environment with verifiers: {python: /opt/verifiers/bin/python}"
        raise ConfigError([Mistake(f"{where}.python", "must be an interpreter that has verifiers", python, fix=fix)])
    if not isinstance(env, Mapping):
        raise ConfigError([Mistake(f"{where}.env", "must be a map: verifiers' env config", env)])
    command = [python, str(VERIFIERS_SHIM), "tasks", verifiers_env(name, env)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIST_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ConfigError([Mistake(key, f"verifiers took over {LIST_TIMEOUT_S:.0f} s to list it", source)]) from None
    if done.returncode:
        said = done.stderr.strip().splitlines()
        problem = f"verifiers cannot list it: {said[-1][:400] if said else f'status {done.returncode}'}"
        raise ConfigError([Mistake(key, problem, source, fix=f"install its package where {python} finds it")])
    for row in json.loads(done.stdout.strip().splitlines()[-1])["tasks"]:
        extra = {"verifiers": {"taskset": name, "key": row["key"]}}
        messages = ({"role": "user", "content": row["prompt"]},)
        yield Task(f"{source}:{row['key'][:32]}", messages, data_source=source, agent=VERIFIERS_LOOP, extra=extra)


def refuse_harbor(source: str, key: str) -> ConfigError:
    """Why there are no tasks of Harbor by its own name, and what plays them."""
    problem = "Harbor's tasks each have a container image of their own and are graded in it; boxes here share one image"
    name = source.removeprefix(HARBOR_PREFIX)
    fix = f"verifiers plays them: {VERIFIERS_PREFIX}harbor, and data.source_kwargs.harbor.env.taskset.dataset: {name}"
    own = f"a function of a module of yours is harbor.py:{name}"
    return ConfigError([Mistake(key, problem, source, fix=f"{fix} (docs/agents.md); {own}")])
