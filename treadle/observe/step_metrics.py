"""Step metrics: named spans of a step's time, and figures of its batch of trajectories, for trackers and the live view.

Owns the names and the arithmetic. Reads records alone: no tensors, no config. Survivors count in rewards, turns, tools
and seconds; failed trajectories count as failed and nowhere else. A span inside another counts in both.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite

from treadle.observe.gateway_totals import describe_gateway
from treadle.types import Group, Status, ToolStatus, Trajectory

Interval = tuple[str, float, float]
"""A name, and when it began and ended, in seconds since the epoch."""


class Spans:
    """Spans since the last `take`. A span inside another counts in both."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._epoch = time.time() - clock()
        self._intervals: list[Interval] = []
        self.current = ""
        """The span that is open, for views of what a run is doing."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time of a `with` block under `name`."""
        outer, self.current = self.current, name
        try:
            with self.beside(name):
                yield
        finally:
            self.current = outer

    @contextmanager
    def beside(self, name: str) -> Iterator[None]:
        """Seconds of work that goes on beside the step's own."""
        began = self._clock()
        try:
            yield
        finally:
            self._intervals.append((name, self._epoch + began, self._epoch + self._clock()))

    def take(self) -> tuple[Interval, ...]:
        """The spans that ended, in order of ending; the next call starts empty."""
        taken, self._intervals = tuple(self._intervals), []
        return taken


def add_up(intervals: tuple[Interval, ...]) -> dict[str, float]:
    """Seconds by name."""
    seconds: dict[str, float] = {}
    for name, began, ended in intervals:
        seconds[name] = seconds.get(name, 0.0) + ended - began
    return seconds


STAGES = ("queue", "generate", "tool", "score")


def describe_batch(groups: Sequence[Group]) -> dict[str, float]:
    """Every figure of a batch; those of a part that no trajectory has are left out."""
    drawn = [trajectory for group in groups for trajectory in group.trajectories]
    survivors = [trajectory for trajectory in drawn if trajectory.outcome.ok]
    if not drawn:
        return {}
    return {
        **_failures(drawn),
        **(_ends(survivors) if survivors else {}),
        **_rewards(survivors),
        **(_turns(survivors) if survivors else {}),
        **_seconds(survivors),
        **describe_gateway(survivors),
    }


def _failures(drawn: Sequence[Trajectory]) -> dict[str, float]:
    counts = Counter(trajectory.outcome.boundary for trajectory in drawn)
    return {f"failed/{boundary}": float(count) for boundary, count in counts.items() if boundary is not None}


def _ends(survivors: Sequence[Trajectory]) -> dict[str, float]:
    """How survivors ended, as shares of them."""
    count = len(survivors)
    reasons = Counter(str(trajectory.outcome.reason) for trajectory in survivors)
    truncated = sum(trajectory.outcome.status is Status.TRUNCATED for trajectory in survivors)
    compared = [float(trajectory.extra["drift"]) for trajectory in survivors if "drift" in trajectory.extra]
    return {
        **{f"stop/{reason}": number / count for reason, number in sorted(reasons.items())},
        "rollout/truncated": truncated / count,
        "rollout/forks": sum(trajectory.num_rows - 1 for trajectory in survivors) / count,
        **({"rollout/drift": sum(compared) / len(compared)} if compared else {}),
    }


def _rewards(survivors: Sequence[Trajectory]) -> dict[str, float]:
    """Means by part of the reward, by data source, and of every number that reward functions reported."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in survivors:
        if trajectory.reward is None:
            continue
        for name, value in trajectory.reward.parts.items():
            values[f"reward/part/{name}"].append(value)
        if trajectory.data_source:
            values[f"reward/source/{trajectory.data_source}"].append(trajectory.reward.value)
        for name, value in _numbers(trajectory.reward.extra):
            values[f"reward/extra/{name}"].append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def _numbers(extra: Mapping[str, object]) -> Iterable[tuple[str, float]]:
    """The numbers of a score's extra, those of a function's own map with its name before; truth values are 0 or 1."""
    for name, value in extra.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{inner}", number) for inner, number in _numbers(value))
        elif isinstance(value, bool | int | float) and isfinite(value):
            yield name, float(value)


def _turns(survivors: Sequence[Trajectory]) -> dict[str, float]:
    """Turns and tool calls of a trajectory, and how many of the calls went wrong."""
    count = len(survivors)
    turns = [trajectory.num_turns for trajectory in survivors]
    results = [result for item in survivors for row in item.rows for turn in row.turns for result in turn.results]
    statuses = Counter(result.status for result in results)
    figures = {
        "rollout/turns/mean": sum(turns) / count,
        "rollout/turns/max": float(max(turns)),
        "tools/calls": len(results) / count,
    }
    if results:
        figures["tools/errors"] = statuses[ToolStatus.ERROR] / len(results)
        figures["tools/timeouts"] = statuses[ToolStatus.TIMEOUT] / len(results)
        figures["tools/invalid"] = statuses[ToolStatus.INVALID] / len(results)
    return figures


def _seconds(survivors: Sequence[Trajectory]) -> dict[str, float]:
    """Seconds of a trajectory in each stage, over those that spent any there."""
    figures: dict[str, float] = {}
    for stage in STAGES:
        spent = [getattr(trajectory.timing, f"{stage}_s") for trajectory in survivors]
        if spent := [seconds for seconds in spent if seconds > 0]:
            figures[f"session/{stage}_s/mean"] = sum(spent) / len(spent)
            figures[f"session/{stage}_s/max"] = max(spent)
    return figures
