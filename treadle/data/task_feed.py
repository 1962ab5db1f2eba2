"""Task feed: the training tasks of a run, one draw after another, in the order of the data or as a sampler chooses.

    draw ──► open ──► end ──► tell ──► leave
    draw   the next tasks; a position counts draws, and names one for as long as the run lasts
    end    the group of a draw is scored, or was removed; its result waits
    tell   the sampler is told all results that wait, in order of their positions
    leave  the draw is trained or removed; until then its task can be found by its position, also after a resume

Owns names (a task that comes again has one of its own, so that records and noise differ), what of it a checkpoint
keeps, and the errors of a sampler. The caller says when results are told: between two batches, so that what a
synchronous run chooses does not depend on which of its sessions ended first.
Invariant: each draw is told of once, whatever ends the run in between; with the same results the same tasks follow.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from treadle.config.root import DataConfig
from treadle.data.samplers import KEY, TaskResult, TaskSampler, load_samplers
from treadle.data.task_source import SourceState, TaskSource
from treadle.errors import ConfigError, Mistake
from treadle.types import NOTHING, Group, Task

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DrawnTask:
    """A task under its name in this draw."""

    position: int
    """Draws before it."""
    task: Task
    repeat: int | None = None
    """How often a sampler chose the task before; None where none chooses."""


class TaskFeed:
    """Feed in the order of the data."""

    def __init__(self, source: TaskSource) -> None:
        self._source = source

    def __len__(self) -> int:
        """Draws in one epoch."""
        return len(self._source)

    @property
    def position(self) -> int:
        """The position of the next draw."""
        return self._source.position

    def draw(self, count: int) -> list[DrawnTask]:
        """The next `count` tasks."""
        first = self._source.position
        return [self._in_order(first + at, task) for at, task in enumerate(self._source.take(count))]

    def at(self, position: int) -> DrawnTask:
        """A draw that has not left."""
        return self._in_order(position, self._source.at(position))

    def end(self, position: int, group: Group | None) -> None:
        """The group of a draw ended; None where it was not sampled, its prompt being too long."""

    def tell(self) -> None:
        """Tell the sampler of every draw that ended."""

    def leave(self, position: int) -> None:
        """The draw is trained or removed."""

    def books(self) -> Mapping[str, Any]:
        """For the journal, where a sampler chooses: its name, how many tasks there are, how many it ever drew."""
        return NOTHING

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON has it."""
        return asdict(self._source.state())

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; a ConfigError where tasks, order or sampler are no longer those it was taken from."""
        _check_sampler(None, state)
        self._source.restore(SourceState(**state))

    def _in_order(self, position: int, task: Task) -> DrawnTask:
        return DrawnTask(position, _rename(task, position // len(self._source)))


@dataclass(frozen=True, slots=True)
class _OpenDraw:
    """A draw that has not left. Plain values only."""

    index: int
    """Of its task, in the order of the files."""
    repeat: int
    told: bool = False


class SampledFeed(TaskFeed):
    """Feed of what a sampler chooses: one sampler for all tasks, or one for each file where files have weights."""

    def __init__(
        self, source: TaskSource, samplers: Sequence[TaskSampler], name: str, *, success_threshold: float
    ) -> None:
        super().__init__(source)
        self._name = name
        self._success_threshold = success_threshold
        self._samplers = list(samplers)
        self._indices = {task.uid: index for index, task in enumerate(source.tasks)}
        self._shares = {task.uid: at for at, tasks in enumerate(source.first_passes()) for task in tasks}
        self._times = [0] * len(source)
        """How often each task was drawn."""
        self._open: dict[int, _OpenDraw] = {}
        self._waiting: dict[int, TaskResult] = {}
        """Results that the sampler is not told of yet, by position."""
        self._restore_samplers(self._sampler_states())  # a state that is of no use is found before the run

    def draw(self, count: int) -> list[DrawnTask]:
        first, shares = self._source.position, self._source.take_shares(count)
        chosen = {at: iter(self._choose(at, shares.count(at))) for at in sorted(set(shares))}
        drawn = []
        for position, share in enumerate(shares, start=first):
            index = self._indices[next(chosen[share])]
            self._open[position] = _OpenDraw(index, self._times[index])
            self._times[index] += 1
            drawn.append(self.at(position))
        return drawn

    def at(self, position: int) -> DrawnTask:
        found = self._open[position]
        return DrawnTask(position, _rename(self._source.tasks[found.index], found.repeat), found.repeat)

    def end(self, position: int, group: Group | None) -> None:
        found = self._open[position]
        if not found.told:
            uid = self._source.tasks[found.index].uid
            self._waiting[position] = TaskResult.of(uid, group, self._success_threshold)

    def tell(self) -> None:
        results = [self._waiting[position] for position in sorted(self._waiting)]
        for position in self._waiting.keys() & self._open.keys():
            self._open[position] = replace(self._open[position], told=True)
        self._waiting.clear()
        for share, sampler in enumerate(self._samplers):
            if own := [result for result in results if self._shares[result.uid] == share]:
                self._ask("tell(results)", sampler.tell, own)

    def leave(self, position: int) -> None:
        del self._open[position]

    def books(self) -> Mapping[str, Any]:
        drawn = sum(times > 0 for times in self._times)
        return {"sampler": self._name, "tasks": len(self._times), "drawn": drawn}

    def state(self) -> dict[str, Any]:
        sampler = {
            "name": self._name,
            "states": self._sampler_states(),
            "times": list(self._times),
            "open": [[position, asdict(draw)] for position, draw in self._open.items()],
            "waiting": [[position, asdict(result)] for position, result in self._waiting.items()],
        }
        return {**super().state(), "sampler": sampler}

    def restore(self, state: Mapping[str, Any]) -> None:
        _check_sampler(self._name, state)
        sampler = state["sampler"]
        self._source.restore(SourceState(**{name: value for name, value in state.items() if name != "sampler"}))
        self._times = list(sampler["times"])
        self._open = {position: _OpenDraw(**draw) for position, draw in sampler["open"]}
        self._waiting = {position: TaskResult(**result) for position, result in sampler["waiting"]}
        self._restore_samplers(sampler["states"])

    def _choose(self, share: int, count: int) -> Sequence[str]:
        """The next tasks of a sampler, checked."""
        asked = f"next({count})"
        found = self._ask(asked, self._samplers[share].next, count)
        uids = list(found) if isinstance(found, Sequence) and not isinstance(found, str) else None
        if uids is None:
            raise self._error(asked, f"must return a list of uids, it returned {type(found).__name__}")
        if len(uids) != count:
            raise self._error(asked, f"must return {count} uids, it returned {len(uids)}")
        for uid in uids:
            if not isinstance(uid, str) or self._shares.get(uid) != share:
                raise self._error(asked, f"returned {uid!r}, which is the uid of no task it was given")
        return uids

    def _sampler_states(self) -> list[Any]:
        """The state of each sampler, as it comes back from a checkpoint."""
        states = [self._ask("state()", sampler.state) for sampler in self._samplers]
        try:
            kept: list[Any] = json.loads(json.dumps(states, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise self._error("state()", f"must return what JSON can hold: {error}") from error
        if kept != states:
            raise self._error("state()", "comes back from JSON as another value: give lists, and strings as keys")
        return kept

    def _restore_samplers(self, states: Sequence[Any]) -> None:
        for sampler, state in zip(self._samplers, states, strict=True):
            self._ask("load_state(state)", sampler.load_state, state)

    def _ask(self, asked: str, method: Callable[..., T], *arguments: object) -> T:
        try:
            return method(*arguments)
        except Exception as error:
            raise self._error(asked, f"raised {type(error).__name__}: {error}") from error

    def _error(self, asked: str, problem: str) -> ConfigError:
        return ConfigError([Mistake(KEY, f"{self._name}: {asked} {problem}", self._name)])


def load_feed(source: TaskSource, data: DataConfig, *, success_threshold: float = 1.0) -> TaskFeed:
    """The feed that `data.sampler` asks for."""
    if data.sampler is None:
        return TaskFeed(source)
    samplers = load_samplers(data, source.first_passes())
    return SampledFeed(source, samplers, data.sampler, success_threshold=success_threshold)


def _rename(task: Task, repeat: int) -> Task:
    return task if repeat == 0 else replace(task, uid=f"{task.uid}@{repeat}")


def _check_sampler(name: str | None, state: Mapping[str, Any]) -> None:
    """The sampler of a checkpoint must be that of the config: neither knows what the other has drawn."""
    before = state["sampler"]["name"] if "sampler" in state else None
    if before != name:
        problem = f"the run was started with {before or 'no sampler'}, this is {name or 'none'}"
        raise ConfigError([Mistake(KEY, problem, name, fix="resume with the same sampler, or start a new run")])
