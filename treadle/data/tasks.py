"""Tasks: the rows of all files and generators of a run, each read once and checked.

Owns loading, and the ids of tasks; the order in which they are drawn is `task_source`, what no file holds is made by
`generators`. All mistakes are found before anything starts, and are told in one report.
Invariant: no two tasks have one uid.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from treadle.config.root import DataConfig
from treadle.data.file_formats import SOURCE_FORMS, TaskRow, label_source, read_records
from treadle.data.generators import (
    HARBOR_PREFIX,
    REASONING_GYM_PREFIX,
    SEEDS_PREFIX,
    VERIFIERS_PREFIX,
    check_source_kwargs,
    generate_rows,
    generate_seeds,
    generate_tasks,
    is_function,
    list_verifiers_tasks,
    name_function,
    read_options,
    refuse_harbor,
)
from treadle.data.task_files import compile_template, to_task
from treadle.data.task_source import TaskSource, share_draws
from treadle.errors import ConfigError, Mistake
from treadle.types import Task

MAX_MISTAKES = 20
"""Mistakes in rows that one report shows; a file with the wrong keys has as many as rows."""


def load_training_tasks(data: DataConfig) -> TaskSource:
    """The tasks of `data.train_files`, shuffled if `data.shuffle`, with the shares of `data.train_weights`."""
    return load_tasks(data.train_files, data, data.train_max_samples, weights=data.train_weights)


def load_validation_tasks(data: DataConfig) -> TaskSource:
    """The tasks of `data.val_files`, in their own order."""
    return load_tasks(data.val_files, data, data.val_max_samples, validation=True)


@dataclass(frozen=True, slots=True)
class RunTasks:
    """The tasks of a run that were read by its checks already; None for those that were not. Nothing is drawn yet."""

    training: TaskSource | None = None
    validation: TaskSource | None = None


NOT_READ = RunTasks()


def load_tasks(
    files: Sequence[str],
    data: DataConfig,
    max_samples: int,
    *,
    validation: bool = False,
    weights: Sequence[float] = (),
) -> TaskSource:
    """The first `max_samples` tasks of some files and generators; -1 for all. Every mistake in one report."""
    key = "data.val_files" if validation else "data.train_files"
    if not files:
        raise ConfigError([Mistake(key, "no task files", fix=f"give {SOURCE_FORMS}")])
    if max_samples == 0:
        raise ConfigError([Mistake(key.replace("files", "max_samples"), "0 tasks asked for", 0, fix="-1 takes all")])
    check_source_kwargs(data)
    if data.prompt_template is not None:
        compile_template(data)
    tasks, counts = _collect(files, data, key, max_samples, validation)
    shares = share_draws(files, counts, weights)
    return TaskSource(tasks, shuffle=data.shuffle and not validation, seed=data.seed, key=key, shares=shares)


@dataclass(frozen=True, slots=True)
class _ReadTask:
    source: int
    """Which entry of the file list it is of."""
    place: str
    task: Task | None = None
    mistakes: tuple[Mistake, ...] = ()


def _collect(
    files: Sequence[str], data: DataConfig, key: str, limit: int, validation: bool
) -> tuple[list[Task], list[int]]:
    """The tasks of all files, and how many each has."""
    tasks: list[Task] = []
    counts = [0] * len(files)
    mistakes: list[Mistake] = []
    places: dict[str, str] = {}
    for found in _read_all(files, data, key, validation):
        mistakes += found.mistakes
        if found.task is not None:
            mistakes += _note_place(places, found.task.uid, found.place)
            tasks.append(found.task)
            counts[found.source] += 1
        if len(mistakes) >= MAX_MISTAKES:
            mistakes.append(Mistake(key, f"gave up reading after {MAX_MISTAKES} mistakes"))
            break
        if len(tasks) == limit:
            break
    if mistakes:
        raise ConfigError(mistakes)
    return tasks, counts


def _note_place(places: dict[str, str], uid: str, place: str) -> list[Mistake]:
    if uid in places:
        fix = "a uid names one task; leave it out to have one made from file and line"
        return [Mistake(place, f"uid {uid!r} is already taken by {places[uid]}", uid, fix=fix)]
    places[uid] = place
    return []


def _read_all(files: Sequence[str], data: DataConfig, key: str, validation: bool) -> Iterator[_ReadTask]:
    labels = _label(files)
    for at, file in enumerate(files):
        rows: Iterator[_ReadTask]
        if file.startswith(HARBOR_PREFIX):
            yield _ReadTask(at, file, mistakes=refuse_harbor(file, key).mistakes)
            continue
        if file.startswith(SEEDS_PREFIX):
            seeds = generate_seeds(file, key, validation=validation)
            rows, nothing = (_ReadTask(at, task.uid, task) for task in seeds), "it makes no tasks"
        elif file.startswith(VERIFIERS_PREFIX):
            options = read_options(file.removeprefix(VERIFIERS_PREFIX), data)
            listed = list_verifiers_tasks(file, options, key)
            rows, nothing = (_ReadTask(at, task.uid, task) for task in listed), "the taskset has no tasks"
        elif file.startswith(REASONING_GYM_PREFIX):
            generated = generate_tasks(file, data, key, validation=validation)
            rows, nothing = (_ReadTask(at, task.uid, task) for task in generated), "it makes no tasks"
        elif is_function(file):
            rows, nothing = _read_function(at, file, labels[file], data, key), "the function makes no rows"
        else:
            records = read_records(file, labels[file], key)
            rows, nothing = (_read_record(at, record, data) for record in records), "the file holds no rows"
        try:
            first = next(rows, None)
        except ConfigError as error:  # of the whole file: the others are read all the same
            yield _ReadTask(at, file, mistakes=error.mistakes)
            continue
        yield first if first is not None else _ReadTask(at, file, mistakes=(Mistake(file, nothing),))
        yield from rows


def _read_function(at: int, source: str, label: str, data: DataConfig, key: str) -> Iterator[_ReadTask]:
    for index, row in enumerate(generate_rows(source, data, key)):
        place, uid = f"{source}[{index}]", f"{label}:{index}"
        if isinstance(row, Task):
            yield _ReadTask(at, place, row)
        elif isinstance(row, Mapping):
            yield _read_record(at, TaskRow(place, uid, row), data)
        else:
            problem = f"a row must be a map with named fields, or a Task; it is {type(row).__name__} {str(row)[:60]!r}"
            yield _read_record(at, TaskRow(place, uid, problem=problem), data)


def _read_record(at: int, record: TaskRow, data: DataConfig) -> _ReadTask:
    try:
        return _ReadTask(at, record.place, to_task(record, data))
    except ConfigError as error:
        return _ReadTask(at, record.place, mistakes=error.mistakes)


def _label(files: Sequence[str]) -> dict[str, str]:
    """Label of each file or function in ids: its name, or the path as given where two share a name."""
    short = {file: name_function(file) if is_function(file) else label_source(file) for file in files}
    names = list(short.values())
    return {file: name if names.count(name) == 1 else file for file, name in short.items()}
