"""Rollout buffer with admission control and back-pressure: groups from tasks to training, bounded in staleness.

tasks ──admit──► open: being sampled ──► ready ──take──► a training step
                   │          ▲
                   │          └── begun again: too old, where `trainer.stale_samples` is drop
                   └──► removed: no signal, too few survivors, prompt dropped; the next task takes the place
admission  waits for `allow`: a batch may begin once the engines' weights are near enough to those it will train
take       waits for the groups that would be too old for the next batch, and until there are enough for this one
Nothing polls: `allow` and every removal admit, every group that ends wakes `take`. `allow` bounds what is open (that is
the back-pressure on the rollout). Open groups are counted by the version of their tokens as they come, end and leave,
so that choosing a batch costs as much as there are versions among them, not groups.
A sampler of tasks is told how they went when a batch is taken, and not between: what it chooses for a batch does not
depend on the order in which groups end, where every batch is sampled alone.
Invariant: every task is admitted in the order of its feed and leaves once, trained or removed; and no token is taken
that is more than `max_staleness` policy versions old.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from treadle.aio import is_external_stop
from treadle.config import FailureConfig, FilterGroupsConfig, TrainConfig
from treadle.config.plan import staleness_bound
from treadle.data.task_feed import DrawnTask, TaskFeed
from treadle.errors import DeadlineError, RunError
from treadle.journal import Journal
from treadle.rollout.completion_log import NOTHING_RECOVERED, RecoveredTask
from treadle.rollout.protocol import Dropped
from treadle.trainer.step import is_informative
from treadle.types import NOTHING, Group, Task, Trajectory


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """Bounds of a rollout buffer."""

    batch_size: int
    """Groups of one training step."""
    max_staleness: int
    """Policy versions a token may be behind the weights it trains."""
    drop_stale: bool
    """Whether groups that would become too old are begun again instead of waited for."""
    group_timeout_s: float
    """How long a step waits for any group to end."""

    @classmethod
    def of(cls, config: TrainConfig) -> "BufferLimits":
        limits, failures, trainer = config.rollout.limits, config.rollout.failures, config.trainer
        return cls(
            batch_size=config.data.train_batch_size,
            max_staleness=staleness_bound(config),
            drop_stale=trainer.mode == "fully_async" and trainer.stale_samples == "drop",
            group_timeout_s=2 * (failures.session_retries + 1) * limits.session_timeout_s + limits.request_timeout_s,
        )


@dataclass(slots=True, eq=False)
class OpenGroup:
    """A group that was admitted, and has not left."""

    position: int
    """Of its task, counted from the very first."""
    task: Task
    version: int
    """No token of it is older."""
    since: float
    attempt: int = 0
    repeat: int | None = None
    """How often a sampler chose its task before; None where none chooses."""
    group: Group | None = None
    """Once it is ready."""
    work: asyncio.Task[None] | None = field(default=None, repr=False)


class OpenGroups:
    """Open groups by position, counted by version. Every change of a version or of readiness goes through here."""

    def __init__(self) -> None:
        self._items: dict[int, OpenGroup] = {}
        """By position, in order of admission."""
        self._open: Counter[int] = Counter()
        """How many there are of each version, ready or not; a version that has none is not in it."""
        self._ready: Counter[int] = Counter()
        """How many of them are ready."""

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[OpenGroup]:
        return iter(self._items.values())

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(self._items)

    def add(self, item: OpenGroup) -> None:
        """Add a group whose sampling begins."""
        self._items[item.position] = item
        self._open[item.version] += 1

    def end(self, item: OpenGroup, group: Group, version: int) -> None:
        """Mark a group as ready; `version` sampled its oldest token."""
        self._open -= Counter((item.version,))  # drops versions at 0
        item.group, item.version = group, version
        self._open[version] += 1
        self._ready[version] += 1

    def remove(self, item: OpenGroup) -> None:
        """Remove a group that is trained or not used."""
        del self._items[item.position]
        self._open -= Counter((item.version,))
        if item.group is not None:
            self._ready -= Counter((item.version,))

    def count_until(self, version: int) -> int:
        """How many may have tokens of this version, or older."""
        return sum(count for at, count in self._open.items() if at <= version)

    def choose(self, size: int, min_version: int | None) -> list[OpenGroup] | None:
        """The oldest groups that are ready, in order of admission; None while there are too few, or too young ones.

        Too young: a later batch would then have more groups at their bound than it has places. `min_version` is the
        oldest version that may train now; None where nothing is waited for.
        """
        if self._ready.total() < size or (min_version is not None and self._leaves_too_many(size, min_version)):
            return None
        places = self._places(size)
        chosen: list[OpenGroup] = []
        for item in self:
            if item.group is not None and places[item.version] > 0:
                places[item.version] -= 1
                chosen.append(item)
        return chosen

    def _places(self, size: int) -> Counter[int]:
        """How many groups of each version make up a batch of the oldest."""
        places: Counter[int] = Counter()
        for version in sorted(self._ready):
            places[version] = min(self._ready[version], size - places.total())
        return places

    def _leaves_too_many(self, size: int, min_version: int) -> bool:
        """With v versions to go until some groups are at their bound, v batches can take them; this one, the rest."""
        open_ = ready = 0
        for version in sorted(self._open):
            open_ += self._open[version]
            ready += self._ready[version]
            if open_ - (version - min_version) * size > min(ready, size):
                return True
        return False


RecoverTask = Callable[[Task, int], RecoveredTask]
"""What an earlier start of a run left of a task, with no token older than a version."""


class GroupSampler(Protocol):
    """The rollout, as far as the buffer uses it: samples one task."""

    async def generate_group(self, task: Task, *, past: RecoveredTask = NOTHING_RECOVERED) -> Group | Dropped: ...


@dataclass(frozen=True, slots=True)
class BufferedBatch:
    """A batch, oldest admission first, and where in the data its tasks were."""

    groups: tuple[Group, ...]
    positions: tuple[int, ...]
    removed: Mapping[str, int] = NOTHING
    """Groups that were removed on the way to it, by reason."""
    sampler: Mapping[str, float] = NOTHING
    """Metrics of how its tasks were chosen, where a sampler chooses."""


class RolloutBuffer:
    """Rollout buffer (see the module). Runs on the event loop of the schedule, in the task group passed to `start`."""

    def __init__(
        self,
        sampler: GroupSampler,
        tasks: TaskFeed,
        journal: Journal,
        limits: BufferLimits,
        *,
        filter_groups: FilterGroupsConfig,
        failures: FailureConfig,
    ) -> None:
        self._sampler = sampler
        self._tasks = tasks
        self._journal = journal
        self._limits = limits
        self._filter_groups = filter_groups
        self._failures = failures
        self._open = OpenGroups()
        self._training: tuple[int, ...] = ()
        """Positions that were taken, until their step is done."""
        self._returned: deque[int] = deque()
        """Positions that an earlier start of the run admitted and left open."""
        self._recover: RecoverTask = lambda task, oldest: NOTHING_RECOVERED
        self._work: asyncio.TaskGroup | None = None
        self._allowed = 0
        self._taken = 0
        self._removed: Counter[str] = Counter()
        self._last_failure = ""
        self._version = 0
        self._usable = 0
        """The oldest version that the next batch may train."""
        self._changed = asyncio.Event()

    def restore(self, batches: int, positions: Sequence[int], recover: RecoverTask) -> None:
        """Go on after `batches` taken batches, first with the tasks at `positions`, and with what `recover` finds."""
        self._taken = batches * self._limits.batch_size
        self._returned = deque(positions)
        self._recover = recover

    def start(self, work: asyncio.TaskGroup, version: int) -> None:
        """Begin; groups are sampled as tasks of `work`, with weights of `version` at first."""
        self._work = work
        self._version = version
        self._usable = version - self._limits.max_staleness

    def stop(self) -> None:
        """Sample nothing more; what is open stays known, for a checkpoint."""
        self._work = None
        for item in self._open:
            if item.work is not None:
                item.work.cancel()

    @property
    def open_positions(self) -> tuple[int, ...]:
        """Where the tasks are that were admitted and have not been trained or removed."""
        return (*self._training, *self._open.positions, *self._returned)

    def frontier(self) -> dict[str, Any]:
        """Where admission stands in the data: every task before it was admitted."""
        return self._tasks.state()

    @property
    def is_sampling(self) -> bool:
        """Whether a group is under way."""
        return self._work is not None and any(item.group is None for item in self._open)

    def allow(self, batches: int) -> None:
        """Admit tasks up to the end of this many batches, counted from the start of the run."""
        self._allowed = max(self._allowed, batches * self._limits.batch_size)
        self._admit()

    def advance(self, version: int) -> None:
        """The engines have weights of `version`: groups admitted from now on have no older token."""
        self._version = version

    async def take(self, version: int) -> BufferedBatch:
        """The next batch, to train weights of `version`."""
        min_version = version - self._limits.max_staleness
        if self._limits.drop_stale:
            self._begin_again(min_version)
        size, bound = self._limits.batch_size, None if self._limits.drop_stale else min_version
        while (chosen := self._open.choose(size, bound)) is None:
            await self._change()
        for item in chosen:
            self._open.remove(item)
            self._tasks.end(item.position, item.group)
        self._tasks.tell()
        self._taken += len(chosen)
        self._training = tuple(item.position for item in chosen)
        self._usable = min_version + 1
        removed = dict(self._removed)
        self._removed.clear()
        groups = tuple(item.group for item in chosen if item.group is not None)
        _check_staleness(groups, min_version)
        return BufferedBatch(groups, self._training, removed, self._describe_choice(chosen))

    def _describe_choice(self, chosen: Sequence[OpenGroup]) -> Mapping[str, float]:
        """How many of these tasks a sampler had chosen before, and how many of all tasks it ever chose, as shares."""
        if not (books := self._tasks.books()):
            return NOTHING
        repeated = sum(bool(item.repeat) for item in chosen) / len(chosen)
        coverage = books["drawn"] / books["tasks"]
        return {"sampler/new": 1 - repeated, "sampler/repeated": repeated, "sampler/coverage": coverage}

    def settle(self) -> None:
        """The batch that was taken has been trained: only now have its tasks left."""
        for position in self._training:
            self._tasks.leave(position)
        self._training = ()

    async def _change(self) -> None:
        """Wait until a group ends; not for longer than any group may take."""
        self._changed.clear()
        try:
            async with asyncio.timeout(self._limits.group_timeout_s):
                await self._changed.wait()
        except TimeoutError:
            raise DeadlineError(
                f"no group ended within {self._limits.group_timeout_s:g} s; training waits for {self._describe_open()}"
            ) from None

    def _describe_open(self) -> str:
        now = asyncio.get_running_loop().time()
        open_ = [item for item in self._open if item.group is None]
        shown = ", ".join(f"{item.task.uid} ({now - item.since:.0f} s, version {item.version})" for item in open_[:5])
        return f"{len(open_)} groups: {shown}" if open_ else "groups, but none is being sampled"

    def _admit(self) -> None:
        while self._work is not None and (places := self._allowed - self._taken - len(self._open)) > 0:
            returned = [self._tasks.at(self._returned.popleft())] if self._returned else []
            for drawn in returned or self._tasks.draw(places):
                self._journal.add_task(drawn.task)
                past = self._recover(drawn.task, self._oldest())
                item = self._open_group(drawn, past)
                item.work = self._work.create_task(self._sample(item, past))

    def _oldest(self) -> int:
        """The oldest version that one more group may have: of older ones the batches to come have no place left.

        Matters after a resume alone, where groups may begin with tokens of an earlier start.
        """
        oldest, size = self._version, self._limits.batch_size
        while oldest > self._usable and self._open.count_until(oldest - 1) < (oldest - self._usable) * size:
            oldest -= 1
        return oldest

    def _open_group(self, drawn: DrawnTask, past: RecoveredTask) -> OpenGroup:
        oldest = min((_oldest_version(item, self._version) for item in past.finished), default=self._version)
        oldest = min((oldest, *(version for part in past.parts for version in part.completion.versions)))
        since = asyncio.get_running_loop().time()
        item = OpenGroup(drawn.position, drawn.task, oldest, since, past.attempt, drawn.repeat)
        self._open.add(item)
        self._journal.add_event(
            "admit",
            position=item.position,
            uid=item.task.uid,
            repeat=item.repeat,
            version=item.version,
            finished=len(past.finished),
            continued=len({part.sample for part in past.parts}),
        )
        return item

    async def _sample(self, item: OpenGroup, past: RecoveredTask) -> None:
        try:
            result = await self._sampler.generate_group(item.task, past=past)
        except asyncio.CancelledError as error:
            if is_external_stop(error):
                raise
            raise RunError(f"sampling {item.task.uid} was cancelled, and not by this run") from error
        reason = self._refusal(result)
        if reason is None:
            assert isinstance(result, Group)
            version = min(_oldest_version(trajectory, item.version) for trajectory in result.survivors)
            self._open.end(item, result, version)
        else:
            self._tasks.end(item.position, result if isinstance(result, Group) else None)
            self._remove(item, reason)
        self._changed.set()

    def _refusal(self, result: Group | Dropped) -> str | None:
        """Why a group cannot train, if it cannot."""
        if isinstance(result, Dropped):
            return "prompt dropped"
        if len(result.survivors) < max(1, self._failures.min_group_size):
            failed = [trajectory.outcome for trajectory in result.trajectories if not trajectory.outcome.ok]
            self._last_failure = f"; the last failure: {failed[-1].detail}" if failed else ""
            return "too few survivors"
        return None if is_informative(result, self._filter_groups) else "no signal"

    def _remove(self, item: OpenGroup, reason: str) -> None:
        """Give the place of a group to the next task; no more often than the config allows for one step."""
        self._open.remove(item)
        self._tasks.leave(item.position)
        self._removed[reason] += 1
        self._journal.add_event("remove", position=item.position, uid=item.task.uid, reason=reason)
        limit = (self._filter_groups.max_num_gen_batches - 1) * self._limits.batch_size
        if self._removed.total() > limit:
            reasons = ", ".join(f"{count} × {why}" for why, count in self._removed.most_common())
            raise RunError(
                f"{self._removed.total()} groups were removed for one training step of {self._limits.batch_size}, more "
                f"than algorithm.filter_groups.max_num_gen_batches = {self._filter_groups.max_num_gen_batches} allows: "
                f"{reasons}{self._last_failure}"
            )
        self._admit()

    def _begin_again(self, min_version: int) -> None:
        """Start over what has tokens, or may have, that the next batch could not train."""
        assert self._work is not None, "batches are taken between start and stop"
        for item in [item for item in self._open if item.version < min_version]:
            if item.work is not None:
                item.work.cancel()
            self._open.remove(item)
            self._journal.add_event("stale", position=item.position, uid=item.task.uid, version=item.version)
            attempts = 2 * (self._failures.session_retries + 1)  # that the group may have used, drawn twice
            past = RecoveredTask(attempt=item.attempt + attempts)
            again = self._open_group(DrawnTask(item.position, item.task, item.repeat), past)
            again.work = self._work.create_task(self._sample(again, past))


def _oldest_version(trajectory: Trajectory, default: int) -> int:
    """The oldest policy version that sampled a token of it."""
    return min((version for row in trajectory.rows for version in row.versions if version >= 0), default=default)


def _check_staleness(groups: Sequence[Group], oldest: int) -> None:
    """The bound that everything above is for."""
    for group in groups:
        for trajectory in group.survivors:
            version = _oldest_version(trajectory, oldest)
            if version < oldest:
                raise RunError(
                    f"{trajectory.uid}/{trajectory.sample} has tokens of version {version}; {oldest} is the oldest "
                    "that trainer.max_staleness lets train"
                )
