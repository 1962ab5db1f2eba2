"""Task sources: the dataset of a run; every task once an epoch, in an order by the seed, resumable anywhere.

With `data.train_weights`, files have shares of every batch instead: an epoch has as many draws as there are tasks, and
each file gives its share of them, pass after pass through its own tasks in an order by the seed.

Owns loading, the order and the position in it, and tasks that are generated: `seeds:COUNT` for environments that write
their own prompts, `reasoning_gym:NAME`, `verifiers:NAME`, and `package.module:function` of one's own, with the
arguments of `data.source_kwargs`. Tasks are held in memory, parsed: a few hundred thousand rows fit, all mistakes are
found before anything starts, and any task can be next. Validation has seeds of its own, also for reasoning-gym, so the
same generator in `data.train_files` and `data.val_files` gives different tasks; a function is called as it is asked to
be.
Invariant: whatever mix of `take`, iteration, `state` and `restore` is called, each epoch hands out each task once, or
with weights each file's share of it; the uids of an epoch are different. The
same name, arguments and seed give the same tasks of reasoning-gym; whatever a function breaks with is a ConfigError
that names it.
"""

import re
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from inspect import signature
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from treadle.config.plugin import load_object
from treadle.config.root import DataConfig
from treadle.data.file_formats import HUB, SOURCE_FORMS, TaskRow, label_source, read_records
from treadle.data.hubs import VERIFIERS_PREFIX, list_verifiers_tasks
from treadle.data.task_files import compile_template, to_task
from treadle.errors import ConfigError, Mistake, TreadleError, nearest
from treadle.types import Task

REASONING_GYM_PREFIX = "reasoning_gym:"
SEEDS_PREFIX = "seeds:"
VALIDATION_SEED_SHIFT = 1_000_003_000

_IMPORT_PATH = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")


def is_function(source: str) -> bool:
    """Whether an entry of a file list names a function. A file of that name comes first."""
    schemes = (REASONING_GYM_PREFIX, VERIFIERS_PREFIX, HUB)
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
    options = _read_options(name, data)
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
    options = _read_options(name, data)
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


def _read_options(name: str, data: DataConfig) -> dict[str, Any]:
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
    shares: Sequence[Sequence[int]] = ()
    """Of each file its tasks and its draws in an epoch, where files have weights."""


@dataclass(frozen=True, slots=True)
class SourceShare:
    """Share of a file in every epoch: how many tasks it has, and how many are drawn of it."""

    tasks: int
    draws: int


class TaskSource:
    """Tasks in order, epoch after epoch. The position advances as tasks are handed out."""

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        shuffle: bool,
        seed: int,
        key: str = "data.train_files",
        shares: Sequence[SourceShare] = (),
    ) -> None:
        """With `shares`, the tasks are those of each file in turn, and the draws of all files are as many as tasks."""
        assert tasks, "a source needs a task"
        self._tasks = tuple(tasks)
        self._shuffle = shuffle
        self._seed = seed
        self._key = key
        self._shares = tuple(shares)
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
        return self._task(order[index])

    def take_shares(self, count: int) -> list[int]:
        """Advance by `count` draws, and say of which file each is; all 0 where files have no weights."""
        ends = list(accumulate(share.tasks for share in self._shares[:-1]))
        return [bisect(ends, self._advance() % len(self._tasks)) for _ in range(count)]

    def first_passes(self) -> list[tuple[Task, ...]]:
        """The tasks in the order in which they first come: of each file where files have weights, else all of them."""
        if not self._shares:
            return [tuple(self._tasks[at] for at in self._order_of(0))]
        firsts = accumulate((share.tasks for share in self._shares[:-1]), initial=0)
        return [tuple(self._tasks[first + index] for index in self._pass(at, 0)) for at, first in enumerate(firsts)]

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def position(self) -> int:
        """Tasks handed out since the very first."""
        return self._epoch * len(self._tasks) + self._index

    def state(self) -> SourceState:
        """The position: everything before it was handed out, nothing after it."""
        shares = [[share.tasks, share.draws] for share in self._shares]
        return SourceState(self._epoch, self._index, len(self._tasks), self._digest, self._shuffle, self._seed, shares)

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
        if [list(share) for share in state.shares] != [list(share) for share in here.shares]:
            problem = "the run was started with other shares of its files"
            mistakes.append(
                Mistake("data.train_weights", problem, fix="resume with the same weights, or start a new run")
            )
        if mistakes:
            raise ConfigError(mistakes)
        self._move(state.epoch, state.index)

    def _task(self, drawn: int) -> Task:
        """The task of an entry of an epoch's order; one that comes again in the epoch has a name of its own."""
        again, at = divmod(drawn, len(self._tasks))
        task = self._tasks[at]
        return replace(task, uid=f"{task.uid}+{again}") if again else task

    def _next(self) -> Task:
        return self._task(self._advance())

    def _advance(self) -> int:
        """The next entry of the order."""
        drawn = self._order[self._index]
        last = self._index + 1 == len(self._tasks)
        if last:
            self._move(self._epoch + 1, 0)
        else:
            self._index += 1
        return drawn

    def _move(self, epoch: int, index: int) -> None:
        self._epoch = epoch
        self._index = index
        self._order = self._order_of(epoch)

    def _order_of(self, epoch: int) -> Sequence[int]:
        """Positions of tasks; one that comes for the k-th time in the epoch has k times the number of tasks added."""
        if self._shares:
            return self._mixed_order(epoch)
        if not self._shuffle:
            return range(len(self._tasks))
        return _shuffled(len(self._tasks), f"{self._seed}/{epoch}")

    def _mixed_order(self, epoch: int) -> list[int]:
        """Each file's draws spread evenly over the epoch, so that every batch has the shares, to one task."""
        drawn: list[tuple[float, int, int]] = []
        first = 0
        for at, share in enumerate(self._shares):
            seen: Counter[int] = Counter()
            passes: dict[int, Sequence[int]] = {}
            for number in range(share.draws):
                turn, index = divmod(epoch * share.draws + number, share.tasks)
                if turn not in passes:
                    passes[turn] = self._pass(at, turn)
                task = first + passes[turn][index]
                drawn.append(((number + 0.5) / share.draws, at, task + seen[task] * len(self._tasks)))
                seen[task] += 1
            first += share.tasks
        return [position for _, _, position in sorted(drawn)]

    def _pass(self, at: int, turn: int) -> Sequence[int]:
        """The order of a file's tasks in one pass through them."""
        count = self._shares[at].tasks
        return _shuffled(count, f"{self._seed}/{at}/{turn}") if self._shuffle else range(count)


def _shuffled(count: int, seed: str) -> list[int]:
    """Uses nothing of `Random` but `random()`, whose sequence is the same on every platform and version."""
    draw = Random(seed).random
    keys = [draw() for _ in range(count)]
    return sorted(range(count), key=keys.__getitem__)


def load_training_tasks(data: DataConfig) -> TaskSource:
    """The tasks of `data.train_files`, shuffled if `data.shuffle`, with the shares of `data.train_weights`."""
    return load_tasks(data.train_files, data, data.train_max_samples, weights=data.train_weights)


def load_validation_tasks(data: DataConfig) -> TaskSource:
    """The tasks of `data.val_files`, in their own order."""
    return load_tasks(data.val_files, data, data.val_max_samples, validation=True)


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


def share_draws(files: Sequence[str], counts: Sequence[int], weights: Sequence[float]) -> list[SourceShare]:
    """How many of an epoch's draws each file has by its weight: as many in all as there are tasks. None without."""
    if not weights:
        return []
    assert len(weights) == len(files) == len(counts), "a rule of the config"
    total = sum(counts)
    exact = [total * weight / sum(weights) for weight in weights]
    draws = [int(share) for share in exact]
    for at in sorted(range(len(files)), key=lambda at: draws[at] - exact[at])[: total - sum(draws)]:
        draws[at] += 1
    key = "data.train_weights"
    mistakes = [
        Mistake(key, f"{file} has no tasks within data.train_max_samples", weight)
        if not count
        else Mistake(key, f"{file} would have less than one of the {total} draws of an epoch", weight)
        for file, count, draw, weight in zip(files, counts, draws, weights, strict=True)
        if not count or not draw
    ]
    if mistakes:
        raise ConfigError(mistakes)
    return [SourceShare(count, draw) for count, draw in zip(counts, draws, strict=True)]


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
        if file.startswith(SEEDS_PREFIX):
            seeds = generate_seeds(file, key, validation=validation)
            rows, nothing = (_ReadTask(at, task.uid, task) for task in seeds), "it makes no tasks"
        elif file.startswith(VERIFIERS_PREFIX):
            options = _read_options(file.removeprefix(VERIFIERS_PREFIX), data)
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
