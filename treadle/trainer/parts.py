"""What a training run is put together from: its parts by protocol, wherever they live.

Owns the record that a runtime fills and a run uses. Knows no schedule, and starts nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from treadle.algorithm.kl import KLControl
from treadle.checkpoint.store import Checkpoints
from treadle.data.tasks import TaskSource
from treadle.errors import Failure, RunError
from treadle.journal import Journal
from treadle.observe.trackers import Trackers
from treadle.rollout.provenance import RunInputs
from treadle.trainer.evaluate import Rollout
from treadle.trainer.lineage import Lineage
from treadle.trainer.step import StepParts, StepReport, train_step
from treadle.types import Group, Task
from treadle.weights.push import PushReport

Push = Callable[[int], Awaitable[PushReport]]

Train = Callable[[Sequence[Group], int, KLControl | None, Sequence[float | None] | None], Awaitable[StepReport]]
"""Trains on groups, as a step, with the weight of KL and the baselines that the step needs."""


async def never() -> None:
    """Waits until cancelled."""
    await asyncio.get_running_loop().create_future()


class View(Protocol):
    """Whoever shows the run to a person."""

    def watch(self, phase: Callable[[], str]) -> None: ...

    def resume(self, step: int) -> None: ...

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def on_validation(self, step: int, success: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Validator:
    """A rollout with weights of its own: validation keeps to one version there while training goes on."""

    rollout: Rollout
    push: Push


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is put together from."""

    step: StepParts
    rollout: Rollout
    push: Push
    tasks: TaskSource
    validation_tasks: Sequence[Task]
    checkpoints: Checkpoints
    journal: Journal
    trackers: Trackers
    view: View
    lineage: Lineage
    """What earlier starts of this run left."""
    train: Train
    """One step; `train_in_thread` but where time is simulated."""
    inputs: RunInputs | None = None
    """What this start's trajectories are made from."""
    validator: Validator | None = None
    """None: validation shares the rollout's engines."""
    watch: Callable[[], Awaitable[None]] | None = None
    """Goes on until cancelled; raises when a part dies that nobody happens to call."""
    weights_wanted: Callable[[], Awaitable[None]] = never
    """Waits until an engine cannot go on without the next push."""

    @property
    def version(self) -> int:
        """The policy's."""
        return self.step.policy.version

    async def give(self, push: Push) -> PushReport:
        """Push the policy's weights. Engines that do not take them fail no trajectory: they end the run."""
        try:
            return await push(self.version)
        except Failure as failure:
            raise RunError(str(failure)) from failure


async def train_in_thread(
    parts: StepParts,
    groups: Sequence[Group],
    step: int,
    control: KLControl | None,
    baselines: Sequence[float | None] | None,
) -> StepReport:
    """A step that leaves the loop free."""
    return await asyncio.to_thread(train_step, parts, groups, step=step, control=control, baselines=baselines)
