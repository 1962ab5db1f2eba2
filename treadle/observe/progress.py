"""Live progress of a rollout: counters kept as trajectories start and finish, and a view of them.

Owns the numbers, when they are shown and the plain words for them: live on a terminal (`rich_output` draws), a plain
line every few seconds anywhere else. Counters have no clock of their own: virtual time works.
Invariant: constant work for each trajectory beside counting its tokens. One thread writes; any thread may read, and
sees numbers that are at most one trajectory apart. A view never ends a rollout: when its stream is closed, full or
stuck, it falls silent.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self, TextIO

from treadle.errors import Boundary
from treadle.terminal import in_notebook, say
from treadle.types import Outcome, Score, Status, StopReason, Timing


class FinishedTrajectory(Protocol):
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
class StageTime:
    """Time spent in one stage, over the trajectories that spent any there: generate, tool or score."""

    count: int = 0
    total_s: float = 0.0
    max_s: float = 0.0
    slowest: str = ""
    """`uid/sample` of the trajectory that took longest."""

    @property
    def mean_s(self) -> float:
        return self.total_s / self.count if self.count else 0.0

    def add(self, seconds: float, finished: FinishedTrajectory) -> None:
        if seconds <= 0.0:
            return
        self.count += 1
        self.total_s += seconds
        if seconds > self.max_s:
            self.max_s = seconds
            self.slowest = f"{finished.uid}/{finished.sample}"


class SlidingRate:
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
class RolloutCounters:
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
    generate: StageTime = field(default_factory=StageTime)
    tool: StageTime = field(default_factory=StageTime)
    score: StageTime = field(default_factory=StageTime)
    _rate: SlidingRate = field(init=False)

    def __post_init__(self) -> None:
        self._rate = SlidingRate(self.clock)

    def start(self) -> None:
        """A trajectory has started."""
        self.running += 1

    def retry(self, finished: FinishedTrajectory) -> None:
        """An attempt has failed and another one of the same trajectory follows: it goes on running."""
        self.retried += 1
        self._count_tokens(finished)

    def drop(self) -> None:
        """A trajectory that was started is not run after all, as its prompt is too long."""
        self.running -= 1
        self.dropped += 1

    def finish(self, finished: FinishedTrajectory) -> None:
        """A trajectory that was started has ended."""
        self.running -= 1
        self.add_finished(finished)
        self._count_tokens(finished)

    def add_finished(self, finished: FinishedTrajectory) -> None:
        """A trajectory of an earlier start of this run: it is done, and does not count for the speed of this one."""
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

    def _count_tokens(self, finished: FinishedTrajectory) -> None:
        num_sampled = finished.num_sampled
        self.tokens += num_sampled
        self._rate.add(num_sampled)


_EXIT_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """State of one replica, in one word."""

    name: str
    state: str
    running: int = 0


@dataclass(frozen=True, slots=True)
class ProgressView:
    """What there is to show at one moment."""

    done: int
    total: int | None
    running: int
    line: str
    replicas: tuple[ReplicaStatus, ...] = ()


class ProgressScreen(Protocol):
    """Output for a view. Raises OSError or ValueError when the stream is gone."""

    def show(self, view: ProgressView) -> None: ...

    def close(self) -> None: ...


class PlainScreen:
    """One line for each view."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, view: ProgressView) -> None:
        busy = ", ".join(f"{replica.name} {replica.state}" for replica in view.replicas if replica.state != "ready")
        say(f"{view.line}, {busy}" if busy else view.line, file=self._stream)

    def close(self) -> None:
        """Nothing to put back."""


class LiveProgress:
    """Live view of counters while its `with` block runs, from a thread of its own."""

    def __init__(
        self,
        counters: RolloutCounters,
        *,
        total: int | None = None,
        replicas: Callable[[], Sequence[ReplicaStatus]] | None = None,
        stream: TextIO | None = None,
        interval_s: float = 0.25,
        plain_interval_s: float = 5.0,
    ) -> None:
        self._tally = counters
        self._total = total
        self._replicas = replicas
        self._stream = stream or sys.stdout
        self._interval_s = interval_s
        self._plain_interval_s = plain_interval_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="treadle-progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Show the last numbers. A stream that is not read is abandoned after a moment."""
        self._over.set()
        self._thread.join(_EXIT_TIMEOUT_S)

    def view(self) -> ProgressView:
        """The current numbers."""
        counters = self._tally
        replicas = () if self._replicas is None else tuple(self._replicas())
        return ProgressView(counters.done, self._total, counters.running, describe(counters, self._total), replicas)

    def _run(self) -> None:
        try:
            screen, interval_s = self._choose()
            try:
                while not self._over.wait(interval_s):
                    screen.show(self.view())
                screen.show(self.view())
            finally:
                screen.close()
        except (OSError, ValueError):
            return  # the stream is gone, and with it the viewer

    def _choose(self) -> tuple[ProgressScreen, float]:
        if in_notebook():
            from treadle.observe.rich_output import NotebookScreen

            return NotebookScreen(), self._interval_s
        if not self._stream.isatty():
            return PlainScreen(self._stream), self._plain_interval_s
        from treadle.observe.rich_output import TerminalScreen  # rich is slow to import, and needed here only

        terminal = TerminalScreen.open(self._stream)
        if terminal is None:
            return PlainScreen(self._stream), self._plain_interval_s
        return terminal, self._interval_s


def describe(counters: RolloutCounters, total: int | None = None) -> str:
    """The numbers so far in one line of plain characters."""
    parts = [
        f"{counters.done}/{total} done" if total is not None else f"{counters.done} done",
        f"{counters.running} running",
    ]
    if counters.failed:
        boundaries = ", ".join(f"{boundary} {count}" for boundary, count in sorted(counters.failed.copy().items()))
        parts.append(f"{counters.num_failed} failed ({boundaries})")
    if counters.truncated:
        parts.append(f"{sum(counters.truncated.copy().values())} truncated")
    if counters.retried:
        parts.append(f"{counters.retried} retried")
    if counters.dropped:
        parts.append(f"{counters.dropped} dropped")
    parts.append(f"{counters.tokens_per_s:,.0f} tokens/s")
    if counters.mean_reward is not None:
        parts.append(f"reward {counters.mean_reward:.4g}")
    return ", ".join(parts)
