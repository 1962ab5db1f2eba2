"""Task sources: the dataset of a run; every task once an epoch, in an order by the seed, resumable anywhere.

Owns loading, the order and the position in it, and tasks that are generated: `reasoning_gym:NAME`, and
`package.module:function` of one's own, with the arguments of `data.source_kwargs`. Tasks are held in memory, parsed: a
few hundred thousand rows fit, all mistakes are found before anything starts, and any task can be next. Validation draws
from reasoning-gym with a seed far from training's, so the same generator in `data.train_files` and `data.val_files`
gives different tasks; a function is called as it is asked to be.
Invariant: whatever mix of `take`, iteration, `state` and `restore` is called, each epoch hands out each task once. The
same name, arguments and seed give the same tasks of reasoning-gym; whatever a function breaks with is a ConfigError
that names it.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from inspect import signature
from pathlib import Path
from random import Random
from typing import Any

from treadle.config.plugin import load_object
from treadle.config.root import DataConfig
from treadle.data.task_files import SOURCE_FORMS, TaskRow, read_records, to_task
from treadle.errors import ConfigError, Mistake, TreadleError, nearest
from treadle.types import Task

REASONING_GYM_PREFIX = "reasoning_gym:"
VALIDATION_SEED_SHIFT = 1_000_003_000

_IMPORT_PATH = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")


def is_function(source: str) -> bool:
    """Whether an entry of a file list names a function. A file of that name comes first."""
    is_path = _IMPORT_PATH.fullmatch(source) is not None and not source.startswith(REASONING_GYM_PREFIX)
    return is_path and not Path(source).is_file()


def generate_tasks(source: str, data: DataConfig, key: str, *, validation: bool) -> Iterator[Task]:
    """The tasks of one dataset of reasoning-gym; `source` is as it stands under the config key `key`."""
    name = source.removeprefix(REASONING_GYM_PREFIX)
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
    """Rows that a function generates, unchecked."""
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
    gym = {source.removeprefix(REASONING_GYM_PREFIX) for source in sources if source.startswith(REASONING_GYM_PREFIX)}
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


MAX_MISTAKES = 20
"""Mistakes in rows that one report shows; a file with the wrong keys has as many as rows."""


@dataclass(frozen=True, slots=True)
class SourceState:
    """The position of a source, and what must be unchanged for it to mean the same thing. Plain values only."""

    epoch: int
    index: int
    count: int
    digest: str
    """Digest of the uids of all tasks, in order of the files."""
    shuffle: bool
    seed: int


class TaskSource:
    """Tasks in order, epoch after epoch. The position advances as tasks are handed out."""

    def __init__(self, tasks: Sequence[Task], *, shuffle: bool, seed: int, key: str = "data.train_files") -> None:
        assert tasks, "a source needs a task"
        self._tasks = tuple(tasks)
        self._shuffle = shuffle
        self._seed = seed
        self._key = key
        self._digest = sha256("\n".join(task.uid for task in tasks).encode()).hexdigest()[:16]
        self._move(0, 0)

    def __len__(self) -> int:
        """Tasks in one epoch."""
        return len(self._tasks)

    @property
    def tasks(self) -> Sequence[Task]:
        """Every task, in the order of the files; the position does not change."""
        return self._tasks

    def __iter__(self) -> Iterator[Task]:
        """What is left of the current epoch."""
        epoch = self._epoch
        while self._epoch == epoch:
            yield self._next()

    def take(self, count: int) -> tuple[Task, ...]:
        """The next `count` tasks, across epochs if need be."""
        return tuple(self._next() for _ in range(count))

    def at(self, position: int) -> Task:
        """The task that was, or will be, handed out at a position; the position does not change."""
        epoch, index = divmod(position, len(self._tasks))
        order = self._order if epoch == self._epoch else self._order_of(epoch)
        return self._tasks[order[index]]

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def position(self) -> int:
        """Tasks handed out since the very first."""
        return self._epoch * len(self._tasks) + self._index

    def state(self) -> SourceState:
        """The position: everything before it was handed out, nothing after it."""
        return SourceState(self._epoch, self._index, len(self._tasks), self._digest, self._shuffle, self._seed)

    def restore(self, state: SourceState) -> None:
        """Go on from `state`; a ConfigError if the tasks or their order are no longer those it was taken from."""
        here = self.state()
        mistakes = []
        if (state.count, state.digest) != (here.count, here.digest):
            problem = f"the run was started with {state.count} tasks, these are {here.count}"
            if state.count == here.count:
                problem = f"the run was started with {state.count} other tasks"
            mistakes.append(Mistake(self._key, problem, fix="resume with the same files, or start a new run"))
        for name, then, now in (("shuffle", state.shuffle, here.shuffle), ("seed", state.seed, here.seed)):
            if then != now:
                mistakes.append(Mistake(f"data.{name}", f"the run was started with {then}, this is {now}", value=now))
        if mistakes:
            raise ConfigError(mistakes)
        self._move(state.epoch, state.index)

    def _next(self) -> Task:
        task = self._tasks[self._order[self._index]]
        last = self._index + 1 == len(self._tasks)
        if last:
            self._move(self._epoch + 1, 0)
        else:
            self._index += 1
        return task

    def _move(self, epoch: int, index: int) -> None:
        self._epoch = epoch
        self._index = index
        self._order = self._order_of(epoch)

    def _order_of(self, epoch: int) -> Sequence[int]:
        """Uses nothing of `Random` but `random()`, whose sequence is the same on every platform and version."""
        if not self._shuffle:
            return range(len(self._tasks))
        draw = Random(f"{self._seed}/{epoch}").random
        keys = [draw() for _ in self._tasks]
        return sorted(range(len(keys)), key=keys.__getitem__)


def load_training_tasks(data: DataConfig) -> TaskSource:
    """The tasks of `data.train_files`, shuffled if `data.shuffle`."""
    return load_tasks(data.train_files, data, data.train_max_samples)


def load_validation_tasks(data: DataConfig) -> TaskSource:
    """The tasks of `data.val_files`, in their own order."""
    return load_tasks(data.val_files, data, data.val_max_samples, validation=True)


def load_tasks(files: Sequence[str], data: DataConfig, max_samples: int, *, validation: bool = False) -> TaskSource:
    """The first `max_samples` tasks of some files and generators; -1 for all. Every mistake in one report."""
    key = "data.val_files" if validation else "data.train_files"
    if not files:
        raise ConfigError([Mistake(key, "no task files", fix=f"give {SOURCE_FORMS}")])
    if max_samples == 0:
        raise ConfigError([Mistake(key.replace("files", "max_samples"), "0 tasks asked for", 0, fix="-1 takes all")])
    check_source_kwargs(data)
    tasks = _collect(files, data, key, max_samples, validation)
    return TaskSource(tasks, shuffle=data.shuffle and not validation, seed=data.seed, key=key)


@dataclass(frozen=True, slots=True)
class _ReadTask:
    place: str
    task: Task | None = None
    mistakes: tuple[Mistake, ...] = ()


def _collect(files: Sequence[str], data: DataConfig, key: str, limit: int, validation: bool) -> list[Task]:
    tasks: list[Task] = []
    mistakes: list[Mistake] = []
    places: dict[str, str] = {}
    for found in _read_all(files, data, key, validation):
        mistakes += found.mistakes
        if found.task is not None:
            mistakes += _note_place(places, found.task.uid, found.place)
            tasks.append(found.task)
        if len(mistakes) >= MAX_MISTAKES:
            mistakes.append(Mistake(key, f"gave up reading after {MAX_MISTAKES} mistakes"))
            break
        if len(tasks) == limit:
            break
    if mistakes:
        raise ConfigError(mistakes)
    return tasks


def _note_place(places: dict[str, str], uid: str, place: str) -> list[Mistake]:
    if uid in places:
        fix = "a uid names one task; leave it out to have one made from file and line"
        return [Mistake(place, f"uid {uid!r} is already taken by {places[uid]}", uid, fix=fix)]
    places[uid] = place
    return []


def _read_all(files: Sequence[str], data: DataConfig, key: str, validation: bool) -> Iterator[_ReadTask]:
    labels = _label(files)
    for file in files:
        rows: Iterator[_ReadTask]
        if file.startswith(REASONING_GYM_PREFIX):
            generated = generate_tasks(file, data, key, validation=validation)
            rows, nothing = (_ReadTask(task.uid, task) for task in generated), "it makes no tasks"
        elif is_function(file):
            rows, nothing = _read_function(file, labels[file], data, key), "the function makes no rows"
        else:
            records = read_records(file, labels[file], key)
            rows, nothing = (_read_record(record, data) for record in records), "the file holds no rows"
        try:
            first = next(rows, None)
        except ConfigError as error:  # of the whole file: the others are read all the same
            yield _ReadTask(file, mistakes=error.mistakes)
            continue
        yield first if first is not None else _ReadTask(file, mistakes=(Mistake(file, nothing),))
        yield from rows


def _read_function(source: str, label: str, data: DataConfig, key: str) -> Iterator[_ReadTask]:
    for index, row in enumerate(generate_rows(source, data, key)):
        place, uid = f"{source}[{index}]", f"{label}:{index}"
        if isinstance(row, Task):
            yield _ReadTask(place, row)
        elif isinstance(row, Mapping):
            yield _read_record(TaskRow(place, uid, row), data)
        else:
            problem = f"a row must be a map with named fields, or a Task; it is {type(row).__name__} {str(row)[:60]!r}"
            yield _read_record(TaskRow(place, uid, problem=problem), data)


def _read_record(record: TaskRow, data: DataConfig) -> _ReadTask:
    try:
        return _ReadTask(record.place, to_task(record, data))
    except ConfigError as error:
        return _ReadTask(record.place, mistakes=error.mistakes)


def _label(files: Sequence[str]) -> dict[str, str]:
    """Label of each file or function in ids: its name, or the path as given where two share a name."""
    short = {file: name_function(file) if is_function(file) else Path(file).name for file in files}
    names = list(short.values())
    return {file: name if names.count(name) == 1 else file for file, name in short.items()}
