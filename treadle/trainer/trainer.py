"""Trainer: what all schedules share: start, admission, step, push, validation, checkpoint, resume, stop.

A schedule decides what waits for what; everything it does goes through here, so that all schedules record, validate,
save and resume alike. Owns the order of these; `buffer`, `recorder`, `validation` and `state` own what is done.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from logging import getLogger
from math import ceil
from typing import Protocol

from treadle.aio import first_error
from treadle.checkpoint.links import TRAINING_REWARD, CheckpointScore
from treadle.checkpoint.store import Checkpoints
from treadle.config import TrainConfig
from treadle.config.plan import staleness_bound
from treadle.data.task_feed import TaskFeed
from treadle.errors import NotFiniteError, RunError, TreadleError
from treadle.journal import Journal
from treadle.observe.step_metrics import Spans
from treadle.observe.trackers import Trackers
from treadle.rollout.service import RolloutKind
from treadle.terminal import warn
from treadle.trainer.buffer import BufferedBatch, BufferLimits, RolloutBuffer
from treadle.trainer.recorder import RunRecorder, RunView
from treadle.trainer.resume import SET_ASIDE, RunHistory
from treadle.trainer.state import RunInterrupted, StopRequest, TrainerState
from treadle.trainer.step import Learner, StepReport
from treadle.trainer.validation import Rollout, Validation, ValidationRunner
from treadle.types import Group, Task
from treadle.weights.logprob_probe import LogprobProbe
from treadle.weights.sync import PushReport, WeightSync

log = getLogger(__name__)

_NO_SIGNAL = "estimators that compare them learn nothing from it"


class RunMonitor(Protocol):
    """Processes that no call waits for all the time."""

    async def watch(self) -> None:
        """Run until cancelled; raise when a process dies."""
        ...


class Trainer:
    """One start of a training run. `spans` says where its time goes."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        learner: Learner,
        rollout: Rollout,
        weights: WeightSync,
        tasks: TaskFeed,
        checkpoints: Checkpoints,
        journal: Journal,
        trackers: Trackers,
        view: RunView,
        history: RunHistory,
        validation_tasks: Sequence[Task] = (),
        validation_rollout: Rollout | None = None,
        monitor: RunMonitor | None = None,
        spans: Spans | None = None,
    ) -> None:
        """`history` is what earlier starts left; `validation_rollout` has weights of its own; `monitor` is watched."""
        self._config = config
        self._learner = learner
        self._rollout = rollout
        self._weights = weights
        self._checkpoints = checkpoints
        self._journal = journal
        self._monitor = monitor
        self._scores_steps = not validation_tasks
        """Whether training's own rewards say which checkpoint is best."""
        self._stop = StopRequest()
        self._buffer = RolloutBuffer(
            *(rollout, tasks, journal, BufferLimits.of(config)),
            filter_groups=config.algorithm.filter_groups,
            failures=config.rollout.failures,
        )
        self._probe = LogprobProbe.of(config, learner.parts.policy, weights.lock)
        self._pushed, self._engines_slept = -1, False
        """The version that the engines have, and whether they gave their memory to the policy since they got it."""
        self._baselines: list[float | None] | None = None
        """What the step under way was trained against, where the estimator needs it."""
        self._equal_steps, self._told_equal = 0, False
        self._oversized = _describe_oversized(config, len(tasks))
        self.spans = spans or Spans()
        self.total_steps = config.total_steps(len(tasks))
        self._state = TrainerState(
            *(config, learner, tasks, self._buffer),
            checkpoints=checkpoints,
            journal=journal,
            history=history,
            view=view,
        )
        overlaps = self.staleness_bound > 0
        self._recorder = RunRecorder(journal, trackers, view, config.logging, self.spans, overlaps=overlaps)
        self._validations = ValidationRunner(
            *(validation_tasks, config.reward, rollout, learner, weights, checkpoints),
            *(self._recorder, self.spans, self._stop),
            own_rollout=validation_rollout,
            overlaps=config.trainer.mode != "sync",
        )
        view.begin(self.total_steps)
        view.watch(lambda: self.spans.current)

    @property
    def staleness_bound(self) -> int:
        """Policy versions that a token may be behind the weights it trains."""
        return staleness_bound(self._config)

    @property
    def step(self) -> int:
        """Steps that are finished."""
        return self._state.step

    @property
    def trained(self) -> int:
        """Steps that this start did."""
        return self._state.step - self._state.began

    @property
    def version(self) -> int:
        """The policy's version."""
        return self._learner.version

    @property
    def validations(self) -> Sequence[Validation]:
        return self._validations.found

    def request_stop(self) -> None:
        """End the run at the next moment at which nothing is lost."""
        self._stop.request()

    async def start(self) -> None:
        """Go on from the newest checkpoint, if there is one; push the weights; validate as the config says."""
        trainer = self._config.trainer
        resumed = await self._state.restore()
        if self._oversized:
            warn(f"note: {self._oversized}")
        report = await self._weights.push(self._rollout, self.version)
        await self._check_logprobs(report.version)
        self._note_pushed(report)
        if resumed:
            self._recorder.write_weights(report)  # which a replay compares: what was restored is what was trained
        if trainer.val_only or (trainer.val_before_train and not resumed):
            await self._validations.finish(self.step)
        if trainer.val_only:
            self.total_steps = self.step

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """The rollout runs beside the steps of a schedule. However the block ends, what is half generated is recorded.

        A failure beside the steps ends the block with its cause.
        """
        with first_error():
            async with asyncio.TaskGroup() as beside:
                watches = [beside.create_task(_forever(self._rollout, "the rollout's watch"))]
                if self._monitor is not None:
                    watches.append(beside.create_task(_forever(self._monitor, "the watch over the ranks")))
                self._validations.start(beside)
                self._buffer.start(beside, self._pushed)
                try:
                    yield
                finally:
                    self._validations.stop()
                    await self._keep()
                    self._buffer.stop()
                    for watch in watches:
                        watch.cancel()

    def allow(self, batches: int) -> None:
        """Admit the tasks of this many batches, counted from the first step; never more than the run trains."""
        self._buffer.allow(min(batches, self.total_steps))

    async def take(self) -> BufferedBatch:
        """The next batch of groups, as soon as the schedule's bounds let it train; unless a stop is requested.

        Weights that no engine has yet are pushed meanwhile where an engine that was started again waits for them: the
        batch may wait for that engine.
        """
        return await self._stop.unless(self._take())

    async def _take(self) -> BufferedBatch:
        taking = asyncio.ensure_future(self._buffer.take(self.version))
        wanted = asyncio.ensure_future(self._weights.lock.requested())
        try:
            await asyncio.wait({taking, wanted}, return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                await self.push()
            return await taking
        finally:
            wanted.cancel()
            if not taking.done():
                taking.cancel()
                await asyncio.wait({taking})

    async def train(self, taken: BufferedBatch) -> StepReport:
        """One step on a batch. Not interrupted: a step is whole or has not begun."""
        baselines = await self._draw_baselines(taken.groups)
        if self._config.rollout.nnodes == 0 and self._config.rollout.free_cache_engine:
            self._engines_slept = True
            await self._rollout.sleep()
        self._recorder.note_staleness(taken.groups, self.version)
        try:
            report = await self._learner.train(
                taken.groups, step=self.step + 1, control=self._state.control, baselines=baselines
            )
        except NotFiniteError as error:
            await self._set_aside(taken, str(error))
            raise
        if report.metrics.get("actor/skipped_steps"):
            await self._set_aside(taken, "an update was skipped: its gradient was not finite")
        self._state.control = report.control
        self._baselines = baselines
        return report

    async def _set_aside(self, taken: BufferedBatch, reason: str) -> None:
        """Record that these samples spoil a step, so that no later start takes them over and ends the same way."""
        uids = [group.task.uid for group in taken.groups]
        self._journal.add_event(SET_ASIDE, step=self.step + 1, uids=uids, reason=reason)
        await self._journal.flush()

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for the end of the run."""
        equal, notes = self._equal_steps, []
        if equal:
            notes.append(f"in {equal} of {self.step} steps all samples of each task had the same reward: {_NO_SIGNAL}")
        if self._oversized:
            notes.append(self._oversized)
        if self._probe.open_question:
            notes.append(self._probe.open_question)
        return tuple(notes)

    def _note_signal(self, report: StepReport) -> None:
        groups = report.metrics.get("batch/groups")
        if groups is None or report.metrics["batch/no_signal"] < groups:
            self._told_equal = False
            return
        self._equal_steps += 1
        if not self._told_equal:  # once for each run of such steps
            self._told_equal = True
            mean = report.metrics["reward/mean"]
            warn(f"step {self.step}: all samples of each task have the same reward (mean {mean:g}): {_NO_SIGNAL}")

    @property
    def push_is_due(self) -> bool:
        """Whether weights are pushed after this step (`trainer.parameter_sync_steps`)."""
        return self.version % self._config.trainer.parameter_sync_steps == 0

    async def push(self) -> None:
        """Push the policy's weights to the engines, with checksums, unless they have them or a stop is requested.

        They may have them after a step too: one that trains the critic alone leaves the policy's version as it was.
        Engines that slept have none of any version. A stop is not raised here: a step that was trained is recorded
        first.
        """
        if self._stop.requested:
            return
        if self._pushed == self.version and not self._engines_slept:
            self._weights.lock.mark_synced(self.version)
            return
        try:
            await self._validations.hold()
            report = await self._stop.unless(self._weights.push(self._rollout, self.version))
            await self._stop.unless(self._check_logprobs(report.version))
        except RunInterrupted:
            return
        self._note_pushed(report)
        self._recorder.note(report.metrics())
        self._recorder.write_weights(report)
        await self._validations.after_push(report.version)

    async def _check_logprobs(self, version: int) -> None:
        """Probe the replicas, where that is due; what they answered is recorded, and a wrong answer ends the run."""
        results = await self._probe.ask(self._rollout, version)
        self._recorder.write_probes(results)
        self._probe.judge(results)

    async def end_step(self, report: StepReport, taken: BufferedBatch) -> None:
        """Record the step; validate and save where the config says so."""
        self._state.step += 1
        self._buffer.settle()
        self._recorder.write_step(self.step, report, taken, self._baselines)
        self._note_signal(report)
        if self._scores_steps and "reward/mean" in report.metrics:
            self._checkpoints.score(self.step, CheckpointScore(TRAINING_REWARD, report.metrics["reward/mean"]))
        trainer = self._config.trainer
        if trainer.test_freq > 0 and self.step % trainer.test_freq == 0 and self.step < self.total_steps:
            await self._validations.begin(self.step, arrived=self._pushed == self.version)
        if self._checkpoints.is_due(self.step):
            await self._save()
        if self._stop.requested:
            raise RunInterrupted

    async def finish(self) -> None:
        """The end of the run: the last validation, the last checkpoint."""
        if self._config.trainer.val_only:
            return
        self._validations.stop()
        await self.push()
        await self._validations.finish(self.step)
        await self._save()

    async def save_interrupted(self) -> None:
        """Save the steps that are done, after an interruption."""
        if self.step:
            await self._save()

    def record_findings(self, counts: Mapping[str, float]) -> None:
        """Send what was found in the newest groups to the trackers."""
        self._recorder.write_findings(self.step, counts)

    async def record_rest(self) -> None:
        """Write what happened since the last step to the journal."""
        await self._recorder.write_rest(self.step)

    async def _draw_baselines(self, groups: Sequence[Group]) -> list[float | None] | None:
        """The reward of one greedy sample for each group, where the estimator compares with it; None if it failed."""
        if self._config.algorithm.adv_estimator != "remax":
            return None
        tasks = [replace(group.task, uid=f"greedy/{group.task.uid}") for group in groups]
        batch = await self._stop.unless(self._rollout.generate_sequences(tasks, kind=RolloutKind.GREEDY))
        rewards = {
            group.task.uid: item.reward.value for group in batch.groups for item in group.survivors[:1] if item.reward
        }
        baselines = [rewards.get(task.uid) for task in tasks]
        if failed := baselines.count(None):
            self._recorder.note({"batch/no_baseline": float(failed)})
            log.warning(
                "step %d: the greedy sample of %d of %d groups failed, so they have no baseline and advantage 0",
                self.step + 1,
                failed,
                len(tasks),
            )
        return baselines

    def _note_pushed(self, report: PushReport) -> None:
        self._pushed = report.version
        self._engines_slept = False
        self._buffer.advance(report.version)

    async def _save(self) -> None:
        with self.spans("checkpoint"):
            await self._keep()
            await self._state.save()

    async def _keep(self) -> None:
        """Record what is half generated, if anything. Where that fails, it is sampled again: slower, not wrong."""
        if not self._buffer.is_sampling:
            return
        try:
            async with asyncio.timeout(self._config.rollout.limits.close_timeout_s):
                await self._rollout.keep()
        except (TimeoutError, TreadleError) as error:
            log.warning("what is half generated could not be kept, and will be sampled again: %s", error or "no answer")


def _describe_oversized(config: TrainConfig, tasks: int) -> str:
    """Whether a batch holds tasks more than once, in words; empty where it does not."""
    size = config.data.train_batch_size
    if config.trainer.val_only or size <= tasks:
        return ""
    return (
        f"data.train_batch_size {size} is more than the {tasks} tasks of data.train_files: one batch holds tasks "
        f"up to {ceil(size / tasks)} times, as those of later epochs"
    )


async def _forever(monitor: RunMonitor, name: str) -> None:
    """Watch until cancelled; an early return is an error."""
    await monitor.watch()
    raise RunError(f"{name} ended early")
