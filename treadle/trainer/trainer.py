"""Trainer: what all schedules share: start, admission, step, push, validation, checkpoint, resume, stop.

A schedule decides what waits for what; everything it does goes through here, so that all schedules record, validate,
save and resume alike. Owns the order of these; `buffer`, `recorder`, `validation` and `state` own what is done.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from logging import getLogger
from math import ceil

from treadle.aio import first_error
from treadle.config import TrainConfig
from treadle.config.plan import max_lag
from treadle.errors import NotFiniteError, RunError, TreadleError
from treadle.observe.step_metrics import Spans
from treadle.rollout.service import RolloutKind
from treadle.terminal import warn
from treadle.trainer.buffer import BufferedBatch, BufferLimits, RolloutBuffer
from treadle.trainer.parts import RunInterrupted, StopRequest, TrainerParts
from treadle.trainer.recorder import RunRecorder
from treadle.trainer.resume import SET_ASIDE
from treadle.trainer.state import TrainerState
from treadle.trainer.step import StepReport
from treadle.trainer.terms import total_steps
from treadle.trainer.validation import Validation, ValidationRunner
from treadle.types import Group
from treadle.weights.sync import PushReport

log = getLogger(__name__)

_NO_SIGNAL = "estimators that compare them learn nothing from it"


class Trainer:
    """One start of a training run. `spans` says where its time goes."""

    def __init__(self, config: TrainConfig, parts: TrainerParts, spans: Spans | None = None) -> None:
        self._config = config
        self._parts = parts
        self._stop = StopRequest()
        self._buffer = RolloutBuffer(
            parts.rollout,
            parts.tasks,
            parts.journal,
            BufferLimits.of(config),
            filter_groups=config.algorithm.filter_groups,
            failures=config.rollout.failures,
        )
        self._pushed = -1
        """The version that the engines have."""
        self._baselines: list[float | None] | None = None
        """What the step under way was trained against, where the estimator needs it."""
        self._equal_steps = 0
        self._told_equal = False
        self._oversized = _describe_oversized(config, len(parts.tasks))
        self.spans = spans or Spans()
        self.total_steps = total_steps(config, parts.tasks)
        self.lag = max_lag(config)
        self._state = TrainerState(config, parts, self._buffer)
        self._recorder = RunRecorder(parts, config.logging, self.spans, overlaps=self.lag > 0)
        self._validations = ValidationRunner(
            parts, config.reward, self._recorder, self.spans, self._stop, overlaps=config.trainer.mode != "sync"
        )
        parts.view.watch(lambda: self.spans.current)

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
        return self._parts.version

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
        report = await self._push()
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
                watches = [beside.create_task(_forever(self._parts.rollout.watch, "the rollout's watch"))]
                if self._parts.watch is not None:
                    watches.append(beside.create_task(_forever(self._parts.watch, "the watch over the ranks")))
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
        wanted = asyncio.ensure_future(self._parts.needs_push())
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
            await self._parts.rollout.sleep()
        self._recorder.note_staleness(taken.groups, self.version)
        try:
            report = await self._parts.train(taken.groups, self.step + 1, self._state.control, baselines)
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
        self._parts.journal.add_event(SET_ASIDE, step=self.step + 1, uids=uids, reason=reason)
        await self._parts.journal.flush()

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for the end of the run."""
        equal, notes = self._equal_steps, []
        if equal:
            notes.append(f"in {equal} of {self.step} steps all samples of each task had the same reward: {_NO_SIGNAL}")
        if self._oversized:
            notes.append(self._oversized)
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

        A stop is not raised here: a step that was trained is recorded first.
        """
        if self._pushed == self.version or self._stop.requested:
            return
        try:
            await self._validations.hold()
            report = await self._stop.unless(self._push())
        except RunInterrupted:
            return
        self._recorder.note(report.metrics())
        self._recorder.write_weights(report)
        await self._validations.after_push(report.version)

    async def end_step(self, report: StepReport, taken: BufferedBatch) -> None:
        """Record the step; validate and save where the config says so."""
        self._state.step += 1
        self._buffer.settle()
        self._recorder.write_step(self.step, report, taken, self._baselines)
        self._note_signal(report)
        trainer = self._config.trainer
        if trainer.test_freq > 0 and self.step % trainer.test_freq == 0 and self.step < self.total_steps:
            await self._validations.begin(self.step, arrived=self._pushed == self.version)
        if self._parts.checkpoints.is_due(self.step):
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

    async def record_rest(self) -> None:
        """Write what happened since the last step to the journal."""
        await self._recorder.write_rest(self.step)

    async def _draw_baselines(self, groups: Sequence[Group]) -> list[float | None] | None:
        """The reward of one greedy sample for each group, where the estimator compares with it; None if it failed."""
        if self._config.algorithm.adv_estimator != "remax":
            return None
        tasks = [replace(group.task, uid=f"greedy/{group.task.uid}") for group in groups]
        batch = await self._stop.unless(self._parts.rollout.generate_sequences(tasks, kind=RolloutKind.GREEDY))
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

    async def _push(self) -> PushReport:
        report = await self._parts.push_weights(self._parts.push)
        self._pushed = report.version
        self._buffer.advance(report.version)
        return report

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
                await self._parts.rollout.keep()
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


async def _forever(work: Callable[[], Awaitable[None]], name: str) -> None:
    """Run work that must go on until it is cancelled; an early return is an error."""
    await work()
    raise RunError(f"{name} ended early")
