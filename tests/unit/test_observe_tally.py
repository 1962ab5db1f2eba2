import pytest

from treadle.errors import Boundary, EngineFailure, ToolFailure
from treadle.observe import Tally
from treadle.observe.progress import describe
from treadle.types import Outcome, Row, Score, StopReason, Timing, Trajectory

DONE = Outcome.ended(StopReason.STOP)


def make(
    uid: str = "task",
    outcome: Outcome = DONE,
    reward: float | None = None,
    num_tokens: int = 10,
    timing: Timing = Timing(),  # noqa: B008 - frozen
) -> Trajectory:
    row = Row((1,), (2,) * num_tokens, (1,) * num_tokens, (0.0,) * num_tokens, (0,) * num_tokens)
    return Trajectory(uid, 0, (row,), outcome, None if reward is None else Score(reward), timing=timing)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_trajectories_are_counted_by_how_they_ended() -> None:
    tally = Tally()
    outcomes = [
        DONE,
        Outcome.ended(StopReason.LENGTH),
        Outcome.ended(StopReason.LENGTH),
        Outcome.ended(StopReason.DEADLINE),
        Outcome.failed(EngineFailure("x")),
        Outcome.failed(ToolFailure("y")),
        Outcome.failed(ToolFailure("z")),
    ]
    for _ in range(10):
        tally.start()
    for outcome in outcomes:
        tally.finish(make(outcome=outcome))
    tally.drop()
    assert (tally.done, tally.running, tally.dropped, tally.tokens) == (7, 2, 1, 70)
    assert tally.truncated == {StopReason.LENGTH: 2, StopReason.DEADLINE: 1}
    assert tally.failed == {Boundary.ENGINE: 1, Boundary.TOOL: 2}
    assert tally.num_failed == 3


def test_a_retried_attempt_goes_on_running_and_its_tokens_count() -> None:
    tally = Tally()
    tally.start()
    tally.retry(make(outcome=Outcome.failed(EngineFailure("x"))))
    assert (tally.done, tally.running, tally.retried, tally.num_failed, tally.tokens) == (0, 1, 1, 0, 10)


def test_a_trajectory_of_an_earlier_start_is_done_but_was_not_running() -> None:
    tally = Tally()
    tally.recall(make(reward=1.0))
    assert (tally.done, tally.running, tally.tokens, tally.mean_reward) == (1, 0, 0, 1.0)


def test_the_reward_is_the_mean_over_what_was_scored() -> None:
    tally = Tally()
    assert tally.mean_reward is None
    for reward in (1.0, 0.0, None, 0.5):
        tally.finish(make(reward=reward))
    tally.finish(make(outcome=Outcome.failed(EngineFailure("x")), reward=-100.0))
    assert tally.mean_reward == 0.5


def test_tokens_per_second_slide_with_the_clock() -> None:
    clock = Clock()
    tally = Tally(clock=clock)
    assert tally.tokens_per_s == 0.0
    for _ in range(120):
        clock.now += 0.5
        tally.finish(make(num_tokens=50))
    assert tally.tokens_per_s == pytest.approx(100, rel=0.05)
    clock.now += 15
    assert tally.tokens_per_s == pytest.approx(50, rel=0.1)
    clock.now += 31
    assert tally.tokens_per_s == 0.0


def test_the_rate_of_a_long_run_takes_no_more_memory() -> None:
    clock = Clock()
    tally = Tally(clock=clock)
    for _ in range(1000):
        clock.now += 1.0
        tally.finish(make())
    assert len(tally._rate._slots) <= 30


def test_early_on_the_rate_is_over_the_time_there_was() -> None:
    clock = Clock()
    tally = Tally(clock=clock)
    clock.now += 4
    tally.finish(make(num_tokens=400))
    assert tally.tokens_per_s == pytest.approx(100)


def test_each_stage_knows_mean_max_and_the_slowest() -> None:
    tally = Tally()
    tally.finish(make("quick", timing=Timing(generate_s=1.0, tool_s=0.5)))
    tally.finish(make("slow", timing=Timing(generate_s=3.0, score_s=0.25)))
    assert (tally.generate.mean_s, tally.generate.max_s, tally.generate.slowest) == (2.0, 3.0, "slow/0")
    assert (tally.tool.mean_s, tally.tool.slowest) == (0.5, "quick/0")
    assert (tally.score.mean_s, tally.score.slowest) == (0.25, "slow/0")


def test_the_line_names_what_there_is() -> None:
    tally = Tally(clock=Clock())
    assert describe(tally, 8) == "0/8 done, 0 running, 0 tokens/s"
    tally.finish(make(reward=0.25))
    tally.finish(make(outcome=Outcome.failed(ToolFailure("x"))))
    tally.finish(make(outcome=Outcome.ended(StopReason.LENGTH)))
    tally.drop()
    assert describe(tally).startswith("3 done, -4 running, 1 failed (tool 1), 1 truncated, 1 dropped, ")
    assert describe(tally).endswith(" tokens/s, reward 0.25")
