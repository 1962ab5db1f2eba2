"""A training run: what every schedule works with, and what happens around its steps.

Owns the order of tasks, the books (metrics, journal, view), validation and checkpoints. A schedule decides who waits
for whom; everything it does goes through here, so that all schedules record, validate, save and resume alike.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any, Protocol

from treadle.algorithm.kl import KLControl
from treadle.checkpoint.store import Checkpoints, Progress
from treadle.config import TrainConfig
from treadle.data.tasks import SourceState, TaskSource
from treadle.errors import RunError
from treadle.journal import Journal
from treadle.observe.spans import Spans
from treadle.observe.trackers import Trackers
from treadle.rollout.service import Kind
from treadle.trainer.evaluate import Rollout, Validation, validate
from treadle.trainer.step import StepParts, StepReport, keep_informative, train_step
from treadle.types import Group, Task
from treadle.weights.push import PushReport


class Interrupted(Exception):
    """Somebody asked the run to stop; everything that is done is saved."""


class View(Protocol):
    """Whoever shows the run to a person."""

    def watch(self, phase: Callable[[], str]) -> None: ...

    def resume(self, step: int) -> None: ...

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def on_validation(self, step: int, success: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is put together from."""

    step: StepParts
    rollout: Rollout
    push: Callable[[int], Awaitable[PushReport]]
    tasks: TaskSource
    validation_tasks: Sequence[Task]
    checkpoints: Checkpoints
    journal: Journal
    trackers: Trackers
    view: View


def total_steps(config: TrainConfig, tasks: TaskSource) -> int:
    """How many steps a run takes: as told, or as many as its epochs need."""
    trainer = config.trainer
    needed = ceil(trainer.total_epochs * len(tasks) / config.data.train_batch_size)
    return trainer.total_training_steps or needed


class Run:
    """One start of a training run. `step` counts finished steps."""

    def __init__(self, config: TrainConfig, parts: Parts) -> None:
        self._config = config
        self._parts = parts
        self._stop = asyncio.Event()
        self._control: KLControl | None = None
        self._baselines: list[float] | None = None
        self._before_step = parts.tasks.state()
        self._extra: dict[str, float] = {}
        self.validations: list[Validation] = []
        self.spans = Spans()
        self.step = 0
        self.total_steps = total_steps(config, parts.tasks)
        parts.view.watch(lambda: self.spans.current)

    async def start(self) -> None:
        """Go on from the newest checkpoint, if there is one; give the engine the weights; validate as asked."""
        parts, trainer = self._parts, self._config.trainer
        progress = await asyncio.to_thread(parts.checkpoints.restore, parts.step.policy, parts.step.critic)
        if progress is not None:
            self._resume(progress)
        await parts.push(parts.step.policy.version)
        if trainer.val_only or (trainer.val_before_train and progress is None):
            await self._validate()
        if trainer.val_only:
            self.total_steps = self.step

    def _resume(self, progress: Progress) -> None:
        state: Any = progress.state
        self.step = progress.step
        self._parts.tasks.restore(SourceState(**state["tasks"]))
        self._before_step = self._parts.tasks.state()
        if state["kl_coefficient"] is not None:
            start = KLControl.start(self._config.algorithm.kl_ctrl)
            self._control = replace(start, coefficient=state["kl_coefficient"])
        self._parts.view.resume(progress.step)

    def request_stop(self) -> None:
        """End the run at the next moment at which nothing is lost."""
        self._stop.set()

    async def collect(self) -> tuple[Group, ...]:
        """A batch of groups that teach something. Asks for more where dynamic sampling leaves too few."""
        data, filtering = self._config.data, self._config.algorithm.filter_groups
        groups: list[Group] = []
        for _ in range(filtering.max_num_gen_batches if filtering.enable else 1):
            missing = data.train_batch_size - len(groups)
            tasks = [self._next_task() for _ in range(missing)]
            batch = await self._unless_stopped(self._parts.rollout.generate_sequences(tasks, seed=self._seed()))
            survivors = [group for group in batch.groups if self._large_enough(group)]
            groups += keep_informative(survivors, filtering)
            if len(groups) == data.train_batch_size or not filtering.enable:
                return tuple(groups)
        raise RunError(
            f"step {self.step + 1}: {filtering.max_num_gen_batches} batches gave {len(groups)} groups with a signal, "
            f"{data.train_batch_size} are needed (algorithm.filter_groups.max_num_gen_batches)"
        )

    def _large_enough(self, group: Group) -> bool:
        return len(group.survivors) >= self._config.rollout.failures.min_group_size

    def _next_task(self) -> Task:
        """The next task; in later epochs under a name of its own, so that records and noise differ."""
        epoch = self._parts.tasks.epoch
        (task,) = self._parts.tasks.take(1)
        named = task if epoch == 0 else replace(task, uid=f"{task.uid}@{epoch}")
        self._parts.journal.add_task(named)
        return named

    def _seed(self) -> int:
        """Noise of its own for every step, the same after a resume."""
        return self._config.rollout.seed + self.step

    async def train(self, groups: Sequence[Group]) -> StepReport:
        """One step on these groups. Not interrupted: a step is whole or has not begun."""
        baselines = await self._draw_baselines(groups)
        report = await asyncio.to_thread(
            train_step, self._parts.step, groups, step=self.step + 1, control=self._control, baselines=baselines
        )
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

    async def push(self, version: int) -> None:
        """Give the engines the new weights, proven to arrive."""
        report = await self._parts.push(version)
        self._extra.update(report.metrics())
        self._parts.journal.add_event("weights", version=version, checksum=report.checksum)

    async def end_step(self, report: StepReport, groups: Sequence[Group]) -> None:
        """Write the books; validate and save where the config asks."""
        self.step += 1
        self._before_step = self._parts.tasks.state()
        names = [[group.task.uid, [item.sample for item in group.trajectories]] for group in groups]
        self._parts.journal.add_event(
            "step", step=self.step, version=report.version, groups=names, baselines=self._baselines
        )
        self._record(report, groups)
        trainer = self._config.trainer
        if trainer.test_freq > 0 and self.step % trainer.test_freq == 0 and self.step < self.total_steps:
            await self._validate()
        if self._parts.checkpoints.is_due(self.step):
            await self._save()
        if self._stop.is_set():
            raise Interrupted

    async def finish(self) -> None:
        """The end of the run: the last validation, the last checkpoint."""
        if not self._config.trainer.val_only:
            await self._validate()
            await self._save()

    async def save_interrupted(self) -> None:
        """Save the steps that are done, after an interruption."""
        if self.step:
            await self._save()

    def _record(self, report: StepReport, groups: Sequence[Group]) -> None:
        seconds = self.spans.take()
        sampled = sum(item.num_sampled for group in groups for item in group.trajectories)
        metrics = {
            **report.metrics,
            **self._extra,
            **{f"seconds/{name}": value for name, value in seconds.items()},
            "rollout/tokens_per_s": sampled / max(seconds.get("rollout", 0.0), 1e-9),
        }
        self._extra = {}
        self._parts.journal.add_metrics(self.step, metrics)
        self._parts.trackers.log(self.step, metrics)
        self._parts.view.on_step(self.step, metrics)

    async def _validate(self) -> None:
        if not self._parts.validation_tasks:
            return
        with self.spans("validation"):
            found = await self._unless_stopped(validate(self._parts.rollout, self._parts.validation_tasks, self.step))
        self.validations.append(found)
        self._parts.journal.add_metrics(self.step, found.metrics())
        self._parts.trackers.log(self.step, found.metrics())
        self._parts.view.on_validation(self.step, found.success)

    async def _save(self) -> None:
        coefficient = None if self._control is None else self._control.coefficient
        state = {"tasks": asdict(self._before_step), "kl_coefficient": coefficient}
        parts = self._parts
        with self.spans("checkpoint"):
            await (
                parts.journal.flush()
            )  # what a checkpoint follows from is on disk before it, so that it can be replayed
            await asyncio.to_thread(parts.checkpoints.save, parts.step.policy, parts.step.critic, self.step, state)

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


def _first_reward(survivors: Sequence[Any]) -> float:
    return survivors[0].reward.value if survivors and survivors[0].reward else 0.0
