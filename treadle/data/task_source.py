"""Task source: the order in which training draws tasks; every task once an epoch, in an order by the seed, resumable.

With `data.train_weights`, files have shares of every batch instead: an epoch has as many draws as there are tasks, and
each file gives its share of them, pass after pass through its own tasks in an order by the seed.

Owns the order and the position in it; refuses to know where tasks come from. Tasks are held in memory, parsed: a few
hundred thousand rows fit, and any task can be next.
Invariant: whatever mix of `take`, iteration, `state` and `restore` is called, each epoch hands out each task once, or
with weights each file's share of it; the uids of an epoch are different.
"""

from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import accumulate
from random import Random

from treadle.errors import ConfigError, Mistake
from treadle.types import Task


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
