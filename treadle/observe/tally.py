"""Counts of a running rollout, kept as trajectories start and finish.

Owns the numbers a progress view shows. No terminal, no torch, no clock of its own: virtual time works.
Invariant: constant work for each trajectory beside counting its tokens. One thread writes; any thread may read, and
sees numbers that are at most one trajectory apart.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from treadle.errors import Boundary
from treadle.types import Outcome, Score, Status, StopReason, Timing


class Finished(Protocol):
    """What is counted of a trajectory; the record itself and its headline in the journal both have it."""

    @property
    def uid(self) -> str: ...
    @property
    def sample(self) -> int: ...
    @property
    def data_source(self) -> str: ...
    @property
    def outcome(self) -> Outcome: ...
    @property
    def reward(self) -> Score | None: ...
    @property
    def timing(self) -> Timing: ...
    @property
    def num_sampled(self) -> int: ...
    @property
    def num_rows(self) -> int: ...


@dataclass(slots=True)
class Stage:
    """Time spent in one stage, over the trajectories that spent any there: generate, tool or score."""

    count: int = 0
    total_s: float = 0.0
    max_s: float = 0.0
    slowest: str = ""
    """`uid/sample` of the trajectory that took longest."""

    @property
    def mean_s(self) -> float:
        return self.total_s / self.count if self.count else 0.0

    def add(self, seconds: float, finished: Finished) -> None:
        if seconds <= 0.0:
            return
        self.count += 1
        self.total_s += seconds
        if seconds > self.max_s:
            self.max_s = seconds
            self.slowest = f"{finished.uid}/{finished.sample}"


class Rate:
    """Amounts per second over a sliding window, in a fixed number of slots."""

    def __init__(self, clock: Callable[[], float], window_s: float = 30.0, num_slots: int = 30) -> None:
        self._clock = clock
        self._slot_s = window_s / num_slots
        self._num_slots = num_slots
        self._slots: deque[tuple[int, int]] = deque()
        self._began = clock()

    def add(self, amount: int) -> None:
        slot = int(self._clock() / self._slot_s)
        if self._slots and self._slots[-1][0] == slot:
            amount += self._slots.pop()[1]
        self._slots.append((slot, amount))
        self._expire(slot)

    def per_second(self) -> float:
        """Over the window, or over the time since the start while that is shorter."""
        now = self._clock()
        oldest = int(now / self._slot_s) - self._num_slots
        inside = sum(amount for slot, amount in self._slots.copy() if slot > oldest)
        elapsed = min(now - self._began, self._num_slots * self._slot_s)
        return inside / max(elapsed, self._slot_s)

    def _expire(self, slot: int) -> None:
        while self._slots[0][0] <= slot - self._num_slots:
            self._slots.popleft()


@dataclass(slots=True)
class Tally:
    """The numbers of a rollout so far."""

    clock: Callable[[], float] = time.monotonic
    running: int = 0
    done: int = 0
    """Trajectories that have ended, failed ones included; retried attempts are not."""
    dropped: int = 0
    retried: int = 0
    tokens: int = 0
    scored: int = 0
    reward_sum: float = 0.0
    failed: dict[Boundary, int] = field(default_factory=dict)
    truncated: dict[StopReason, int] = field(default_factory=dict)
    generate: Stage = field(default_factory=Stage)
    tool: Stage = field(default_factory=Stage)
    score: Stage = field(default_factory=Stage)
    _rate: Rate = field(init=False)

    def __post_init__(self) -> None:
        self._rate = Rate(self.clock)

    def start(self) -> None:
        """A trajectory has started."""
        self.running += 1

    def retry(self, finished: Finished) -> None:
        """An attempt has failed and another one of the same trajectory follows: it goes on running."""
        self.retried += 1
        self._count_tokens(finished)

    def drop(self) -> None:
        """A trajectory that was started is not run after all, as its prompt is too long."""
        self.running -= 1
        self.dropped += 1

    def finish(self, finished: Finished) -> None:
        """A trajectory that was started has ended."""
        self.running -= 1
        self.recall(finished)
        self._count_tokens(finished)

    def recall(self, finished: Finished) -> None:
        """A trajectory of an earlier start of this run: it is done, and says nothing about the speed of this one."""
        self.done += 1
        self._count_end(finished.outcome)
        if finished.reward is not None and finished.outcome.ok:
            self.scored += 1
            self.reward_sum += finished.reward.value
        timing = finished.timing
        self.generate.add(timing.generate_s, finished)
        self.tool.add(timing.tool_s, finished)
        self.score.add(timing.score_s, finished)

    @property
    def mean_reward(self) -> float | None:
        """Over what was scored; None before the first."""
        return self.reward_sum / self.scored if self.scored else None

    @property
    def num_failed(self) -> int:
        return sum(self.failed.copy().values())

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens of finished trajectories over the last half minute."""
        return self._rate.per_second()

    def _count_end(self, outcome: Outcome) -> None:
        if outcome.status is Status.TRUNCATED:
            self.truncated[outcome.reason] = self.truncated.get(outcome.reason, 0) + 1
        elif outcome.boundary is not None:
            self.failed[outcome.boundary] = self.failed.get(outcome.boundary, 0) + 1

    def _count_tokens(self, finished: Finished) -> None:
        num_sampled = finished.num_sampled
        self.tokens += num_sampled
        self._rate.add(num_sampled)
