"""Validation: one path for every schedule, through a rollout like training's; one validation at a time.

Samples as `rollout.val_kwargs` says; success is a reward of at least `reward.success_threshold`.
alone    `sync`, and before and after training: training waits until every validation task is done
own      the step pushes its weights to the validator's engines, and goes on; the next validation waits for this one.
         Where those engines die, at most the validation under way is lost; where they do not come back for the next,
         that one and those after it are shared
shared   it begins when the rollout's engines have the weights, and sampling and training go on; the next push waits for
         its end, so that one version is validated. An engine that was restarted and waits for that push ends it: it
         begins once more after the push, with the weights of that one
Invariant: every token of a validation is sampled with the weights of the step it is recorded under.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from treadle.checkpoint.links import VALIDATION_SUCCESS, CheckpointScore
from treadle.checkpoint.store import Checkpoints
from treadle.config.reward import RewardConfig
from treadle.config.rollout import OnWeightUpdate
from treadle.engine.protocol import ConfirmedWeights, WeightUpdate
from treadle.errors import DeadlineError, EnginesLost
from treadle.observe import Summary, summarize
from treadle.observe.step_metrics import Spans
from treadle.rollout.completion_log import NOTHING_RECOVERED, RecoveredTask
from treadle.rollout.protocol import Dropped
from treadle.rollout.service import RolloutKind
from treadle.terminal import warn
from treadle.trainer.step import Learner
from treadle.types import Batch, Group, Task, Trajectory
from treadle.weights.sync import WeightSync

if TYPE_CHECKING:
    from treadle.trainer.recorder import RunRecorder
    from treadle.trainer.state import StopRequest


class Rollout(Protocol):
    """Rollout, as far as the trainer uses it."""

    @property
    def name(self) -> str: ...

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

    async def update_weights(self, update: WeightUpdate, *, running: OnWeightUpdate = "continue") -> ConfirmedWeights:
        """Hand new weights to every engine; what they confirmed."""
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
        tasks: Sequence[Task],
        reward: RewardConfig,
        rollout: Rollout,
        learner: Learner,
        weights: WeightSync,
        checkpoints: Checkpoints,
        recorder: "RunRecorder",
        spans: Spans,
        stop: "StopRequest",
        *,
        own_rollout: Rollout | None,
        overlaps: bool,
    ) -> None:
        """`own_rollout` has weights of its own, and keeps to one version while training goes on; None: validation
        shares the engines of training's. `overlaps`: sampling and training go on side by side."""
        self._tasks = tasks
        self._reward = reward
        self._rollout = rollout
        self._own_rollout = own_rollout
        self._learner = learner
        self._weights = weights
        self._checkpoints = checkpoints
        self._recorder = recorder
        self._spans = spans
        self._stop = stop
        self._beside: asyncio.TaskGroup | None = None
        self._overlaps = overlaps
        self._running: asyncio.Task[bool] | None = None
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
        own = self._own_rollout
        if self._beside is None or (own is None and not self._overlaps):
            await self.finish(step)
        elif own is not None:
            await self._wait()
            if await self._push_to_own(own):
                self._start(own, step)
            else:
                await self.begin(step, arrived=arrived)
        elif arrived:
            await self._begin_shared(step)
        else:
            self._due = True

    async def _push_to_own(self, own: Rollout) -> bool:
        """Whether the validator's engines have the policy's weights; where they have died for good, there are none."""
        try:
            await self._weights.push_to(own, self._learner.version)
        except (EnginesLost, DeadlineError) as error:
            warn(f"note: validation shares the rollout's engines from now on: {error}")
            self._own_rollout = None
            return False
        return True

    async def hold(self) -> None:
        """Before a push to the rollout: wait for the validation that shares its engines, or end it (see the module)."""
        running = self._running
        if running is None or running.done() or self._own_rollout is not None:
            return
        wanted = asyncio.ensure_future(self._weights.lock.requested())
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
        self._start(self._rollout, step)

    def _start(self, rollout: Rollout, step: int) -> None:
        assert self._beside is not None
        self._step = step
        self._running = self._beside.create_task(self._evaluate(rollout, step))

    async def finish(self, step: int) -> None:
        """Validate the policy as it is, and wait for what is found."""
        await self._wait()
        own = self._own_rollout
        if own is not None and await self._push_to_own(own):
            with self._spans("validation"):
                if await self._stop.unless(self._evaluate(own, step)):
                    return
        with self._spans("validation"):
            await self._stop.unless(self._evaluate(self._rollout, step))

    async def _wait(self) -> None:
        """Wait for the validation that goes on beside the steps, if one does."""
        if self._running is not None and not self._running.done():
            with self._spans("validation"):
                await self._stop.unless(self._running)
        self._running = None

    async def _evaluate(self, rollout: Rollout, step: int) -> bool:
        """Whether it came to an end: False where the validator's own engines were lost on the way."""
        if not self._tasks:
            return True
        try:
            with self._spans.beside("validating"):
                found = await validate(rollout, self._tasks, step, self._reward.success_threshold)
        except EnginesLost as error:
            if rollout is self._rollout:
                raise
            self._recorder.write_lost_validation(step, str(error))
            return False
        self.found.append(found)
        self._checkpoints.score(step, CheckpointScore(VALIDATION_SUCCESS, found.success))
        self._recorder.write_validation(found)
        return True
