"""Validation: the one path every schedule uses, through the same rollout as training.

Owns the validation tasks and what is counted. Samples as `rollout.val_kwargs` says; success is a reward of at least
`SUCCESS`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from treadle.observe import Summary, summarize
from treadle.rollout.service import Kind
from treadle.types import Batch, Task, Trajectory

SUCCESS = 1.0
"""Reward from which a trajectory counts as solved."""


class Rollout(Protocol):
    """A rollout as training sees it."""

    async def generate_sequences(
        self, tasks: Sequence[Task], *, kind: Kind = Kind.TRAINING, seed: int | None = None
    ) -> Batch: ...


@dataclass(frozen=True, slots=True)
class Validation:
    """What a validation found, and every trajectory it drew."""

    step: int
    summary: Summary
    trajectories: tuple[Trajectory, ...]

    @property
    def success(self) -> float:
        """The share of tasks solved by one sample, over all data sources."""
        solved = [_solved(trajectory) for trajectory in self.trajectories if trajectory.outcome.ok]
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


async def validate(rollout: Rollout, tasks: Sequence[Task], step: int) -> Validation:
    """Draw every validation task once more; `step` keeps the records of different validations apart."""
    named = [replace(task, uid=f"validation-{step}/{task.uid}") for task in tasks]
    batch = await rollout.generate_sequences(named, kind=Kind.VALIDATION)
    trajectories = batch.trajectories
    return Validation(step, summarize(trajectories, success_threshold=SUCCESS), trajectories)


def _solved(trajectory: Trajectory) -> bool:
    return trajectory.reward is not None and trajectory.reward.value >= SUCCESS
