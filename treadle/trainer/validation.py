"""Validation: one path for every schedule, through a rollout like training's; one validation at a time.

Samples as `rollout.val_kwargs` says; success is a reward of at least `reward.success_threshold`.
alone    `sync`, and before and after training: training waits until every validation task is done
own      the step pushes its weights to the validator's engines, and goes on; the next validation waits for this one
shared   it begins when the rollout's engines have the weights, and sampling and training go on; the next push waits for
         its end, so that one version is validated. An engine that was restarted and waits for that push ends it: it
         begins once more after the push, with the weights of that one
Invariant: every token of a validation is sampled with the weights of the step it is recorded under.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from treadle.config.reward import RewardConfig
from treadle.observe import Summary, summarize
from treadle.observe.step_metrics import Spans
from treadle.rollout.completion_log import NOTHING_RECOVERED, RecoveredTask
from treadle.rollout.protocol import Dropped
from treadle.rollout.service import RolloutKind
from treadle.types import Batch, Group, Task, Trajectory

if TYPE_CHECKING:
    from treadle.trainer.parts import StopRequest, TrainerParts
    from treadle.trainer.recorder import RunRecorder


class Rollout(Protocol):
    """Rollout, as far as the trainer uses it."""

    async def generate_sequences(
        self, tasks: Sequence[Task], *, kind: RolloutKind = RolloutKind.TRAINING, seed: int | None = None
    ) -> Batch: ...

    async def generate_group(self, task: Task, *, past: RecoveredTask = NOTHING_RECOVERED) -> Group | Dropped:
        """Sample one group; `watch` must run at the same time."""
        ...

    async def watch(self) -> None:
        """Run until cancelled; raise when the rollout cannot continue."""
        ...

    async def keep(self) -> None:
        """Record what open sessions have generated so far."""
        ...

    async def sleep(self) -> None:
        """Free the memory of shared devices until the next push."""
        ...


@dataclass(frozen=True, slots=True)
class Validation:
    """Result of a validation, with every trajectory it sampled."""

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
    """Sample every validation task; `step` keeps the records of different validations apart."""
    named = [replace(task, uid=f"validation-{step}/{task.uid}") for task in tasks]
    batch = await rollout.generate_sequences(named, kind=RolloutKind.VALIDATION)
    trajectories = batch.trajectories
    return Validation(step, summarize(trajectories, success_threshold=success_threshold), trajectories)


def _solved(trajectory: Trajectory, success_threshold: float) -> bool:
    return trajectory.reward is not None and trajectory.reward.value >= success_threshold


class ValidationRunner:
    """Runs validations beside the steps or alone (see the module). `found` is in order of ending."""

    def __init__(
        self,
        parts: "TrainerParts",
        reward: RewardConfig,
        recorder: "RunRecorder",
        spans: Spans,
        stop: "StopRequest",
        *,
        overlaps: bool,
    ) -> None:
        """`overlaps`: sampling and training go on side by side."""
        self._parts = parts
        self._reward = reward
        self._recorder = recorder
        self._spans = spans
        self._stop = stop
        self._beside: asyncio.TaskGroup | None = None
        self._overlaps = overlaps
        self._running: asyncio.Task[None] | None = None
        self._step = -1
        """What `_running` validates."""
        self._due = False
        """Whether the next weights that the rollout gets are to be validated."""
        self.found: list[Validation] = []

    def start(self, beside: asyncio.TaskGroup) -> None:
        """From now on validations may go on as tasks of `beside`."""
        self._beside = beside

    def stop(self) -> None:
        """Begin no more of them beside the steps."""
        self._beside = None

    async def begin(self, step: int, *, arrived: bool) -> None:
        """Validate without stalling the steps. `arrived`: the rollout's engines have the weights of this step."""
        validator = self._parts.validator
        if self._beside is None or (validator is None and not self._overlaps):
            await self.finish(step)
        elif validator is not None:
            await self._wait()
            await self._parts.push_weights(validator.push)
            self._start(validator.rollout, step)
        elif arrived:
            await self._begin_shared(step)
        else:
            self._due = True

    async def hold(self) -> None:
        """Before a push to the rollout: wait for the validation that shares its engines, or end it (see the module)."""
        running = self._running
        if running is None or running.done() or self._parts.validator is not None:
            return
        wanted = asyncio.ensure_future(self._parts.needs_push())
        try:
            with self._spans("validation"):
                await self._stop.unless(asyncio.wait({running, wanted}, return_when=asyncio.FIRST_COMPLETED))
        finally:
            wanted.cancel()
        if not running.done():
            running.cancel()
            await asyncio.wait({running})
            self._running, self._due = None, True

    async def after_push(self, step: int) -> None:
        """The rollout's engines have the weights of a step: validate them, if a validation waits for that."""
        if self._due and self._beside is not None:
            await self._begin_shared(step)

    async def _begin_shared(self, step: int) -> None:
        self._due = False
        if self._running is not None and self._step == step:
            return  # it began with the push
        await self._wait()
        self._start(self._parts.rollout, step)

    def _start(self, rollout: Rollout, step: int) -> None:
        assert self._beside is not None
        self._step = step
        self._running = self._beside.create_task(self._evaluate(rollout, step))

    async def finish(self, step: int) -> None:
        """Validate the policy as it is, and wait for what is found."""
        await self._wait()
        validator = self._parts.validator
        if validator is not None:
            await self._parts.push_weights(validator.push)
        rollout = self._parts.rollout if validator is None else validator.rollout
        with self._spans("validation"):
            await self._stop.unless(self._evaluate(rollout, step))

    async def _wait(self) -> None:
        """Wait for the validation that goes on beside the steps, if one does."""
        if self._running is not None and not self._running.done():
            with self._spans("validation"):
                await self._stop.unless(self._running)
        self._running = None

    async def _evaluate(self, rollout: Rollout, step: int) -> None:
        if not self._parts.validation_tasks:
            return
        with self._spans.beside("validating"):
            found = await validate(rollout, self._parts.validation_tasks, step, self._reward.success_threshold)
        self.found.append(found)
        self._recorder.write_validation(found)
