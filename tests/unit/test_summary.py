import io
import json
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from treadle.errors import Boundary, EngineFailure, RewardFailure
from treadle.observe import Summary, summarize
from treadle.observe.rich_output import render_summary
from treadle.observe.summary import PassAtK, estimate_pass_at_k
from treadle.types import Outcome, Row, Score, StopReason, Timing, Trajectory

DONE = Outcome.ended(StopReason.STOP)


def make(
    uid: str,
    sample: int = 0,
    reward: float | None = None,
    outcome: Outcome = DONE,
    source: str = "sums",
    generate_s: float = 1.0,
) -> Trajectory:
    row = Row((1,), (2, 3, 4), (1, 1, 0), (0.0,) * 3, (0,) * 3)
    score = None if reward is None else Score(reward)
    return Trajectory(uid, sample, (row,), outcome, score, timing=Timing(generate_s=generate_s), data_source=source)


def group(uid: str, *rewards: float) -> list[Trajectory]:
    return [make(uid, sample, reward) for sample, reward in enumerate(rewards)]


def drawn(summary: Summary, width: int = 200) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(render_summary(summary))
    return out.getvalue()


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_k_subsets_with_a_success(successes: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(successes)))
    subsets = list(combinations(successes, k))
    expected = sum(any(subset) for subset in subsets) / len(subsets)
    assert estimate_pass_at_k(len(successes), sum(successes), k) == pytest.approx(expected)


def test_pass_at_k_is_a_mean_over_groups_that_have_k_samples() -> None:
    trajectories = group("a", 1, 0, 0, 0) + group("b", 1, 1, 1, 1) + group("c", 0, 1)
    (source,) = summarize(trajectories).sources
    assert source.pass_at_k == (
        PassAtK(1, pytest.approx((0.25 + 1 + 0.5) / 3), 3),
        PassAtK(2, pytest.approx((0.5 + 1 + 1) / 3), 3),
        PassAtK(4, 1.0, 2),
    )


def test_the_threshold_decides_what_is_a_success() -> None:
    trajectories = group("a", 0.4, 0.6)
    assert summarize(trajectories).sources[0].pass_at_k[0].value == 0.0
    assert summarize(trajectories, success_threshold=0.5).sources[0].pass_at_k[0].value == 0.5


def test_rewards_are_summed_up_by_data_source() -> None:
    trajectories = [*group("a", 1.0, 0.0), make("b", reward=0.5, source="words"), make("c", source="words")]
    sums, words = summarize(trajectories).sources
    assert (sums.data_source, sums.num_trajectories, sums.num_scored) == ("sums", 2, 2)
    assert sums.reward_mean == 0.5 and sums.reward_std == pytest.approx(0.5**0.5)
    assert (words.num_trajectories, words.num_scored, words.reward_mean, words.reward_std) == (2, 1, 0.5, None)


def test_a_failed_trajectory_moves_no_reward_and_no_pass_at_k() -> None:
    survivors = group("a", 1.0, 0.0) + group("b", 0.0, 0.0)
    failed = [
        make("a", 2, outcome=Outcome.failed(EngineFailure("gone"))),
        make("b", 2, reward=99.0, outcome=Outcome.failed(RewardFailure("no number"))),
    ]
    (alone,), (mixed,) = summarize(survivors).sources, summarize(survivors + failed).sources
    assert (mixed.reward_mean, mixed.reward_std, mixed.pass_at_k) == (
        alone.reward_mean,
        alone.reward_std,
        alone.pass_at_k,
    )
    assert (mixed.num_trajectories, mixed.num_failed) == (6, 2)


def test_endings_failures_and_stages_are_listed() -> None:
    trajectories = [
        *group("a", 1.0, 1.0),
        make("b", outcome=Outcome.ended(StopReason.LENGTH), generate_s=9.0),
        make("c", outcome=Outcome.failed(EngineFailure("first"))),
        make("d", outcome=Outcome.failed(EngineFailure("second"))),
        make("e", outcome=Outcome.failed(RewardFailure("third"))),
    ]
    summary = summarize(trajectories, wall_s=6.0, num_dropped=1)
    assert summary.stop_reasons == {StopReason.FAILURE: 3, StopReason.STOP: 2, StopReason.LENGTH: 1}
    engine, reward = summary.failures
    assert (engine.boundary, engine.count, engine.example, engine.example_uid) == (Boundary.ENGINE, 2, "first", "c/0")
    assert (reward.boundary, reward.count) == (Boundary.REWARD, 1)
    generate, tool, _ = summary.stages
    assert (generate.name, generate.max_s, generate.slowest) == ("generate", 9.0, "b/0")
    assert (tool.mean_s, tool.slowest) == (0.0, "")
    assert (summary.num_tasks, summary.num_trajectories, summary.num_failed, summary.num_dropped) == (5, 6, 3, 1)
    assert (summary.sampled_tokens, summary.tokens_per_s) == (12, 2.0)


def test_a_summary_is_json() -> None:
    summary = summarize([*group("a", 1.0, 0.0), make("b", outcome=Outcome.failed(EngineFailure("gone")))], wall_s=2.0)
    found = json.loads(summary.to_json())
    assert found["sources"][0]["pass_at_k"][0] == {"k": 1, "value": 0.5, "num_groups": 1}
    assert found["stop_reasons"] == {"stop": 2, "failure": 1}
    assert found["failures"][0]["boundary"] == "engine"
    assert found["num_failed"] == 1


def test_nothing_at_all_can_be_summarized_and_drawn() -> None:
    summary = summarize([])
    assert (summary.sources, summary.tokens_per_s) == ((), 0.0)
    assert "0 trajectories of 0 tasks" in drawn(summary)


def test_the_table_shows_it_all_and_reads_no_markup() -> None:
    example = "[red]Connection\nrefused[/] [/nothing]" + "x" * 500
    failed = make("c[bold]", outcome=Outcome.failed(EngineFailure(example)))
    trajectories = [*group("a", 1.0, 0.0), make("w", source="words"), failed]
    text = drawn(summarize(trajectories, wall_s=90.0, num_dropped=3))
    for expected in ("pass@1", "pass@2", "0.500 ± 0.707", "sums", "words", "failure", "25.0%", "engine"):
        assert expected in text
    assert "c[bold]/0: [red]Connection refused[/] [/nothing]xxx" in text
    assert "1.0 s" in text and "3 tasks dropped" in text and "90.0 s" in text
    assert "x" * 200 not in text


@pytest.mark.parametrize("width", [1, 10, 40])
def test_a_narrow_terminal_does_not_break_the_table(width: int) -> None:
    drawn(summarize([*group("a", 1.0, 0.0), make("c", outcome=Outcome.failed(EngineFailure("gone")))]), width)


def test_rows_beyond_the_first_are_counted_as_forks() -> None:
    plain = make("a")
    forked = replace(make("b"), rows=make("b").rows * 3)
    summary = summarize([plain, forked])
    assert summary.num_forks == 2
    assert "2 forks" in drawn(summary)


def test_parts_are_shown_and_what_a_session_was_not_given_counts_as_zero() -> None:
    both = replace(make("a"), reward=Score(8.0, {"answer": 1.0, "environment": 7.0}))
    one = replace(make("a", 1), reward=Score(0.0, {"answer": 0.0}))
    (source,) = summarize([both, one]).sources
    assert source.parts == {"answer": 0.5, "environment": 3.5}
    shown = drawn(summarize([both, one]))
    assert "environment" in shown and "3.500" in shown


def test_rewards_that_are_all_equal_are_said_to_be() -> None:
    same = summarize(group("a", 0.0, 0.0) + group("b", 0.0))
    assert same.notes == ("every reward of sums is 0: samples that all score the same teach nothing",)
    assert same.notes[0] in drawn(same)
    assert json.loads(same.to_json())["notes"] == list(same.notes)
    assert summarize(group("a", 0.0, 1.0)).notes == ()
    assert summarize(group("a", 1.0)).notes == (), "one sample alone"
