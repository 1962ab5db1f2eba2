"""Failures are data: retried, counted, kept out of groups; and a spent budget ends the run with its cause."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rollouts import rollout, task, tasks
from tests.virtual_time import run
from treadle.aio import BoundedBuffer
from treadle.config import FailureConfig
from treadle.errors import (
    BudgetSpent,
    EngineFailure,
    EnvironmentFailure,
    LoopFailure,
    PromptFailure,
    RewardFailure,
    ToolFailure,
)
from treadle.rollout.dispatch import Dispatcher, FailureBudget, RolloutRequest
from treadle.rollout.protocol import Dropped, Job
from treadle.types import Outcome, SamplingParams, Score, StopReason, Trajectory

ORDER = RolloutRequest(SamplingParams(8), n=4)
FORGIVING = FailureConfig(max_failed_fraction=1.0, session_retries=0)


class Worker:
    """Fails where `fails(job)` says; remembers every attempt."""

    def __init__(self, fails=lambda job: None, seconds: float = 0.0) -> None:
        self.fails = fails
        self.seconds = seconds
        self.attempts: Counter[tuple[str, int]] = Counter()
        self.running = self.most = 0

    async def run(self, job: Job) -> Trajectory | Dropped:
        self.attempts[job.task.uid, job.sample] += 1
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.seconds)
        self.running -= 1
        failure = self.fails(job)
        if isinstance(failure, Dropped):
            return failure
        outcome = Outcome.failed(failure) if failure else Outcome.ended(StopReason.STOP)
        return Trajectory(job.task.uid, job.sample, (), outcome, attempt=job.attempt)


class Rewards:
    scores_groups = False

    def __init__(self, fails=lambda trajectory: False) -> None:
        self.fails = fails

    async def score(self, task, trajectory) -> Score:
        if self.fails(trajectory):
            raise RewardFailure("it crashed")
        return Score(float(hash((trajectory.uid, trajectory.sample)) % 7))


def dispatch(worker: Worker, failures: FailureConfig = FORGIVING, scorer=None, count: int = 3, **fields):
    async def main():
        dispatcher = Dispatcher(rollout(failures=failures, **fields), [worker], scorer)
        return await dispatcher.generate(tasks(count), ORDER)

    return run(main())


def test_groups_come_in_the_order_of_the_tasks_with_n_samples_each():
    batch = dispatch(Worker())
    assert [group.task.uid for group in batch.groups] == ["task0", "task1", "task2"]
    assert [trajectory.sample for trajectory in batch.groups[0].trajectories] == [0, 1, 2, 3]


def test_a_task_may_ask_for_its_own_number_of_samples():
    async def main():
        dispatcher = Dispatcher(rollout(), [Worker()], None)
        return await dispatcher.generate([task("a", n=2), task("b")], ORDER)

    assert [len(group.trajectories) for group in run(main()).groups] == [2, 4]


def test_one_bad_trajectory_never_fails_its_batch():
    batch = dispatch(Worker(lambda job: EngineFailure("gone") if job.sample == 1 else None))
    assert [len(group.survivors) for group in batch.groups] == [3, 3, 3]
    failed = batch.groups[0].trajectories[1]
    assert (failed.outcome.boundary, failed.reward) == ("engine", None)


def test_a_failed_attempt_is_made_again_as_often_as_the_config_says():
    worker = Worker(lambda job: EngineFailure("gone") if job.attempt < 2 else None)
    batch = dispatch(worker, FailureConfig(session_retries=2))
    assert all(trajectory.outcome.ok for trajectory in batch.trajectories)
    assert set(worker.attempts.values()) == {3}


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ([ToolFailure, EnvironmentFailure, LoopFailure], [0, 1, 2, 3]),
        ([EngineFailure, EngineFailure, EngineFailure], [0, 0, 0, 0]),
        ([EngineFailure, EnvironmentFailure, EngineFailure], [0, 0, 1, 1]),
    ],
)
def test_another_attempt_draws_other_noise_unless_it_was_the_engine_that_failed(failures, expected):
    redraws = []

    def fails(job: Job):
        if job.task.uid == "task0" and job.sample == 0:
            redraws.append(job.redraws)
            return failures[job.attempt]("broke") if job.attempt < len(failures) else None
        return None

    dispatch(Worker(fails), FailureConfig(session_retries=3, max_failed_fraction=1.0))
    assert redraws == expected


def test_a_sample_whose_reward_failed_is_drawn_with_other_noise_when_its_group_needs_it():
    redraws: dict[int, list[int]] = {}

    def note(job: Job):
        redraws.setdefault(job.sample, []).append(job.redraws)

    scorer = Rewards(lambda trajectory: trajectory.sample > 0 and trajectory.attempt == 0)
    failures = FailureConfig(max_failed_fraction=1.0, session_retries=0, min_group_size=4)
    dispatch(Worker(note), failures, scorer, count=1)
    assert redraws == {0: [0], 1: [0, 1], 2: [0, 1], 3: [0, 1]}


def test_a_prompt_that_cannot_be_rendered_is_not_tried_again():
    worker = Worker(lambda job: PromptFailure("too long"))
    dispatch(worker, FailureConfig(max_failed_fraction=1.0, session_retries=5))
    assert set(worker.attempts.values()) == {2}  # once, and once more for the group that has no survivor


def test_a_group_with_too_few_survivors_is_sampled_again():
    first = set()

    def fails(job: Job):
        key = job.task.uid, job.sample
        again = key in first
        first.add(key)
        return EngineFailure("gone") if job.sample > 0 and not again else None

    batch = dispatch(Worker(fails), FailureConfig(max_failed_fraction=1.0, session_retries=0, min_group_size=3))
    assert [len(group.survivors) for group in batch.groups] == [4, 4, 4]


def test_a_spent_budget_ends_the_run_with_its_causes():
    worker = Worker(lambda job: EngineFailure("the engine is on fire") if job.sample else None)
    with pytest.raises(BudgetSpent, match="engine is on fire"):
        dispatch(worker, FailureConfig(session_retries=0, max_failed_fraction=0.5, min_finished=4))


def test_a_spent_budget_names_the_command_that_shows_what_failed():
    budget = FailureBudget(FailureConfig(min_finished=1), Path("runs/my run"))
    with pytest.raises(BudgetSpent, match="see them with: treadle show 'runs/my run' --failed"):
        budget.add(Outcome.failed(EngineFailure("gone")))


def test_the_budget_is_not_judged_before_enough_have_finished():
    worker = Worker(lambda job: EngineFailure("gone"))
    batch = dispatch(worker, FailureConfig(session_retries=0, max_failed_fraction=0.1, min_finished=1000))
    assert not any(trajectory.outcome.ok for trajectory in batch.trajectories)


def test_a_scorer_that_fails_is_an_outcome_and_no_score():
    batch = dispatch(Worker(), scorer=Rewards(lambda trajectory: trajectory.sample == 2))
    failed = batch.groups[0].trajectories[2]
    assert (failed.outcome.boundary, failed.reward) == ("reward", None)
    assert all(trajectory.reward for trajectory in batch.groups[0].survivors)


def test_dropped_tasks_are_counted_and_have_no_group():
    batch = dispatch(Worker(lambda job: Dropped(job.task.uid, "long") if job.task.uid == "task1" else None))
    assert batch.dropped == ("task1",)
    assert [group.task.uid for group in batch.groups] == ["task0", "task2"]


def test_no_more_sessions_are_open_than_the_config_allows():
    worker = Worker(seconds=1.0)
    dispatch(worker, count=10, max_concurrent_sessions=7)
    assert worker.most == 7


def test_the_wait_for_a_place_is_in_the_timing():
    batch = dispatch(Worker(seconds=2.0), count=3, max_concurrent_sessions=4)
    assert sorted(item.timing.queue_s for item in batch.trajectories) == [0.0] * 4 + [2.0] * 4 + [4.0] * 4


def test_time_held_back_for_new_weights_is_in_the_timing():
    async def main():
        dispatcher = Dispatcher(rollout(), [Worker(seconds=1.0)], None)
        async with dispatcher.drained(restart=False):
            work = asyncio.ensure_future(dispatcher.generate(tasks(1), ORDER))
            await asyncio.sleep(3.0)
        return await work

    assert {item.timing.queue_s for item in run(main()).trajectories} == {3.0}


def test_as_many_sessions_are_open_as_fill_the_engines_where_the_config_does_not_say():
    worker = Worker(seconds=1.0)

    async def main():
        dispatcher = Dispatcher(rollout(max_num_seqs=3), [worker], None, replicas=2)
        return await dispatcher.generate(tasks(10), ORDER)

    run(main())
    assert worker.most == 12


def test_a_stream_leaves_out_what_is_done():
    async def main():
        feed: BoundedBuffer = BoundedBuffer(100)
        order = RolloutRequest(SamplingParams(8), n=2, done={("task0", 0), ("task1", 1)})
        await Dispatcher(rollout(), [Worker()], None).stream(tasks(2), order, feed)
        return [(item.uid, item.sample) for item in await feed.take()]

    assert sorted(run(main())) == [("task0", 1), ("task1", 0)]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    rate=st.sampled_from([0.01, 0.1, 0.3, 0.5]),
    kind=st.sampled_from(["engine", "reward"]),
)
def test_survivors_score_as_if_the_failed_samples_had_never_existed(seed, rate, kind):
    """Chaos: whatever fails, the statistics of a group's survivors are those of a run without the failed samples."""

    def unlucky(uid: str, sample: int) -> bool:
        return hash((seed, uid, sample)) % 1000 < 1000 * rate

    def engine_fails(job: Job) -> EngineFailure | None:
        return EngineFailure("x") if kind == "engine" and unlucky(job.task.uid, job.sample) else None

    rewards = Rewards(lambda trajectory: kind == "reward" and unlucky(trajectory.uid, trajectory.sample))
    chaotic = dispatch(Worker(engine_fails), FORGIVING, scorer=rewards, count=8)
    calm = dispatch(Worker(), FORGIVING, scorer=Rewards(), count=8)
    for stormy, still in zip(chaotic.groups, calm.groups, strict=True):
        expected = [item.reward for item in still.trajectories if not unlucky(item.uid, item.sample)]
        assert [item.reward for item in stormy.survivors] == expected
