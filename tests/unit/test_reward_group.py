"""Rewards of scope group: all samples of a task scored at once, by functions, judges and the length penalty."""

import asyncio
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.configs import TRAINING, mistakes
from tests.rollouts import rollout, save_model, task
from tests.virtual_time import run
from treadle.aio import BoundedBuffer
from treadle.config import FailureConfig, load
from treadle.config.reward import RewardConfig, RewardFunctionConfig
from treadle.errors import ConfigError, EngineFailure, MisuseError, RewardFailure
from treadle.journal import Journal, JournalReader
from treadle.reward.builtin import length_penalty
from treadle.reward.result import Fault, ScoreFailure
from treadle.reward.scorer import Scorer
from treadle.rollout.completion_log import RecoveredTask
from treadle.rollout.dispatch import Dispatcher, RolloutRequest
from treadle.rollout.protocol import Dropped, Job
from treadle.rollout.run import RolloutResult, run_rollout
from treadle.types import Group, Outcome, Row, SamplingParams, Score, StopReason, Task, Trajectory

HERE = __name__
CALLS: list[Any] = []


def make_task() -> Task:
    return Task("t", ({"role": "user", "content": "6 * 7?"},), "42", extra={"level": 3})


def make_trajectory(sample: int, answer: str, tokens: int = 0, reward: Score | None = None) -> Trajectory:
    messages = ({"role": "user", "content": "?"}, {"role": "assistant", "content": answer})
    ids = tuple(range(tokens))
    row = Row((1,), ids, (1,) * tokens, (0.0,) * tokens, (0,) * tokens)
    return Trajectory("t", sample, (row,), Outcome.ended(StopReason.STOP), reward, messages)


def make_reward(*paths: str, sample: str | None = "exact_match", **keys: Any) -> RewardConfig:
    functions = {path.rpartition(":")[2]: RewardFunctionConfig(path=path, scope="group", weight=0.5) for path in paths}
    if sample:
        functions[sample] = RewardFunctionConfig(path=sample)
    return RewardConfig(**{"num_workers": 0, "retries": 0, "functions": functions, **keys})


async def score_all(reward: RewardConfig, *answers: str) -> list[Score]:
    async with await Scorer.create(reward) as scorer:
        group = [make_trajectory(at, answer) for at, answer in enumerate(answers)]
        scored = [replace(item, reward=await scorer.score(make_task(), item)) for item in group]
        return await scorer.score_group(make_task(), scored)


def fail(reward: RewardConfig, *answers: str) -> ScoreFailure:
    with pytest.raises(ScoreFailure) as caught:
        run(score_all(reward, *answers))
    return caught.value


def rank(responses: list[str], ground_truth: str, task: Task, trajectories: list[Trajectory]) -> list[dict[str, Any]]:
    """The share of answers that are no longer than each."""
    assert ground_truth == "42" and task.extra == {"level": 3} and len(trajectories) == len(responses)
    shares = [sum(len(other) <= len(mine) for other in responses) / len(responses) for mine in responses]
    return [{"score": share, "rank": at} for at, share in enumerate(shares)]


async def see_scores(scores: list[float], parts: list[dict[str, float]], messages: list[Any]) -> list[float]:
    await asyncio.sleep(0)
    assert [item[-1]["role"] for item in messages] == ["assistant"] * len(messages)
    return [10 * score + part["exact_match"] for score, part in zip(scores, parts, strict=True)]


def too_few(responses: list[str]) -> list[float]:
    return [1.0]


def one_number(responses: list[str]) -> float:
    return 1.0


def broken(responses: list[str]) -> list[float]:
    CALLS.append(len(responses))
    raise KeyError("no such thing")


def single(response: str) -> float:
    return 1.0


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_function_of_scope_group_sees_all_samples_and_gives_each_a_score(num_workers):
    reward = make_reward(f"{HERE}:rank", num_workers=num_workers)
    scores = asyncio.run(score_all(reward, "42", "4", "nonsense"))
    assert [score.value for score in scores] == [1 + 0.5 * 2 / 3, 0.5 * 1 / 3, 0.5 * 3 / 3]
    assert scores[0].parts == {"rank": 2 / 3, "exact_match": 1.0}
    assert [score.extra for score in scores] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


def test_it_sees_what_functions_of_scope_sample_gave():
    scores = run(score_all(make_reward(f"{HERE}:see_scores"), "42", "41"))
    assert [score.parts["see_scores"] for score in scores] == [11.0, 0.0]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("too_few", "no_result: reward function 'too_few' returned 1 scores for 2 samples"),
        ("one_number", "no_result: reward function 'one_number' has scope group and returned float 1.0"),
        ("broken", "exception: reward function 'broken' raised KeyError"),
    ],
)
def test_what_is_no_list_of_scores_is_a_failure_of_the_group(name, says):
    assert str(fail(make_reward(f"{HERE}:{name}"), "42", "41")).startswith(says)


def test_a_function_of_scope_group_is_tried_again_as_any_other():
    CALLS.clear()
    fail(make_reward(f"{HERE}:broken", retries=2), "42", "41")
    assert CALLS == [2, 2, 2]


def test_a_sum_outside_the_bounds_is_known_only_with_the_group():
    reward = make_reward(f"{HERE}:rank", bounds=(0.0, 1.2))
    assert fail(reward, "42", "41").fault is Fault.OUT_OF_BOUNDS
    assert [score.value for score in run(score_all(replace_bounds(reward, 1.5), "42", "41"))] == [1.5, 0.5]


def replace_bounds(reward: RewardConfig, high: float) -> RewardConfig:
    return RewardConfig(**{**reward.values(), "bounds": (0.0, high)})


@pytest.mark.parametrize(
    ("path", "scope", "fix"), [("single", "group", "set scope: sample"), ("rank", "sample", "set scope: group")]
)
def test_a_function_of_the_other_scope_is_refused_by_name(path, scope, fix):
    reward = RewardConfig(num_workers=0, functions={"f": RewardFunctionConfig(path=f"{HERE}:{path}", scope=scope)})
    with pytest.raises(ConfigError, match=fix):
        run(score_all(reward, "42"))


# The length penalty


def independent_penalty(lengths: list[int], correct: list[bool]) -> list[float]:
    """Kimi k1.5, section 2.3.3, written down once more: exact fractions, one answer at a time."""
    from fractions import Fraction

    result = []
    for length, right in zip(lengths, correct, strict=True):
        if len(set(lengths)) == 1:
            result.append(0.0)
            continue
        share = Fraction(1, 2) - Fraction(length - sorted(lengths)[0], sorted(lengths)[-1] - sorted(lengths)[0])
        result.append(float(share if right or share < 0 else 0))
    return result


@given(st.lists(st.tuples(st.integers(0, 5000), st.booleans()), min_size=1, max_size=9))
def test_the_length_penalty_is_that_of_kimi(samples):
    lengths, correct = [length for length, _ in samples], [right for _, right in samples]
    group = [make_trajectory(at, "", length) for at, length in enumerate(lengths)]
    scores = [float(right) for right in correct]
    parts = [{"answer": score, "format": 1.0} for score in scores]
    expected = pytest.approx(independent_penalty(lengths, correct), abs=1e-12)
    assert length_penalty.score(group, scores, parts) == expected
    shifted = [score + 0.5 for score in scores]
    assert length_penalty.score(group, shifted, parts, part="answer") == expected
    assert length_penalty.score(group, shifted, parts, threshold=1.5) == expected


def test_the_length_penalty_by_hand():
    group = [make_trajectory(at, "", length) for at, length in enumerate([100, 200, 300, 100])]
    assert length_penalty.score(group, [1.0, 1.0, 1.0, 0.0], [{}] * 4) == [0.5, 0.0, -0.5, 0.0]
    assert length_penalty.score(group, [0.0, 0.0, 0.0, 0.0], [{}] * 4) == [0.0, 0.0, -0.5, 0.0]


@pytest.mark.parametrize(
    ("functions", "words", "says"),
    [
        ("{short: {path: length_penalty}}", (), "needs a function or model of scope sample"),
        (
            "{right: {path: math}, short: {path: length_penalty, kwargs: {part: answer}}}",
            (),
            "'answer' is no part of scope sample; there are right",
        ),
        (
            "{right: {path: math}, short: {path: length_penalty, scope: sample}}",
            (),
            "sample, but length_penalty has scope group",
        ),
        ("{right: {path: math, scope: group}}", (), "group, but math has scope sample"),
        (
            "{right: {path: math}, short: {path: length_penalty}}",
            ("algorithm.adv_estimator=remax",),
            "remax compares with a greedy answer",
        ),
    ],
)
def test_configs_in_which_a_group_cannot_be_scored_are_refused(functions, words, says):
    text = TRAINING.replace("{answer: {path: exact_match}}", functions)
    assert any(says in item.problem for item in mistakes(*words, text=text))


# The rollout

ORDER = RolloutRequest(SamplingParams(8), n=4)


class Worker:
    """Samples end after as many seconds as their number; fails where `fails(job)` says."""

    def __init__(self, fails=lambda job: None) -> None:
        self.fails, self.attempts = fails, Counter[int]()

    async def run(self, job: Job) -> Trajectory | Dropped:
        self.attempts[job.sample] += 1
        await asyncio.sleep(job.sample)
        failure = self.fails(job)
        outcome = Outcome.failed(failure) if failure else Outcome.ended(StopReason.STOP)
        return Trajectory(job.task.uid, job.sample, (), outcome, attempt=job.attempt)


class GroupRewards:
    """A sample gets its number, its group adds 10 for each survivor."""

    scores_groups = True

    def __init__(self, fails=lambda call: False) -> None:
        self.fails, self.seen = fails, []

    async def score(self, task, trajectory) -> Score:
        return Score(float(trajectory.sample))

    async def score_group(self, task, trajectories) -> list[Score]:
        self.seen.append([(item.sample, item.reward.value) for item in trajectories])
        if self.fails(len(self.seen)):
            raise RewardFailure("it crashed")
        return [Score(item.reward.value + 10.0 * len(trajectories)) for item in trajectories]


def dispatcher(worker: Worker, scorer: GroupRewards, journal=None, places: int = 64, **failures) -> Dispatcher:
    keys = FailureConfig(**{"max_failed_fraction": 1.0, "session_retries": 0, **failures})
    return Dispatcher(rollout(failures=keys, max_concurrent_sessions=places), [worker], scorer, journal)


def test_a_group_is_scored_once_its_samples_have_ended_and_without_those_that_failed():
    scorer = GroupRewards()
    worker = Worker(lambda job: EngineFailure("gone") if job.sample == 2 else None)
    batch = run(dispatcher(worker, scorer, places=2).generate([task("a")], ORDER))
    assert scorer.seen == [[(0, 0.0), (1, 1.0), (3, 3.0)]]
    rewards = [item.reward and item.reward.value for item in batch.trajectories]
    assert rewards == [30.0, 31.0, None, 33.0]


def test_a_failure_of_the_group_is_a_reward_failure_of_each_sample():
    batch = run(dispatcher(Worker(), GroupRewards(lambda call: True)).generate([task("a")], ORDER))
    assert [item.outcome.boundary for item in batch.trajectories] == ["reward"] * 4
    assert [item.reward for item in batch.trajectories] == [None] * 4


def test_too_few_survivors_are_scored_only_with_those_that_are_drawn_again():
    scorer = GroupRewards()
    worker = Worker(lambda job: EngineFailure("gone") if job.sample < 3 and job.attempt == 0 else None)
    batch = run(dispatcher(worker, scorer, min_group_size=2).generate([task("a")], ORDER))
    assert [len(seen) for seen in scorer.seen] == [4]
    assert all(item.outcome.ok for item in batch.trajectories) and worker.attempts == {0: 2, 1: 2, 2: 2, 3: 1}


def test_a_group_that_could_not_be_scored_is_drawn_again_where_survivors_are_needed():
    scorer, worker = GroupRewards(lambda call: call == 1), Worker()
    batch = run(dispatcher(worker, scorer, min_group_size=2).generate([task("a")], ORDER))
    assert [item.reward.value for item in batch.trajectories] == [40.0, 41.0, 42.0, 43.0]
    assert set(worker.attempts.values()) == {2}


def test_a_streamed_sample_waits_for_its_siblings():
    async def main() -> list[tuple[float, int, float]]:
        feed: BoundedBuffer[Trajectory | Dropped] = BoundedBuffer(8)
        work = asyncio.create_task(dispatcher(Worker(), GroupRewards()).stream([task("a")], ORDER, feed))
        came = []
        while ready := await feed.take():
            came += [(asyncio.get_running_loop().time(), item.sample, item.reward.value) for item in ready]
        await work
        return came

    came = run(main())
    assert [(sample, reward) for _, sample, reward in came] == [(0, 40.0), (1, 41.0), (2, 42.0), (3, 43.0)]
    assert len({time for time, _, _ in came}) == 1


def test_a_stream_of_half_a_group_is_refused():
    async def main() -> None:
        order = replace(ORDER, done={("a", 0)})
        await dispatcher(Worker(), GroupRewards()).stream([task("a")], order, BoundedBuffer(8))

    with pytest.raises(MisuseError, match="1 of 4 samples of a are done"):
        run(main())


def test_samples_are_recorded_when_they_end_and_never_with_half_a_score(tmp_path):
    """Whenever a run is killed, a finished sample is in the journal: without a score until its group has one."""

    async def main(journal: Journal) -> None:
        work = asyncio.create_task(dispatcher(Worker(), GroupRewards(), journal).generate([task("a")], ORDER))
        await asyncio.sleep(2.5)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    with Journal.open(tmp_path, max_mb=64) as journal:
        run(main(journal))
    with JournalReader.open(tmp_path) as reader:
        found = list(reader.headlines())
    assert [(line.sample, line.outcome.ok, line.reward) for line in found] == [
        (0, True, None),
        (1, True, None),
        (2, True, None),
    ]


@pytest.mark.parametrize(
    ("finished", "drawn", "seen"),
    [((0, 1, 2, 3), [], []), ((1, 3), [0, 2], [[0, 1, 2, 3]])],
    ids=["a whole group", "half a group"],
)
def test_training_goes_on_with_whole_groups_and_scores_others_as_one(finished, drawn, seen):
    """A sample of an earlier start keeps its score where all its siblings are there; else all are scored together."""
    kept = [Trajectory("a", at, (), Outcome.ended(StopReason.STOP), Score(7.0)) for at in finished]
    worker, scorer = Worker(), GroupRewards()
    group = run(dispatcher(worker, scorer).group(task("a"), ORDER, RecoveredTask(tuple(kept))))
    assert isinstance(group, Group)
    assert sorted(worker.attempts) == drawn and [[at for at, _ in call] for call in scorer.seen] == seen
    assert [item.reward.value for item in group.trajectories] == ([40.0, 41.0, 42.0, 43.0] if seen else [7.0] * 4)


# Runs that go on

SCRIPT = """
from pathlib import Path

def answer(request, rng):
    with Path("asked.txt").open("a") as file:
        file.write("x")
    return "so it is " + "well " * rng.randrange(6) + "#### 2"
"""
REWARD = """
from pathlib import Path

def share(responses):
    with Path("groups.txt").open("a") as file:
        file.write(f"{len(responses)}\\n")
    return [len(mine) / sum(map(len, responses)) for mine in responses]
"""
CONFIG = """
model: {path: model}
data: {train_files: tasks.jsonl, prompt_key: question}
rollout: {name: scripted, n: 3, scripted: {script: "script_of_group:answer"}}
reward: {num_workers: 0, functions: {own: {path: "reward_of_group:share", scope: group}, right: {path: number_match}}}
logging: {run_dir: run}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    save_model(tmp_path / "model")
    for name, text in (("script", SCRIPT), ("reward", REWARD)):
        (tmp_path / f"{name}_of_group.py").write_text(text)
        monkeypatch.delitem(sys.modules, f"{name}_of_group", raising=False)
    rows = [{"question": f"What is {at} + 1?", "answer": "#### 2"} for at in range(2)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my.yaml").write_text(CONFIG)
    return tmp_path


def roll_out(*words: str) -> RolloutResult:
    return run_rollout(load("my.yaml", words))


def count(name: str) -> list[str]:
    return Path(name).read_text().split()


def lines() -> dict[tuple[str, int], float | None]:
    with JournalReader.open(Path("run")) as reader:
        return {(line.uid, line.sample): line.reward and line.reward.value for line in reader.headlines()}


def test_a_whole_group_is_reused_and_nothing_is_scored_again(folder):
    roll_out()
    before = lines()
    assert count("groups.txt") == ["3", "3"] and None not in before.values()
    assert roll_out().summary.num_trajectories == 6
    assert count("groups.txt") == ["3", "3"] and lines() == before and len(Path("asked.txt").read_text()) == 6


def test_another_number_of_samples_is_another_group(folder):
    roll_out()
    roll_out("rollout.n=4")
    assert count("groups.txt") == ["3", "3", "4", "4"] and len(Path("asked.txt").read_text()) == 8
    roll_out("rollout.n=2")
    assert count("groups.txt")[4:] == ["2", "2"] and len(Path("asked.txt").read_text()) == 8


def test_a_run_that_was_killed_before_the_group_was_whole_scores_what_it_had(folder):
    """The first start is cut off in the middle of a group, as a kill leaves it: unscored samples, and no others."""
    roll_out()
    wanted = lines()
    with JournalReader.open(Path("run")) as reader:
        kept = [entry.trajectory for entry in reader.trajectories()][:2]
        event = reader.events(kind="inputs", limit=10)
    Path("run").rename("first")
    with Journal.open(Path("run"), max_mb=64) as journal:
        for item in event:
            journal.add_event(item.kind, **item.fields)
        for trajectory in kept:
            unscored = replace(trajectory.provenance, scoring="")
            journal.add(replace(trajectory, reward=None, provenance=unscored))
    Path("asked.txt").write_text("")
    Path("groups.txt").write_text("")
    assert roll_out().summary.num_trajectories == 6
    assert len(Path("asked.txt").read_text()) == 4 and count("groups.txt") == ["3", "3"]
    assert lines() == wanted
