"""Batch metrics: what the trajectories of a training step were like, as figures for trackers and the live view.

Owns the names and the arithmetic. Reads records alone: no tensors, no config. Survivors count in rewards, turns, tools
and seconds; failed trajectories count as failed and nowhere else.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite

from treadle.types import Group, Status, ToolStatus, Trajectory

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
