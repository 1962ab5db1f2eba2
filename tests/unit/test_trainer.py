"""A run around its steps: tasks in order, groups with a signal, validation, checkpoints, and stopping without loss."""

import asyncio
from dataclasses import replace

import pytest

from tests import virtual_time
from tests.rollouts import task
from tests.schedules import BASE, Checkpoints, Policy, Rollout, Trial, words_for
from treadle.checkpoint.store import Progress
from treadle.config import loads
from treadle.errors import EngineFailure, NotFiniteError, RunError
from treadle.inspect.replay import replay
from treadle.journal import Journal, JournalReader
from treadle.observe.trackers import Trackers
from treadle.rollout.completion_log import NOTHING_RECOVERED
from treadle.rollout.service import RolloutKind
from treadle.trainer.state import RunInterrupted
from treadle.trainer.step import StepParts
from treadle.types import Outcome, Row, Score, StopReason, Trajectory


def run_of(directory, rollout: Rollout, *words: str, **kwargs) -> Trial:
    """Train in the synchronous schedule."""
    return asyncio.run(Trial(directory, rollout, *words, **kwargs).run_to_end())


def test_every_step_draws_the_next_tasks_and_an_epoch_renames_them(tmp_path):
    trial = run_of(tmp_path, Rollout())
    assert trial.batches == [["t0", "t1"], ["t2", "t3"], ["t4", "t0@1"]]


def test_the_journal_says_what_each_step_trained_on_and_which_weights_came_of_it(tmp_path):
    run_of(tmp_path, Rollout())
    with JournalReader.open(tmp_path) as reader:
        steps = reader.events(kind="step")
        weights = reader.events(kind="weights")
        assert reader.task("t0@1") is not None
    assert [event.fields["groups"] for event in steps][2] == [["t4", [[0, 0], [1, 0]]], ["t0@1", [[0, 0], [1, 0]]]]
    assert [event.fields["positions"] for event in steps] == [[0, 1], [2, 3], [4, 5]]
    assert [event.fields["version"] for event in weights] == [1, 2, 3]
    assert len({event.fields["checksum"] for event in weights}) == 3


@pytest.mark.parametrize("estimator", ["grpo", "remax"])
def test_a_run_replays_to_the_same_weights_and_other_trajectories_do_not(tmp_path, estimator):
    run_of(tmp_path, Rollout(), f"algorithm.adv_estimator={estimator}")
    config = loads(BASE, "test", [f"algorithm.adv_estimator={estimator}"])
    parts = StepParts(Policy(), config.actor, config.algorithm, config.trainer)
    assert [step.equal for step in replay(parts, tmp_path)] == [True, True, True]
    with Journal.open(tmp_path, max_mb=10) as journal:
        row = Row((1,), (5, 9), (1, 1), (-0.5, -0.5), (0, 0))
        journal.add(Trajectory("t2", 0, (row,), Outcome.ended(StopReason.STOP), Score(7.0)))
    parts = StepParts(Policy(), config.actor, config.algorithm, config.trainer)
    assert [step.equal for step in replay(parts, tmp_path)] == [True, False, False]


def test_a_directory_without_steps_cannot_be_replayed(tmp_path):
    Journal.open(tmp_path, max_mb=10).close_blocking()
    config = loads(BASE)
    parts = StepParts(Policy(), config.actor, config.algorithm, config.trainer)
    with pytest.raises(RunError, match="no training steps"):
        list(replay(parts, tmp_path))


def test_validation_happens_before_between_and_after(tmp_path):
    words = ("trainer.val_before_train=true", "trainer.test_freq=2", "data.val_files=unused")
    trial = run_of(tmp_path, Rollout(), *words, validation=(task("v"),))
    assert [found.step for found in trial.run.validations] == [0, 2, 3]
    assert trial.run.validations[0].success == 0.5


def test_the_first_transcripts_of_a_validation_reach_the_trackers(tmp_path):
    sent = []

    class Sink:
        def log(self, step, metrics): ...

        def log_texts(self, step, texts):
            sent.append((step, texts))

        def close(self): ...

    words = ("logging.log_val_generations=1", "data.val_files=unused", "trainer.total_training_steps=1")
    run_of(tmp_path, Rollout(), *words, validation=(task("v"), task("w")), trackers=Trackers({"sink": Sink()}))
    assert sent == [(1, ["validation-1/v, completed, reward 0"])]


def test_what_counts_as_solved_is_a_key(tmp_path):
    words = ("trainer.val_only=true", "data.val_files=unused", "reward.success_threshold=0")
    trial = run_of(tmp_path, Rollout(), *words, validation=(task("v"),))
    assert trial.run.validations[0].success == 1.0


def test_val_only_validates_and_trains_nothing(tmp_path):
    words = ("trainer.val_only=true", "data.val_files=unused")
    trial = run_of(tmp_path, Rollout(), *words, validation=(task("v"),))
    assert (trial.run.step, len(trial.run.validations), trial.checkpoints.saved) == (0, 1, [])


def test_a_resumed_run_goes_on_with_the_next_tasks(tmp_path):
    first = run_of(tmp_path / "a", Rollout(), "trainer.total_training_steps=2")
    step, state = first.checkpoints.saved[-1]
    second = run_of(tmp_path / "b", Rollout(), checkpoints=Checkpoints(Progress(step, 2, state)))
    assert second.batches == [["t4", "t0@1"]]


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async"])
def test_a_run_that_is_done_begins_no_task_when_it_is_started_again(tmp_path, mode):
    words = words_for(mode, "trainer.total_training_steps=2")
    first = run_of(tmp_path / "a", Rollout(), *words)
    step, state = first.checkpoints.saved[-1]
    run_of(tmp_path / "b", Rollout(), *words, checkpoints=Checkpoints(Progress(step, 2, state)))
    with JournalReader.open(tmp_path / "b") as reader:
        assert reader.events(kind="admit") == ()


def test_a_stop_ends_the_run_after_the_step_that_is_under_way(tmp_path):
    def stop(run, version):
        if version == 2:
            run.request_stop()

    with pytest.raises(RunInterrupted):
        run_of(tmp_path, Rollout(), on_push=stop)
    with JournalReader.open(tmp_path) as reader:
        assert len(reader.events(kind="step")) == 2


def test_engines_sleep_while_the_policy_trains_on_their_devices_where_asked(tmp_path):
    assert run_of(tmp_path / "a", Rollout(), "rollout.free_cache_engine=true").rollout.slept == 3
    assert run_of(tmp_path / "b", Rollout()).rollout.slept == 0


WARMUP = ("algorithm.adv_estimator=gae", "trainer.critic_warmup=1")
"""The first step trains the critic alone: it leaves the policy's version as it was."""


def test_engines_that_slept_wake_after_a_step_of_the_critic_alone(tmp_path):
    class Sleeper(Rollout):
        """As vLLM at level 2: without weights from `sleep` to the next push."""

        asleep = False

        async def generate_group(self, item, *, past=NOTHING_RECOVERED):
            if self.asleep:
                raise EngineFailure("its requests wait for weights, until their deadlines")
            return await super().generate_group(item, past=past)

        async def sleep(self) -> None:
            self.asleep = True
            await super().sleep()

        async def update_weights(self, update, *, running="continue"):
            self.asleep = False
            return await super().update_weights(update, running=running)

    trial = run_of(tmp_path, Sleeper(), *WARMUP, "rollout.free_cache_engine=true")
    assert (trial.rollout.slept, trial.run.version, trial.run.step) == (3, 2, 3)


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async"])
def test_an_engine_that_dies_in_a_step_of_the_critic_alone_gets_its_weights(tmp_path, mode):
    restored = []

    class Restarted(Rollout):
        """Its replacement waits for weights that engines have, as the local runtime's does."""

        async def generate_group(self, item, *, past=NOTHING_RECOVERED):
            if item.uid == "t4":
                async with trial.run._weights.lock.synced() as version:
                    restored.append(version)
            return await super().generate_group(item, past=past)

    words = words_for(mode, *WARMUP[:1], "trainer.critic_warmup=3", "trainer.total_training_steps=4")
    trial = Trial(tmp_path, Restarted(), *words, train_s=10.0)
    virtual_time.run(trial.run_to_end())
    assert (restored, trial.run.version, trial.run.step) == ([0], 1, 4)


def test_a_greedy_sample_that_failed_is_no_baseline_of_zero(tmp_path, caplog):
    class Broken(Rollout):
        async def generate_sequences(self, tasks, *, kind=RolloutKind.TRAINING, seed=None):
            batch = await super().generate_sequences(tasks, kind=kind, seed=seed)
            failed = Outcome.failed(EngineFailure("gone"))
            first, *others = batch.groups
            lost = tuple(replace(item, outcome=failed, reward=None) for item in first.trajectories)
            return replace(batch, groups=(replace(first, trajectories=lost), *others))

    run_of(tmp_path, Broken(), "algorithm.adv_estimator=remax", "trainer.total_training_steps=1")
    with JournalReader.open(tmp_path) as reader:
        assert reader.events(kind="step")[0].fields["baselines"] == [None, 0.0]
        assert "the greedy sample of 1 of 2 groups failed" in caplog.text
    config = loads(BASE, "test", ["algorithm.adv_estimator=remax"])
    parts = StepParts(Policy(), config.actor, config.algorithm, config.trainer)
    assert [step.equal for step in replay(parts, tmp_path)] == [True]


def test_remax_samples_a_greedy_baseline_for_each_group(tmp_path):
    rollout = Rollout()
    run_of(tmp_path, rollout, "algorithm.adv_estimator=remax", "trainer.total_training_steps=1")
    assert rollout.asked[2:] == [(RolloutKind.GREEDY, "greedy/t0"), (RolloutKind.GREEDY, "greedy/t1")]


def test_a_batch_that_ends_a_run_by_its_numbers_is_set_aside_and_drawn_again(tmp_path, caplog):
    class Spoiled(Trial):
        async def train(self, groups, **arguments):
            if not any(item.attempt for group in groups for item in group.trajectories):
                raise NotFiniteError("actor: the gradient of training step 1 is nan")
            return await super().train(groups, **arguments)

    with pytest.raises(NotFiniteError):
        asyncio.run(Spoiled(tmp_path, Rollout()).run_to_end())
    assert "set aside" not in caplog.text
    again = Rollout()
    trial = Spoiled(tmp_path, again, "trainer.total_training_steps=1")
    asyncio.run(trial.run_to_end())
    assert trial.run.step == 1
    assert "2 tasks such as t0, are set aside and drawn again" in caplog.text


def test_steps_whose_rewards_are_all_equal_and_batches_larger_than_the_data_are_said(tmp_path, capsys):
    rollout = Rollout()
    rollout.dull = {"t0", "t0@1", "t0@2", "t0@3", "t0@4", "t0@5"}
    trial = run_of(tmp_path, rollout, num_tasks=1)
    equal, oversized = trial.run.notes
    assert equal == (
        "in 3 of 3 steps all samples of each task had the same reward: "
        "estimators that compare them learn nothing from it"
    )
    assert oversized.startswith("data.train_batch_size 2 is more than the 1 tasks of data.train_files")
    said = capsys.readouterr().err
    assert said.count("all samples of each task have the same reward (mean 1)") == 1, "once for a run of such steps"
    assert f"note: {oversized}" in said
    assert run_of(tmp_path / "b", Rollout()).run.notes == ()


def test_the_best_checkpoint_is_by_validation_or_without_one_by_reward(tmp_path):
    validated = asyncio.run(Trial(tmp_path / "one", Rollout(), validation=[task("v")]).run_to_end())
    assert {step: score.metric for step, score in validated.checkpoints.scores.items()} == {3: "validation/success"}
    plain = asyncio.run(Trial(tmp_path / "two", Rollout()).run_to_end())
    assert {step: score.metric for step, score in plain.checkpoints.scores.items()} == dict.fromkeys(
        (1, 2, 3), "reward/mean"
    )
    assert plain.checkpoints.scores[1].value == 0.5
