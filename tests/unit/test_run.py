"""A run around its steps: tasks in order, groups with a signal, validation, checkpoints, and stopping without loss."""

import asyncio
from pathlib import Path

import pytest
import torch

from tests.rollouts import task
from treadle.checkpoint.store import Progress
from treadle.config import TrainConfig, loads
from treadle.data.tasks import TaskSource
from treadle.errors import RunError
from treadle.journal import Journal, JournalReader
from treadle.model.checksum import checksum
from treadle.observe.trackers import Trackers
from treadle.rollout.service import Kind
from treadle.trainer.replay import replay
from treadle.trainer.run import Interrupted, Parts, Run
from treadle.trainer.step import StepParts
from treadle.trainer.sync import train_sync
from treadle.types import Batch, Group, Outcome, Row, Score, StopReason, Trajectory
from treadle.weights.push import PushReport

ROW = Row((1,), (5, 9), (1, 1), (-0.5, -0.5), (0, 0))
BASE = """
model: {path: unused}
data: {train_files: unused, train_batch_size: 2}
rollout: {n: 2}
actor: {ppo_mini_batch_size: 2}
trainer: {total_training_steps: 3, val_before_train: false}
"""


class Policy:
    """Counts; its only weight is the sum of the advantages it trained on."""

    def __init__(self) -> None:
        self.version = 0
        self.weight = torch.zeros(1)

    def train(self, batch):
        self.version += 1
        self.weight = self.weight + batch.advantages_T.abs().sum()
        return {"actor/pg_loss": 0.0}

    def logprobs(self, rows):
        return torch.zeros(sum(len(row.ids) for row in rows))

    def tensors(self):
        return {"weight": self.weight}


class Rollout:
    """Scores by sample number, except for tasks in `dull`, whose samples all score the same."""

    def __init__(self, dull=()) -> None:
        self.dull = dull
        self.journal: Journal | None = None
        self.asked: list[tuple[Kind, tuple[str, ...], int | None]] = []

    async def generate_sequences(self, tasks, *, kind=Kind.TRAINING, seed=None) -> Batch:
        self.asked.append((kind, tuple(item.uid for item in tasks), seed))
        batch = Batch(tuple(self._group(item) for item in tasks))
        if self.journal is not None and kind is Kind.TRAINING:
            for trajectory in batch.trajectories:
                self.journal.add(trajectory)
        return batch

    def _group(self, item) -> Group:
        done = Outcome.ended(StopReason.STOP)
        scores = [1.0 if item.uid in self.dull else float(sample) for sample in range(2)]
        return Group(
            item, tuple(Trajectory(item.uid, at, (ROW,), done, Score(score)) for at, score in enumerate(scores))
        )


class Checkpoints:
    def __init__(self, progress: Progress | None = None) -> None:
        self.progress = progress
        self.saved: list[tuple[int, dict]] = []

    def restore(self, policy, critic):
        if self.progress is not None:
            policy.version = self.progress.version
        return self.progress

    def is_due(self, step: int) -> bool:
        return False

    def save(self, policy, critic, step, state):
        self.saved.append((step, state))


class View:
    def watch(self, phase): ...

    def resume(self, step): ...

    def on_step(self, step, metrics): ...

    def on_validation(self, step, success): ...


def run_of(tmp_path: Path, rollout: Rollout, *words: str, checkpoints=None, tasks=5, validation=(), stop_at=None):
    """Train with these parts; the run, and the journal's events by kind."""
    config = loads(BASE, "test", words)
    assert isinstance(config, TrainConfig)
    checkpoints = checkpoints or Checkpoints()
    policy = Policy()

    async def push(version: int) -> PushReport:
        if version == stop_at:
            run.request_stop()
        return PushReport(version, checksum(policy.tensors()), 0, 0.0, 0.0)

    async def main() -> None:
        nonlocal run
        source = TaskSource([task(f"t{at}") for at in range(tasks)], shuffle=False, seed=0)
        with Journal.open(tmp_path, max_mb=10) as journal:
            rollout.journal = journal
            step = StepParts(policy, config.actor, config.algorithm, config.trainer)
            parts = Parts(step, rollout, push, source, validation, checkpoints, journal, Trackers({}), View())
            run = Run(config, parts)
            await train_sync(run)

    run: Run = None  # type: ignore[assignment]
    asyncio.run(main())
    return run


def test_every_step_draws_the_next_tasks_with_noise_of_its_own(tmp_path):
    rollout = Rollout()
    run_of(tmp_path, rollout)
    assert [uids for _, uids, _ in rollout.asked] == [("t0", "t1"), ("t2", "t3"), ("t4", "t0@1")]
    assert [seed for _, _, seed in rollout.asked] == [42, 43, 44]


def test_the_journal_says_what_each_step_trained_on_and_which_weights_came_of_it(tmp_path):
    run_of(tmp_path, Rollout())
    with JournalReader.open(tmp_path) as reader:
        steps = reader.events(kind="step")
        weights = reader.events(kind="weights")
        assert reader.task("t0@1") is not None
    assert [event.fields["groups"] for event in steps][2] == [["t4", [0, 1]], ["t0@1", [0, 1]]]
    assert [event.fields["version"] for event in weights] == [1, 2, 3]
    assert len({event.fields["checksum"] for event in weights}) == 3


@pytest.mark.parametrize("estimator", ["grpo", "remax"])
def test_a_run_replays_to_the_same_weights_and_other_trajectories_do_not(tmp_path, estimator):
    run_of(tmp_path, Rollout(), f"algorithm.adv_estimator={estimator}")
    config = loads(BASE, "test", [f"algorithm.adv_estimator={estimator}"])
    parts = StepParts(Policy(), config.actor, config.algorithm, config.trainer)
    assert [step.equal for step in replay(parts, tmp_path)] == [True, True, True]
    with Journal.open(tmp_path, max_mb=10) as journal:
        done = Outcome.ended(StopReason.STOP)
        journal.add(Trajectory("t2", 0, (ROW,), done, Score(7.0), attempt=1))
    parts = StepParts(Policy(), config.actor, config.algorithm, config.trainer)
    assert [step.equal for step in replay(parts, tmp_path)] == [True, False, False]


def test_a_directory_without_steps_cannot_be_replayed(tmp_path):
    Journal.open(tmp_path, max_mb=10).close_blocking()
    config = loads(BASE)
    parts = StepParts(Policy(), config.actor, config.algorithm, config.trainer)
    with pytest.raises(RunError, match="no training steps"):
        list(replay(parts, tmp_path))


def test_groups_without_a_signal_are_replaced_by_exactly_as_many(tmp_path):
    rollout = Rollout(dull=("t0", "t2"))
    words = ("algorithm.filter_groups.enable=true", "trainer.total_training_steps=1")
    run_of(tmp_path, rollout, *words)
    assert [uids for _, uids, _ in rollout.asked] == [("t0", "t1"), ("t2",), ("t3",)]


def test_dynamic_sampling_gives_up_at_its_bound_and_says_so(tmp_path):
    rollout = Rollout(dull=tuple(f"t{at}" for at in range(5)))
    words = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=2")
    with pytest.raises(RunError, match="2 batches gave 0 groups with a signal, 2 are needed"):
        run_of(tmp_path, rollout, *words)


def test_validation_happens_before_between_and_after(tmp_path):
    words = ("trainer.val_before_train=true", "trainer.test_freq=2", "data.val_files=unused")
    run = run_of(tmp_path, Rollout(), *words, validation=(task("v"),))
    assert [found.step for found in run.validations] == [0, 2, 3]
    assert run.validations[0].success == 0.5


def test_val_only_validates_and_trains_nothing(tmp_path):
    checkpoints = Checkpoints()
    words = ("trainer.val_only=true", "data.val_files=unused")
    run = run_of(tmp_path, Rollout(), *words, checkpoints=checkpoints, validation=(task("v"),))
    assert (run.step, len(run.validations), checkpoints.saved) == (0, 1, [])


def test_a_resumed_run_goes_on_with_the_next_tasks(tmp_path):
    first = Checkpoints()
    run_of(tmp_path / "a", Rollout(), "trainer.total_training_steps=2", checkpoints=first)
    (step, state), rollout = first.saved[-1], Rollout()
    run_of(tmp_path / "b", rollout, checkpoints=Checkpoints(Progress(step, 2, state)))
    assert [(uids, seed) for _, uids, seed in rollout.asked] == [(("t4", "t0@1"), 44)]


def test_a_stop_ends_the_run_after_the_step_that_is_under_way(tmp_path):
    with pytest.raises(Interrupted):
        run_of(tmp_path, Rollout(), stop_at=2)
    with JournalReader.open(tmp_path) as reader:
        assert len(reader.events(kind="step")) == 2


def test_remax_samples_a_greedy_baseline_for_each_group(tmp_path):
    rollout = Rollout()
    run_of(tmp_path, rollout, "algorithm.adv_estimator=remax", "trainer.total_training_steps=1")
    assert rollout.asked[1] == (Kind.GREEDY, ("greedy/t0", "greedy/t1"), None)
