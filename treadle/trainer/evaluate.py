"""Validation: the one path every schedule uses, through the same rollout as training.

Owns the validation tasks and what is counted. Samples as `rollout.val_kwargs` says; success is a reward of at least
`reward.success_threshold`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from treadle.observe import Summary, summarize
from treadle.rollout.recall import NO_PAST, Past
from treadle.rollout.service import Kind
from treadle.rollout.worker import Dropped
from treadle.types import Batch, Group, Task, Trajectory


class Rollout(Protocol):
    """A rollout as training sees it."""

    async def generate_sequences(
        self, tasks: Sequence[Task], *, kind: Kind = Kind.TRAINING, seed: int | None = None
    ) -> Batch: ...

    async def generate_group(self, task: Task, *, past: Past = NO_PAST) -> Group | Dropped:
        """One group; somebody runs `watch` meanwhile."""
        ...

    async def watch(self) -> None:
        """Go on until cancelled; raise when the rollout cannot go on."""
        ...

    async def keep(self) -> None:
        """Have what open sessions generated so far recorded."""
        ...

    async def sleep(self) -> None:
        """Give the memory of shared devices back, until the next weights."""
        ...


@dataclass(frozen=True, slots=True)
class Validation:
    """What a validation found, and every trajectory it drew."""

    step: int
    summary: Summary
    trajectories: tuple[Trajectory, ...]

    @property
    def success(self) -> float:
        """The share of tasks solved by one sample, over all data sources."""
        enough = self.summary.success_threshold
        solved = [_solved(trajectory, enough) for trajectory in self.trajectories if trajectory.outcome.ok]
        return sum(solved) / len(solved) if solved else 0.0

    def metrics(self) -> dict[str, float]:
        found = {"validation/success": self.success}
        for source in self.summary.sources:
            name = f"validation/{source.data_source}" if source.data_source else "validation"
            if source.reward_mean is not None:
                found[f"{name}/reward"] = source.reward_mean
            found.update({f"{name}/pass@{item.k}": item.value for item in source.pass_at_k})
        found["validation/failed"] = float(self.summary.num_failed)
        return found

    def transcripts(self, count: int) -> list[str]:
        """The first conversations, each as text, with what it scored."""
        return [_transcript(trajectory) for trajectory in self.trajectories[:count]]


def _transcript(trajectory: Trajectory) -> str:
    scored = "none" if trajectory.reward is None else f"{trajectory.reward.value:g}"
    lines = [f"{trajectory.uid}, {trajectory.outcome.status}, reward {scored}"]
    return "\n".join(lines + [f"{message['role']}: {message['content']}" for message in trajectory.messages])


async def validate(rollout: Rollout, tasks: Sequence[Task], step: int, success_threshold: float) -> Validation:
    """Draw every validation task once more; `step` keeps the records of different validations apart."""
    named = [replace(task, uid=f"validation-{step}/{task.uid}") for task in tasks]
    batch = await rollout.generate_sequences(named, kind=Kind.VALIDATION)
    trajectories = batch.trajectories
    return Validation(step, summarize(trajectories, success_threshold=success_threshold), trajectories)


def _solved(trajectory: Trajectory, success_threshold: float) -> bool:
    return trajectory.reward is not None and trajectory.reward.value >= success_threshold
