"""A training run around fakes that keep time on the loop's own clock: for tests of schedules, flow and books."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from tests.rollouts import task
from treadle.checkpoint.links import CheckpointScore
from treadle.checkpoint.store import Progress
from treadle.config import TrainConfig, loads
from treadle.config.rollout import OnWeightUpdate
from treadle.data.task_feed import load_feed
from treadle.data.task_source import TaskSource
from treadle.engine.protocol import ConfirmedWeights, WeightUpdate
from treadle.journal import Journal
from treadle.model.checksum import checksum
from treadle.observe.trackers import Trackers
from treadle.rollout.completion_log import NOTHING_RECOVERED, RecoveredTask
from treadle.rollout.service import RolloutKind
from treadle.trainer.resume import RunHistory, settings_digest
from treadle.trainer.schedules import SCHEDULES
from treadle.trainer.state import RunInterrupted
from treadle.trainer.step import Learner, StepParts, train_step
from treadle.trainer.trainer import Trainer
from treadle.types import Batch, Group, Outcome, Row, Score, StopReason, Trajectory
from treadle.weights.sync import WeightSync

BASE = """
model: {path: unused}
data: {train_files: unused, train_batch_size: 2}
rollout: {n: 2}
reward: {functions: {answer: {path: exact_match}}}
actor: {ppo_mini_batch_size: 2}
trainer: {total_training_steps: 3, val_before_train: false}
"""

ASYNC = ("rollout.nnodes=1", "algorithm.rollout_correction.rollout_is=none")


def words_for(mode: str, *words: str) -> tuple[str, ...]:
    return (f"trainer.mode={mode}", *(() if mode == "sync" else ASYNC), *words)


class Policy:
    """Counts; its only weight follows from the advantages it trained on, in their order."""

    def __init__(self) -> None:
        self.version = 0
        self.weight = torch.zeros(1)

    def train(self, batch):
        self.version += 1
        self.weight = self.weight * 1.5 + batch.advantages_T.abs().sum()
        return {"actor/pg_loss": 0.0}

    def logprobs(self, rows):
        return torch.zeros(sum(len(row.ids) for row in rows))

    def gradient_norms(self, rows):
        return torch.ones(sum(len(row.ids) for row in rows))

    def tensors(self):
        return {"weight": self.weight}


class Critic:
    """Expects nothing, and learns nothing."""

    def values(self, rows):
        return torch.zeros(sum(len(row.ids) for row in rows))

    def train(self, batch):
        return {"critic/vf_loss": 0.0}


class Sender:
    """Sends the checksum of a policy, and none of its weights."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    async def publish(self, version: int) -> WeightUpdate:
        return WeightUpdate(version, checksum(self._policy.tensors()), {})

    async def retire(self, version: int) -> None: ...


class Rollout:
    """Scores by sample number, except for tasks in `dull`, whose samples all score the same.

    A group takes `delay(uid)` seconds; its first token has the version at its beginning, its second that at its end.
    """

    name = "rollout"

    def __init__(self, dull: Sequence[str] = (), delay: Callable[[str], float] = lambda uid: 0.0) -> None:
        self.dull = dull
        self.delay = delay
        self.version = 0
        self.journal: Journal | None = None
        self.asked: list[tuple[RolloutKind, str]] = []
        self.pasts: dict[str, RecoveredTask] = {}
        self.open = 0
        self.most_open = 0
        self.kept = 0
        self.slept = 0
        self.dies: Exception | None = None
        self.on_push: Callable[[int], None] = lambda version: None

    async def generate_sequences(self, tasks, *, kind=RolloutKind.TRAINING, seed=None) -> Batch:
        self.asked += [(kind, item.uid) for item in tasks]
        groups = []
        for item in tasks:
            begun = self.version
            await asyncio.sleep(self.delay(item.uid))
            groups.append(self._group(item, begun, self.version))
        return Batch(tuple(groups))

    async def generate_group(self, item, *, past: RecoveredTask = NOTHING_RECOVERED) -> Group:
        self.asked.append((RolloutKind.TRAINING, item.uid))
        self.pasts[item.uid] = past
        begun = self.version
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await asyncio.sleep(self.delay(item.uid))
        finally:
            self.open -= 1
        finished = {done.sample: done for done in past.finished}
        group = self._group(item, begun, self.version, past.attempt)
        for trajectory in group.trajectories:
            if self.journal is not None and trajectory.sample not in finished:
                self.journal.add(trajectory)
        return replace(group, trajectories=tuple(finished.get(done.sample, done) for done in group.trajectories))

    async def update_weights(self, update: WeightUpdate, *, running: OnWeightUpdate = "continue") -> ConfirmedWeights:
        self.version = update.version
        self.on_push(update.version)
        return ConfirmedWeights(update.checksum)

    async def watch(self) -> None:
        if self.dies is None:
            await asyncio.Event().wait()
        await asyncio.sleep(1.0)
        assert self.dies is not None
        raise self.dies

    async def keep(self) -> None:
        self.kept += 1

    async def sleep(self) -> None:
        self.slept += 1

    def _group(self, item, begun: int, ended: int, attempt: int = 0) -> Group:
        row = Row((1,), (5, 9), (1, 1), (-0.5, -0.5), (begun, ended))
        scores = [1.0 if item.uid in self.dull else float(sample) for sample in range(2)]
        done = Outcome.ended(StopReason.STOP)
        return Group(
            item,
            tuple(
                Trajectory(item.uid, at, (row,), done, Score(score), attempt=attempt) for at, score in enumerate(scores)
            ),
        )


class Checkpoints:
    def __init__(self, progress: Progress | None = None, save_freq: int = 0) -> None:
        self.progress = progress
        self.save_freq = save_freq
        self.saved: list[tuple[int, dict]] = []
        self.scores: dict[int, CheckpointScore] = {}

    def score(self, step, score):
        self.scores[step] = score

    def restore(self, policy, critic, reference=None):
        if self.progress is not None:
            policy.version = self.progress.version
        return self.progress

    def is_due(self, step: int) -> bool:
        return self.save_freq > 0 and step % self.save_freq == 0

    def save(self, policy, critic, step, state, reference=None):
        self.saved.append((step, state))


class View:
    def begin(self, total_steps): ...

    def watch(self, phase): ...

    def resume(self, step): ...

    def on_step(self, step, metrics): ...

    def on_validation(self, step, success): ...


class Trial:
    """One run of a schedule on fakes; `run_to_end` trains, in whatever loop runs it."""

    def __init__(
        self,
        directory: Path,
        rollout: Rollout,
        *words: str,
        checkpoints: Checkpoints | None = None,
        num_tasks: int = 5,
        validation=(),
        validation_rollout: Rollout | None = None,
        train_s: float = 0.0,
        on_push: Callable[[Trainer, int], None] = lambda run, version: None,
        trackers: Trackers | None = None,
        needs_push: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        config = loads(BASE, "test", words)
        assert isinstance(config, TrainConfig)
        self.config = config
        self.directory = directory
        self.rollout = rollout
        self.checkpoints = checkpoints or Checkpoints()
        self.policy = Policy()
        self.trained: list[tuple[int, tuple[Group, ...]]] = []
        """The version before each step, and its groups."""
        self._num_tasks = num_tasks
        self._validation = validation
        self._validation_rollout = validation_rollout
        self._train_s = train_s
        self._on_push = on_push
        self._weights_wanted = needs_push
        self._trackers = trackers or Trackers({})
        self.run: Trainer

    @contextmanager
    def assembled(self) -> Iterator[Trainer]:
        """The trainer of this run, which has not started."""
        source = TaskSource([task(f"t{at}") for at in range(self._num_tasks)], shuffle=False, seed=0)
        config = self.config
        with Journal.open(self.directory, max_mb=10) as journal:
            self.rollout.journal = journal
            self.rollout.on_push = lambda version: self._on_push(self.run, version)
            history = RunHistory.read(self.directory, settings=settings_digest(config))
            weights = WeightSync.of(config, Sender(self.policy))
            if self._weights_wanted is not None:
                weights.lock.requested = self._weights_wanted  # type: ignore[method-assign]
            self.run = Trainer(
                config,
                learner=TrialLearner(self, weights),
                rollout=self.rollout,
                weights=weights,
                tasks=load_feed(source, config.data),
                checkpoints=self.checkpoints,
                journal=journal,
                trackers=self._trackers,
                view=View(),
                history=history,
                validation_tasks=self._validation,
                validation_rollout=self._validation_rollout,
            )
            try:
                yield self.run
            finally:
                history.close()

    async def run_to_end(self) -> "Trial":
        with self.assembled() as trainer:
            try:
                await SCHEDULES[self.config.trainer.mode](trainer)
                await trainer.record_rest()
            except RunInterrupted:
                await trainer.save_interrupted()
                raise
        return self

    def networks(self) -> StepParts:
        config = self.config
        critic = Critic() if config.algorithm.needs_critic() else None
        return StepParts(self.policy, config.actor, config.algorithm, config.trainer, critic=critic)

    async def train(self, groups, **arguments):
        self.trained.append((self.policy.version, tuple(groups)))
        await asyncio.sleep(self._train_s)
        return train_step(self.networks(), groups, **arguments)

    @property
    def batches(self) -> list[list[str]]:
        """The uids that each step trained on."""
        return [[group.task.uid for group in groups] for _, groups in self.trained]

    def ages(self) -> list[int]:
        """How many versions behind each trained token was."""
        return [
            version - at
            for version, groups in self.trained
            for group in groups
            for item in group.trajectories
            for row in item.rows
            for at in row.versions
        ]


class TrialLearner(Learner):
    """Trains on the event loop, in the time that a trial gives it."""

    def __init__(self, trial: Trial, weights: WeightSync) -> None:
        super().__init__(trial.networks(), weights.lock)
        self._trial = trial

    async def train(self, groups, **arguments):
        async with self._lock.training():
            return await self._trial.train(groups, **arguments)
