"""Scoring in this process: weights, attempts, deadlines, and what a function may do to its arguments."""

import asyncio
import sys
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from tests.virtual_time import run
from treadle.config.reward import RewardConfig, RewardFunctionConfig
from treadle.errors import Boundary, ConfigError, MisuseError, RewardFailure
from treadle.observe import summarize
from treadle.reward.result import Fault, ScoreFailure
from treadle.reward.scorer import Scorer
from treadle.types import Outcome, Row, Score, StopReason, Task, ToolResult, Trajectory, Turn

HERE = __name__
T = TypeVar("T")
CALLS: list[str] = []


def make_task(ground_truth: Any = "42", **fields: Any) -> Task:
    return Task("t", ({"role": "user", "content": "6 * 7?"},), ground_truth, **fields)


def make_trajectory(*contents: Any) -> Trajectory:
    messages = tuple({"role": "assistant", "content": content} for content in contents)
    return Trajectory(
        "t", 0, (), Outcome.ended(StopReason.STOP), messages=({"role": "user", "content": "?"}, *messages)
    )


def make_config(*paths: str, **keys: Any) -> RewardConfig:
    functions = {path.rpartition(":")[2]: RewardFunctionConfig(path=path) for path in paths}
    return RewardConfig(**{"num_workers": 0, "retries": 0, "functions": functions, **keys})


async def score(reward: RewardConfig, task: Task, *trajectories: Trajectory) -> list[Score]:
    async with await Scorer.create(reward) as scorer:
        return [await scorer.score(task, trajectory) for trajectory in trajectories]


def fail(reward: RewardConfig, task: Task | None = None) -> ScoreFailure:
    with pytest.raises(ScoreFailure) as caught:
        run(score(reward, task or make_task(), make_trajectory("42")))
    return caught.value


def length(response: str) -> dict[str, Any]:
    return {"score": len(response), "characters": len(response)}


async def patient(response: str) -> dict[str, Any]:
    await asyncio.sleep(1)
    return {"score": 1.0, "characters": "many", "waited": True}


async def endless() -> float:
    await asyncio.Event().wait()
    return 1.0


def broken(response: str) -> float:
    CALLS.append("broken")
    raise KeyError("no such thing")


def third_time_lucky() -> float:
    CALLS.append("lucky")
    if len(CALLS) < 3:
        raise ConnectionError("try again")
    return 1.0


def wordless() -> None:
    CALLS.append("wordless")


def leave() -> float:
    sys.exit(3)


def vandal(task: Task, messages: Any, extra: Any, ground_truth: Any) -> float:
    messages[0]["content"] = "gone"
    task.messages[0]["content"] = "gone"  # type: ignore[index]
    extra["more"] = True
    ground_truth.append("43")
    return 1.0


def test_scores_are_weighted_and_broken_down() -> None:
    functions = {
        "correct": RewardFunctionConfig(path="number_match", weight=2.0),
        "form": RewardFunctionConfig(path="format", weight=0.5, kwargs={"pattern": "^<a>"}),
    }
    (total,) = run(score(make_config(functions=functions), make_task(), make_trajectory("<a>42</a>")))
    assert total == Score(2.5, {"correct": 1.0, "form": 1.0}, {})


def test_functions_with_different_fields_share_a_batch() -> None:
    reward = make_config(f"{HERE}:length", f"{HERE}:patient")
    for total in run(score(reward, make_task(), make_trajectory("ab"), make_trajectory("abc"))):
        assert total.extra["patient/characters"] == "many"
        assert total.extra["length/characters"] == total.parts["length"]
        assert total.extra["waited"] is True


@pytest.mark.parametrize("contents", [(), ("",), (None,), ("no idea",)])
def test_a_model_that_gives_no_answer_is_scored_by_the_function(contents: tuple[Any, ...]) -> None:
    (total,) = run(score(make_config("number_match"), make_task(), make_trajectory(*contents)))
    assert total.value == 0.0


def test_an_answer_in_parts_is_read_as_text() -> None:
    parts = [{"type": "text", "text": "it is "}, {"type": "text", "text": "42"}, {"type": "image_url", "image_url": ""}]
    (total,) = run(score(make_config("number_match"), make_task(), make_trajectory(parts)))
    assert total.value == 1.0


def test_a_failure_is_the_rewards_and_says_which_function_and_why() -> None:
    failure = fail(make_config(f"{HERE}:broken"))
    assert isinstance(failure, RewardFailure)
    assert failure.boundary is Boundary.REWARD
    assert failure.fault is Fault.EXCEPTION
    assert str(failure).startswith("exception: reward function 'broken' raised KeyError: 'no such thing' (")
    assert "test_reward_scorer.py:" in str(failure)


@pytest.mark.parametrize(
    ("function", "fault"),
    [("wordless", Fault.NO_RESULT), ("leave", Fault.CRASH), ("endless", Fault.TIMEOUT), ("broken", Fault.EXCEPTION)],
)
def test_each_way_to_fail_has_its_own_name(function: str, fault: Fault) -> None:
    failure = fail(make_config(f"{HERE}:{function}"))
    assert failure.fault is fault
    assert str(failure).startswith(f"{fault}: reward function {function!r} ")


def test_a_bad_ground_truth_is_a_failure_and_not_a_wrong_answer() -> None:
    assert "holds no number" in str(fail(make_config("number_match"), make_task("many")))


def test_a_search_that_explodes_is_a_timeout() -> None:
    functions = {"form": RewardFunctionConfig(path="format", kwargs={"pattern": "^(a|a)+$"})}
    with pytest.raises(ScoreFailure) as caught:
        run(score(make_config(functions=functions), make_task(), make_trajectory("a" * 40 + "b")))
    assert caught.value.fault is Fault.TIMEOUT


def test_attempts_end_with_the_first_success() -> None:
    CALLS.clear()
    (total,) = run(score(make_config(f"{HERE}:third_time_lucky", retries=2), make_task(), make_trajectory("x")))
    assert total.value == 1.0
    assert CALLS == ["lucky"] * 3


def test_attempts_are_bounded_and_a_missing_result_is_not_tried_again() -> None:
    CALLS.clear()
    fail(make_config(f"{HERE}:broken", retries=2))
    assert CALLS == ["broken"] * 3
    CALLS.clear()
    fail(make_config(f"{HERE}:wordless", retries=2))
    assert CALLS == ["wordless"]


def test_a_function_cannot_change_the_records() -> None:
    task, trajectory = make_task(["42"], extra={"entry": {"a": 1}}), make_trajectory("42")
    before = repr((task, trajectory))
    run(score(make_config(f"{HERE}:vandal"), task, trajectory))
    assert repr((task, trajectory)) == before


def test_attempts_in_this_process_keep_to_the_rate_too() -> None:
    async def main() -> float:
        begin = asyncio.get_running_loop().time()
        await score(make_config("exact_match", rate_limit_per_s=2.0), make_task(), *[make_trajectory("42")] * 5)
        return asyncio.get_running_loop().time() - begin

    assert run(main()) == pytest.approx(2.0, abs=0.2)


def test_every_mistake_is_reported_with_its_key_at_once() -> None:
    functions = {
        "a": RewardFunctionConfig(path=f"{HERE}:nothing_here"),
        "b": RewardFunctionConfig(path="format"),
        "c": RewardFunctionConfig(path="number_match", kwargs={"strct": True}),
    }
    with pytest.raises(ConfigError) as caught:
        run(Scorer.create(make_config(functions=functions)))
    keys = [mistake.key for mistake in caught.value.mistakes]
    assert keys == ["reward.functions.a.path", "reward.functions.b.path", "reward.functions.c.kwargs.strct"]
    assert "RewardFunctionConfig.path" in str(caught.value)


@pytest.mark.parametrize("path", ["math", "reasoning_gym"])
def test_what_evaluates_model_text_is_never_run_in_this_process(path: str) -> None:
    with pytest.raises(ConfigError, match=r"evaluates model text(.|\n)*reward\.num_workers"):
        run(Scorer.create(make_config(path)))


def needs_a_column(response: str, solution: str) -> float:
    return float(response == solution)


def test_a_column_that_the_row_lacks_is_a_failure_that_lists_the_columns() -> None:
    reward = make_config(f"{__name__}:needs_a_column")
    task = replace(make_task(), extra={"solutions": "42"})
    failure = fail(reward, task)
    assert failure.fault is Fault.NO_COLUMN and failure.function == "needs_a_column"
    assert "takes 'solution', and the row has no such column; its columns: " in str(failure)
    assert "solutions" in str(failure) and not failure.may_pass
    (found,) = run(score(reward, replace(task, extra={"solution": "42"}), make_trajectory("42")))
    assert found.value == 1.0


def give(*turns: tuple[float | None, list[float | None]]) -> Trajectory:
    """A trajectory whose turns got these rewards, each with those of its tool calls."""
    spans = [
        Turn(at, at + 1, at + 1, StopReason.STOP, (), tuple(ToolResult("x", reward=call) for call in calls), reward=got)
        for at, (got, calls) in enumerate(turns)
    ]
    count = len(turns)
    row = Row((1,), (5,) * count, (1,) * count, (-0.5,) * count, (0,) * count, tuple(spans))
    return replace(make_trajectory("42"), rows=(row,))


def test_rewards_for_turns_and_tool_calls_are_weighted_parts() -> None:
    config = make_config("exact_match", tools_weight=0.5)
    (total,) = run(score(config, make_task(), give((7.0, [1.0, None]), (None, [2.0]), (14.0, []))))
    assert total == Score(1.0 + 21.0 + 0.5 * 3.0, {"exact_match": 1.0, "environment": 21.0, "tools": 3.0}, {})
    (off,) = run(score(make_config("exact_match", environment_weight=0.0), make_task(), give((7.0, []))))
    assert off == Score(1.0, {"exact_match": 1.0, "environment": 7.0}, {})


def test_without_functions_a_session_that_was_given_nothing_has_no_score_unless_the_config_counts_on_it() -> None:
    given, nothing = give((0.0, [])), give((None, [None]))
    assert run(score(make_config(), make_task(), given, nothing)) == [Score(0.0, {"environment": 0.0}, {}), None]
    assert run(score(make_config(environment_weight=2.0), make_task(), nothing)) == [
        Score(0.0, {"environment": 0.0}, {})
    ]


def test_a_turn_reward_that_is_no_number_is_a_failure() -> None:
    with pytest.raises(ScoreFailure, match="not_a_number: reward part 'environment' returned nan"):
        run(score(make_config(), make_task(), give((float("nan"), []))))


def test_weights_that_people_write_add_up_to_what_they_mean() -> None:
    for weights in ([0.7, 0.2, 0.1], [0.1] * 10, [0.3, 0.3, 0.4], [1.1, -0.1]):
        functions = {
            str(at): RewardFunctionConfig(path="exact_match", weight=weight) for at, weight in enumerate(weights)
        }
        (total,) = run(score(make_config(functions=functions), make_task(), make_trajectory("42")))
        assert total.value == 1.0
        solved = Trajectory("t", 0, (), Outcome.ended(StopReason.STOP), total)
        assert summarize([solved]).sources[0].pass_at_k[0].value == 1.0


def test_a_score_outside_the_bounds_is_a_failure() -> None:
    assert str(fail(make_config(f"{HERE}:huge"))) == (
        "out_of_bounds: reward part 'huge' gave 1e+300, outside reward.bounds = [-1e+06, 1e+06]"
    )
    failure = fail(make_config(f"{HERE}:length", "exact_match", bounds=(0.0, 2.0)))
    assert failure.fault is Fault.OUT_OF_BOUNDS
    assert failure.function == "length, exact_match"


def huge() -> float:
    return 1e300


def test_a_function_that_is_late_may_have_a_score_instead() -> None:
    config = make_config(f"{HERE}:endless", "exact_match", timeout_s=3.0, retries=1, on_timeout=-1.0)
    (total,) = run(score(config, make_task(), make_trajectory("42")))
    assert total == Score(0.0, {"endless": -1.0, "exact_match": 1.0}, {"timed_out": True})


def test_a_pattern_that_explodes_is_late_too() -> None:
    functions = {"form": RewardFunctionConfig(path="format", kwargs={"pattern": "^(a|a)+$"})}
    config = make_config(functions=functions, retries=5, on_timeout=-1.0)
    (total,) = run(score(config, make_task(), make_trajectory("a" * 40 + "b")))
    assert total == Score(-1.0, {"form": -1.0}, {"timed_out": True})


def test_a_closed_scorer_says_so() -> None:
    async def main() -> None:
        scorer = await Scorer.create(make_config("exact_match"))
        await scorer.close()
        await scorer.close()
        with pytest.raises(MisuseError, match="closed"):
            await scorer.score(make_task(), make_trajectory("42"))

    run(main())
