"""A training run: what every schedule works with, and what happens around its steps.

Owns the books (metrics, journal, view), validation, checkpoints, and what is taken over from an earlier start. A
schedule decides who waits for whom; everything it does goes through here, so that all schedules record, validate, save
and resume alike.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from logging import getLogger
from math import ceil
from typing import Any, Protocol

from treadle.algorithm.kl import KLControl
from treadle.checkpoint.store import Checkpoints, Progress
from treadle.config import TrainConfig
from treadle.config.show import flatten
from treadle.data.tasks import SourceState, TaskSource
from treadle.errors import Failure, RunError, TreadleError
from treadle.journal import Journal
from treadle.observe.spans import Spans, add_up
from treadle.observe.trackers import Trackers
from treadle.rollout.dispatch import first_error
from treadle.rollout.recall import Past
from treadle.rollout.service import Kind
from treadle.trainer.evaluate import Rollout, Validation, validate
from treadle.trainer.flow import Flow, FlowLimits, Taken
from treadle.trainer.lineage import RESUME, Lineage
from treadle.trainer.step import StepParts, StepReport, train_step
from treadle.types import Group, Task
from treadle.weights.push import PushReport

log = getLogger(__name__)

_SAMPLING = ("model.", "rollout.", "reward.")

Push = Callable[[int], Awaitable[PushReport]]

Train = Callable[[Sequence[Group], int, KLControl | None, Sequence[float] | None], Awaitable[StepReport]]
"""Trains on groups, as a step, with the weight of KL and the baselines that the step needs."""


class Interrupted(Exception):
    """Somebody asked the run to stop; everything that is done is saved."""


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
    validator: Validator | None = None
    """None: validation shares the rollout, and training waits for it."""
    watch: Callable[[], Awaitable[None]] | None = None
    """Goes on until cancelled; raises when a part dies that nobody happens to call."""


def total_steps(config: TrainConfig, tasks: TaskSource) -> int:
    """How many steps a run takes: as told, or as many as its epochs need."""
    trainer = config.trainer
    needed = ceil(trainer.total_epochs * len(tasks) / config.data.train_batch_size)
    return trainer.total_training_steps or needed


def lag_of(config: TrainConfig) -> int:
    """How many policy versions a token may be behind the weights it trains."""
    return {"sync": 0, "one_step_off": 1, "fully_async": config.trainer.max_staleness}[config.trainer.mode]


def settings_digest(config: TrainConfig) -> str:
    """Stands for everything that decides what is sampled and scored: what other settings left is not taken over."""
    leaves = (f"{name}={value}" for name, value in flatten(config).items() if name.startswith(_SAMPLING))
    fresh = f"{time.time()}" if config.checkpoint.resume_mode == "disable" else ""
    return sha256("\n".join([*sorted(leaves), fresh]).encode()).hexdigest()[:16]


class Run:
    """One start of a training run. `step` counts finished steps."""

    def __init__(self, config: TrainConfig, parts: Parts) -> None:
        self._config = config
        self._parts = parts
        self._stop = asyncio.Event()
        self._control: KLControl | None = None
        self._baselines: list[float] | None = None
        self._extra: dict[str, float] = {}
        self._flow = _flow(config, parts)
        self._beside: asyncio.TaskGroup | None = None
        self._validating: asyncio.Task[None] | None = None
        self._pushed = -1
        """The version that the engines have."""
        self._restored = 0
        """The version that this start began with."""
        self._recorded_at = time.perf_counter()
        self.validations: list[Validation] = []
        self.spans = Spans()
        self.step = 0
        self.total_steps = total_steps(config, parts.tasks)
        self.lag = lag_of(config)
        parts.view.watch(lambda: self.spans.current)

    async def start(self) -> None:
        """Go on from the newest checkpoint, if there is one; give the engines the weights; validate as asked."""
        parts, trainer = self._parts, self._config.trainer
        progress = await asyncio.to_thread(parts.checkpoints.restore, parts.step.policy, parts.step.critic)
        if progress is not None:
            self._resume(progress)
        self._restored = self.version
        self._flow.restore(self.step, self._open_before(progress), self._past)
        parts.journal.add_event(RESUME, **self._books(), settings=settings_digest(self._config))
        report = await self._deliver()
        if progress is not None:
            self._note_weights(report)  # which a replay compares: what was restored is what was trained
        if trainer.val_only or (trainer.val_before_train and progress is None):
            await self._validate()
        if trainer.val_only:
            self.total_steps = self.step

    @property
    def version(self) -> int:
        """The policy's."""
        return self._parts.step.policy.version

    def _resume(self, progress: Progress) -> None:
        state: Any = progress.state
        self.step = progress.step
        self._parts.tasks.restore(SourceState(**state["tasks"]))
        if state["kl_coefficient"] is not None:
            start = KLControl.start(self._config.algorithm.kl_ctrl)
            self._control = replace(start, coefficient=state["kl_coefficient"])
        self._parts.view.resume(progress.step)

    def _open_before(self, progress: Progress | None) -> Sequence[int]:
        """Positions of tasks that were admitted when the checkpoint was saved, and not yet trained."""
        state: Any = {} if progress is None else progress.state
        return tuple(state.get("open", ()))

    def _past(self, task: Task, oldest: int) -> Past:
        """What earlier starts left of a task, as far as this run still has the weights, and tokens are young enough."""
        n = task.n or self._config.rollout.n
        return self._parts.lineage.past(task.uid, n, version=self._restored, oldest=oldest)

    def request_stop(self) -> None:
        """End the run at the next moment at which nothing is lost."""
        self._stop.set()

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """The rollout at work beside the steps of a schedule. However the block ends, what is half done is kept.

        Whatever dies beside the steps ends the block with its cause.
        """
        with first_error():
            async with asyncio.TaskGroup() as beside:
                watches = [beside.create_task(_forever(self._parts.rollout.watch, "the rollout's watch"))]
                if self._parts.watch is not None:
                    watches.append(beside.create_task(_forever(self._parts.watch, "the watch over the ranks")))
                self._beside = beside
                self._flow.start(beside, self._pushed)
                try:
                    yield
                finally:
                    self._beside = None
                    await self._keep()
                    self._flow.stop()
                    for watch in watches:
                        watch.cancel()

    async def _keep(self) -> None:
        """Have what is half generated recorded, if there is anything. Doing without it costs time, not truth."""
        if not self._flow.is_sampling:
            return
        try:
            async with asyncio.timeout(self._config.rollout.limits.close_timeout_s):
                await self._parts.rollout.keep()
        except (TimeoutError, TreadleError) as error:
            log.warning("what is half generated could not be kept, and will be sampled again: %s", error or "no answer")

    def allow(self, batches: int) -> None:
        """Let the tasks of this many batches begin, counted from the first step; never of more than the run trains."""
        self._flow.allow(min(batches, self.total_steps))

    async def take(self) -> Taken:
        """The next batch of groups, as soon as the schedule's bounds let it train; unless the run is asked to stop."""
        taken: Taken = await self._unless_stopped(self._flow.take(self.version))
        return taken

    async def train(self, taken: Taken) -> StepReport:
        """One step on a batch. Not interrupted: a step is whole or has not begun."""
        baselines = await self._draw_baselines(taken.groups)
        if self._config.rollout.nnodes == 0 and self._config.rollout.free_cache_engine:
            await self._parts.rollout.sleep()
        self._extra.update(_staleness(taken.groups, self.version))
        report = await self._parts.train(taken.groups, self.step + 1, self._control, baselines)
        self._control = report.control
        self._baselines = baselines
        return report

    async def _draw_baselines(self, groups: Sequence[Group]) -> list[float] | None:
        if self._config.algorithm.adv_estimator != "remax":
            return None
        tasks = [replace(group.task, uid=f"greedy/{group.task.uid}") for group in groups]
        batch = await self._unless_stopped(self._parts.rollout.generate_sequences(tasks, kind=Kind.GREEDY))
        rewards = {group.task.uid: group.survivors for group in batch.groups}
        return [_first_reward(rewards[task.uid]) for task in tasks]

    @property
    def push_is_due(self) -> bool:
        """Whether `trainer.parameter_sync_steps` asks for a push after this step."""
        return self.version % self._config.trainer.parameter_sync_steps == 0

    async def push(self) -> None:
        """Give the engines the policy's weights, proven to arrive, unless they have them or the run is to stop.

        A stop is not raised here: a step that was trained is recorded first.
        """
        if self._pushed == self.version or self._stop.is_set():
            return
        try:
            report = await self._unless_stopped(self._deliver())
        except Interrupted:
            return
        self._extra.update(report.metrics())
        self._note_weights(report)

    def _note_weights(self, report: PushReport) -> None:
        self._parts.journal.add_event("weights", version=report.version, checksum=report.checksum)

    async def _deliver(self) -> PushReport:
        report = await self._give(self._parts.push)
        self._pushed = report.version
        self._flow.advance(report.version)
        return report

    async def _give(self, push: Push) -> PushReport:
        """Push the policy's weights. Engines that do not take them fail no trajectory: they end the run."""
        try:
            return await push(self.version)
        except Failure as failure:
            raise RunError(str(failure)) from failure

    async def end_step(self, report: StepReport, taken: Taken) -> None:
        """Write the books; validate and save where the config asks."""
        self.step += 1
        names = [
            [group.task.uid, [[item.sample, item.attempt] for item in group.trajectories]] for group in taken.groups
        ]
        self._parts.journal.add_event(
            "step",
            step=self.step,
            version=report.version,
            groups=names,
            positions=list(taken.positions),
            baselines=self._baselines,
        )
        self._flow.settle()
        self._record(report, taken.groups)
        trainer = self._config.trainer
        if trainer.test_freq > 0 and self.step % trainer.test_freq == 0 and self.step < self.total_steps:
            await self._validate_beside()
        if self._parts.checkpoints.is_due(self.step):
            await self._save()
        if self._stop.is_set():
            raise Interrupted

    async def finish(self) -> None:
        """The end of the run: the last validation, the last checkpoint."""
        if self._config.trainer.val_only:
            return
        await self.push()
        await self._validate()
        await self._save()

    async def save_interrupted(self) -> None:
        """Save the steps that are done, after an interruption."""
        if self.step:
            await self._save()

    async def record_rest(self) -> None:
        """Have the spans since the last step in the journal: the last validation, the last checkpoint."""
        if spans := self.spans.take():
            self._parts.journal.add_event("spans", step=self.step, spans=[list(span) for span in spans])
        await self._parts.journal.flush()

    def _record(self, report: StepReport, groups: Sequence[Group]) -> None:
        spans, now = self.spans.take(), time.perf_counter()
        seconds = add_up(spans)
        sampled = sum(item.num_sampled for group in groups for item in group.trajectories)
        sampling_s = now - self._recorded_at if self.lag else seconds.get("rollout", 0.0)
        self._recorded_at = now
        metrics = {
            **report.metrics,
            **self._extra,
            **{f"seconds/{name}": value for name, value in seconds.items()},
            "rollout/tokens_per_s": sampled / max(sampling_s, 1e-9),
        }
        self._extra = {}
        self._parts.journal.add_event("spans", step=self.step, spans=[list(span) for span in spans])
        self._log(self.step, metrics)
        self._parts.view.on_step(self.step, metrics)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._parts.journal.add_metrics(step, metrics)
        self._parts.trackers.log(step, metrics)

    async def _validate_beside(self) -> None:
        """Validate without stalling the steps, where there is a rollout for it; one validation at a time."""
        validator = self._parts.validator
        if validator is None or self._beside is None:
            return await self._validate()
        await self._validated()
        await self._give(validator.push)
        self._validating = self._beside.create_task(self._evaluate(validator.rollout, self.step))
        return None

    async def _validate(self) -> None:
        """Validate the policy as it is, and wait for what is found."""
        await self._validated()
        validator = self._parts.validator
        if validator is not None:
            await self._give(validator.push)
        rollout = self._parts.rollout if validator is None else validator.rollout
        with self.spans("validation"):
            await self._unless_stopped(self._evaluate(rollout, self.step))

    async def _validated(self) -> None:
        """Wait for the validation that goes on beside the steps, if one does."""
        if self._validating is not None and not self._validating.done():
            with self.spans("validation"):
                await self._unless_stopped(self._validating)
        self._validating = None

    async def _evaluate(self, rollout: Rollout, step: int) -> None:
        if not self._parts.validation_tasks:
            return
        with self.spans.beside("validating"):
            found = await validate(rollout, self._parts.validation_tasks, step, self._config.reward.success_threshold)
        self.validations.append(found)
        self._log(step, found.metrics())
        logging = self._config.logging
        if logging.log_val_generations:
            self._parts.trackers.log_texts(step, found.transcripts(logging.log_val_generations))
        self._parts.view.on_validation(step, found.success)

    async def _save(self) -> None:
        parts, flow = self._parts, self._flow
        with self.spans("checkpoint"):
            if self._beside is not None:
                await self._keep()
            coefficient = None if self._control is None else self._control.coefficient
            books = self._books()
            state = {"tasks": asdict(flow.frontier()), "open": books["open"], "kl_coefficient": coefficient}
            parts.journal.add_event("checkpoint", **books)
            await parts.journal.flush()  # what a checkpoint follows from is on disk before it
            await asyncio.to_thread(parts.checkpoints.save, parts.step.policy, parts.step.critic, self.step, state)

    def _books(self) -> dict[str, Any]:
        """Where the run stands: its step, its policy, the next new task, and the tasks that are under way."""
        open_, position = list(self._flow.open_positions), self._parts.tasks.position
        return {"step": self.step, "version": self.version, "position": position, "open": open_}

    async def _unless_stopped(self, work: Awaitable[Any]) -> Any:
        """Await `work`, unless the run is asked to stop first."""
        working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise Interrupted
        finally:
            stopping.cancel()
            if not working.done():
                working.cancel()
                await asyncio.wait({working})


async def train_in_thread(
    parts: StepParts,
    groups: Sequence[Group],
    step: int,
    control: KLControl | None,
    baselines: Sequence[float] | None,
) -> StepReport:
    """A step that leaves the loop free."""
    return await asyncio.to_thread(train_step, parts, groups, step=step, control=control, baselines=baselines)


def _flow(config: TrainConfig, parts: Parts) -> Flow:
    limits, failures = config.rollout.limits, config.rollout.failures
    bounds = FlowLimits(
        batch_size=config.data.train_batch_size,
        lag=lag_of(config),
        drop_stale=config.trainer.mode == "fully_async" and config.trainer.stale_samples == "drop",
        patience_s=2 * (failures.session_retries + 1) * limits.session_timeout_s + limits.request_timeout_s,
    )
    filter_groups = config.algorithm.filter_groups
    return Flow(parts.rollout, parts.tasks, parts.journal, bounds, filter_groups=filter_groups, failures=failures)


async def _forever(work: Callable[[], Awaitable[None]], name: str) -> None:
    """Run what has to go on until it is cancelled; that it returned is a verdict too."""
    await work()
    raise RunError(f"{name} ended early")


def _staleness(groups: Sequence[Group], version: int) -> dict[str, float]:
    """How many policy versions behind the sampled tokens are."""
    trained = (item for group in groups for item in group.survivors)
    ages = [version - at for item in trained for row in item.rows for at in row.versions if at >= 0]
    return {"staleness/mean": sum(ages) / len(ages), "staleness/max": float(max(ages))} if ages else {}


def _first_reward(survivors: Sequence[Any]) -> float:
    return survivors[0].reward.value if survivors and survivors[0].reward else 0.0
