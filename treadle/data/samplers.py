"""Task samplers: the curriculum of a run, which chooses the next training tasks by how earlier ones went.

Owns the protocol, the two samplers that come with treadle (`success_band`, `hard_replay`) and the loading of a class of
one's own (`data.sampler`). A sampler knows tasks by uid and nothing of batches, weights or schedules; `task_feed.py`
draws from it, and keeps its state for checkpoints.
Invariant: every task that a sampler chose is told of once, after its group has ended. The built-in samplers are
functions of what they were told and how often they were asked: no clock, no random numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nsmallest
from math import floor
from typing import Any, Protocol

from treadle.config.plugin import load_object
from treadle.config.root import DataConfig, HardReplayConfig, SuccessBandConfig
from treadle.data.generators import check_arguments
from treadle.errors import ConfigError, Mistake
from treadle.types import Group, Task

KEY = "data.sampler"


@dataclass(frozen=True, slots=True)
class TaskResult:
    """Result of one draw of a task."""

    uid: str
    """As in the data, however often the task was drawn."""
    success: float | None
    """Share of the scored samples with a reward of at least `reward.success_threshold`; None where none was scored."""
    reward: float | None
    """Their mean reward."""
    scored: int
    failed: int
    """Samples that an engine, a tool or a reward failed. Both are 0 where the prompt was too long to be sampled."""

    @classmethod
    def of(cls, uid: str, group: Group | None, success_threshold: float) -> "TaskResult":
        """The result of a group; None stands for a prompt that was dropped."""
        if group is None:
            return cls(uid, None, None, 0, 0)
        rewards = [item.reward.value for item in group.survivors if item.reward is not None]
        failed = len(group.trajectories) - len(group.survivors)
        if not rewards:
            return cls(uid, None, None, 0, failed)
        solved = sum(reward >= success_threshold for reward in rewards)
        return cls(uid, solved / len(rewards), sum(rewards) / len(rewards), len(rewards), failed)


class TaskSampler(Protocol):
    """Chooses training tasks. Made with all tasks, in the order of the data, and with `data.sampler_kwargs`."""

    def next(self, count: int) -> Sequence[str]:
        """The uids of the next `count` tasks; one may come several times."""
        ...

    def tell(self, results: Sequence[TaskResult]) -> None:
        """How tasks went: those of a batch, and those removed on the way to it, as they were chosen."""
        ...

    def state(self) -> Any:
        """Everything that later choices depend on, as JSON has it: lists, and maps with strings as keys."""
        ...

    def load_state(self, state: Any) -> None:
        """Go on from what `state` returned."""
        ...


class SuccessBand:
    """Tasks whose success lies within [low, high], after those that were never drawn.

    A share of the draws goes to the task that was drawn longest ago, so every task comes again. Tasks that are drawn
    and not told of yet are passed over. Where the band has too few, the nearest to it follow.
    """

    def __init__(self, tasks: Sequence[Task], settings: SuccessBandConfig) -> None:
        self._settings = settings
        self._queue = dict.fromkeys(task.uid for task in tasks)
        """The uids, drawn longest ago first; those that were never drawn are in front, in the order of the data."""
        self._success: dict[str, float | None] = {}
        """By the newest result; None where no sample of it was scored."""
        self._open: dict[str, int] = {}
        """How often a task is drawn and not told of."""
        self._count = 0

    def next(self, count: int) -> list[str]:
        if count > len(self._queue):
            return self.next(len(self._queue)) + self.next(count - len(self._queue))
        oldest = iter(sorted(self._queue, key=self._is_open))
        best = iter(nsmallest(count, self._queue, key=self._distance))
        chosen: dict[str, None] = {}
        while len(chosen) < count:
            turn = oldest if _is_turn(self._count + len(chosen), self._settings.explore) else best
            chosen[next(uid for uid in turn if uid not in chosen)] = None
        for uid in chosen:
            self._queue[uid] = self._queue.pop(uid)  # to the end
            self._open[uid] = self._open.get(uid, 0) + 1
        self._count += count
        return list(chosen)

    def tell(self, results: Sequence[TaskResult]) -> None:
        for result in results:
            self._success[result.uid] = result.success
            self._open[result.uid] -= 1
            if not self._open[result.uid]:
                del self._open[result.uid]

    def state(self) -> dict[str, Any]:
        return {
            "queue": list(self._queue),
            "success": dict(self._success),
            "open": dict(self._open),
            "count": self._count,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._queue = dict.fromkeys(state["queue"])
        self._success = dict(state["success"])
        self._open = dict(state["open"])
        self._count = state["count"]

    def _is_open(self, uid: str) -> bool:
        return uid in self._open

    def _distance(self, uid: str) -> tuple[bool, float]:
        """From the band; below 0 for a task without a result, far off for one without a score."""
        if uid not in self._success:
            return self._is_open(uid), -1.0
        success, settings = self._success[uid], self._settings
        off = 2.0 if success is None else max(0.0, settings.low - success, success - settings.high)
        return self._is_open(uid), off


class HardReplay:
    """Every task in turn, and a share of draws for those whose last result was too low, the oldest result first.

    A task whose samples all failed comes again, too: nothing was learned of it. One whose prompt is too long does not.
    """

    def __init__(self, tasks: Sequence[Task], settings: HardReplayConfig) -> None:
        self._settings = settings
        self._tasks = [task.uid for task in tasks]
        self._hard: dict[str, None] = {}
        """Tasks to come again, in that order."""
        self._index = 0
        """Of the next task in turn."""
        self._count = 0

    def next(self, count: int) -> list[str]:
        return [self._draw() for _ in range(count)]

    def tell(self, results: Sequence[TaskResult]) -> None:
        for result in results:
            self._hard.pop(result.uid, None)
            if result.failed if result.success is None else result.success < self._settings.below:
                self._hard[result.uid] = None

    def state(self) -> dict[str, Any]:
        return {"hard": list(self._hard), "index": self._index, "count": self._count}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._hard = dict.fromkeys(state["hard"])
        self._index, self._count = state["index"], state["count"]

    def _draw(self) -> str:
        self._count += 1
        if self._hard and _is_turn(self._count - 1, self._settings.share):
            uid = next(iter(self._hard))
            del self._hard[uid]
            return uid
        uid = self._tasks[self._index]
        self._index = (self._index + 1) % len(self._tasks)
        return uid


def _is_turn(number: int, share: float) -> bool:
    """Whether a draw is one of those that make up a share, spread evenly."""
    return floor((number + 1) * share) > floor(number * share)


def load_samplers(data: DataConfig, passes: Sequence[Sequence[Task]]) -> list[TaskSampler]:
    """The sampler of `data.sampler`, one for each sequence of tasks; a ConfigError where it cannot be made."""
    name = data.sampler
    assert name is not None, "asked for only where there is one"
    make: Callable[[Sequence[Task]], TaskSampler]
    if name == "success_band":
        make = partial(SuccessBand, settings=data.success_band)
    elif name == "hard_replay":
        make = partial(HardReplay, settings=data.hard_replay)
    else:
        make = _own_class(name, data)
    return [make(tasks) for tasks in passes]


def _own_class(name: str, data: DataConfig) -> Callable[[Sequence[Task]], TaskSampler]:
    found, options = load_object(name, KEY), dict(data.sampler_kwargs)
    if not callable(found):
        raise ConfigError([Mistake(KEY, f"{name} is not a class: {type(found).__name__}", name)])
    check_arguments(found, options, "data.sampler_kwargs", name, [])

    def make(tasks: Sequence[Task]) -> TaskSampler:
        try:
            made: TaskSampler = found(tasks, **options)
        except Exception as error:
            problem = f"{name} could not be made: {type(error).__name__}: {error}"
            raise ConfigError([Mistake(KEY, problem, name)]) from error
        if missing := list(_missing_methods(made)):
            problem = f"{name} has no {', '.join(missing)}"
            raise ConfigError([Mistake(KEY, problem, name, fix="docs/data.md shows a whole sampler")])
        return made

    return make


def _missing_methods(made: object) -> Iterator[str]:
    for method in ("next", "tell", "state", "load_state"):
        if not callable(getattr(made, method, None)):
            yield f"{method}()"
