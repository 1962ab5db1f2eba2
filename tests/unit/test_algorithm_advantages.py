"""Advantages: groups, turns, forks and signals, against formulas written out by hand."""

import dataclasses
import random

import pytest
import torch

from treadle.algorithm.advantage_inputs import AdvantageInputs, Advantages, has_signal, rows_of
from treadle.algorithm.estimators import ESTIMATORS, compute_advantages, find_estimator
from treadle.config.training import GROUP_ESTIMATORS, OTHER_ESTIMATORS, AlgorithmConfig
from treadle.errors import ConfigError, MisuseError, ToolFailure
from treadle.types import Group, Outcome, Row, Score, StopReason, Task, Trajectory

GROUPED = sorted({*GROUP_ESTIMATORS, "grpo_passk"})
ENDED = Outcome.ended(StopReason.STOP)
FAILED = Outcome.failed(ToolFailure("the tool broke"))


def row(*mask: int) -> Row:
    length = len(mask)
    return Row((1, 2), (7,) * length, mask, (-1.0,) * length, (0,) * length)


def sample(reward: float | None, *rows: Row, outcome: Outcome = ENDED) -> Trajectory:
    return Trajectory("t", 0, rows or (row(1, 1),), outcome, None if reward is None else Score(reward))


def group(*trajectories: Trajectory) -> Group:
    return Group(Task("t", ()), trajectories)


def advantages(name: str, *groups: Group, **given: torch.Tensor) -> list[float]:
    inputs = AdvantageInputs.of(groups, **given)
    tokens_T = torch.arange(len(inputs.mask_T))
    inputs = dataclasses.replace(inputs, gradient_norms_T=0.1 + tokens_T % 3, log_ratios_T=0.2 * (tokens_T % 4))
    return find_estimator(name)(inputs, AlgorithmConfig()).advantages_T.tolist()


def constant(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    return Advantages(torch.full(inputs.mask_T.shape, algorithm.gamma))


def test_every_name_in_the_config_is_an_estimator() -> None:
    assert {*GROUP_ESTIMATORS, *OTHER_ESTIMATORS} <= set(ESTIMATORS)


def test_an_estimator_is_found_by_import_path() -> None:
    algorithm = AlgorithmConfig(adv_estimator="tests.unit.test_algorithm_advantages:constant", gamma=0.25)
    found = compute_advantages(AdvantageInputs.of([group(sample(1.0))]), algorithm)
    assert found.advantages_T.tolist() == [0.25, 0.25]


@pytest.mark.parametrize("name", ["gpro", "no.such.module:f", "json:__name__"])
def test_an_unknown_estimator_names_the_key(name: str) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.adv_estimator"):
        find_estimator(name)


def test_a_mistyped_estimator_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        find_estimator("gpro")


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_of_one_has_advantage_zero(name: str) -> None:
    others = group(sample(0.0), sample(1.0), sample(0.5, row(1, 1, 1)))
    assert advantages(name, group(sample(5.0)), others)[:2] == [0.0, 0.0]


@pytest.mark.parametrize("name", sorted(ESTIMATORS.keys() - {"gae", "remax"}))
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.7])
def test_equal_rewards_give_exactly_zero(name: str, reward: float) -> None:
    same = group(*(sample(reward, row(1, 1), row(1)) for _ in range(7)))
    assert set(advantages(name, same, same)) == {0.0}


@pytest.mark.parametrize("name", sorted(ESTIMATORS.keys() - {"gae", "remax"}))
def test_a_failed_sibling_does_not_move_the_baseline(name: str) -> None:
    alive = [sample(1.0), sample(0.0, row(1, 0, 1)), sample(0.4)]
    with_failures = [alive[0], sample(None, outcome=FAILED), alive[1], sample(9.0, outcome=FAILED), alive[2]]
    assert advantages(name, group(*with_failures)) == advantages(name, group(*alive))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "grpo_passk"])
def test_a_fork_shares_the_advantage_and_counts_once_in_the_baseline(name: str) -> None:
    plain = advantages(name, group(sample(1.0, row(1)), sample(0.0, row(1)), sample(0.2, row(1))))
    forked = advantages(name, group(sample(1.0, row(1), row(1), row(1)), sample(0.0, row(1)), sample(0.2, row(1))))
    assert forked == [plain[0], plain[0], plain[0], plain[1], plain[2]]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_tokens_that_were_not_sampled_have_advantage_zero(name: str) -> None:
    groups = [group(sample(1.0, row(1, 0, 0, 1)), sample(0.0, row(1, 0)))]
    values_T = torch.tensor([0.3, torch.nan, torch.nan, 0.1, 0.2, torch.nan])
    found = advantages(name, *groups, values_T=values_T, baselines_G=torch.zeros(1))
    assert [found[1], found[2], found[5]] == [0.0, 0.0, 0.0]
    assert (found[0] == 0) == (name == "on_policy_distill"), "which rewards have no part in"


def test_a_token_baseline_weighs_samples_by_their_gradients_so_far() -> None:
    """By hand: weights 1 and 3 at the first token, 2 and 4 at the second; nobody is left to compare the third with."""
    inputs = AdvantageInputs.of([group(sample(1.0, row(1, 0, 1, 1)), sample(0.0, row(1, 1)))])
    with pytest.raises(MisuseError, match="gradient_norms_T"):
        find_estimator("optimal_token_baseline")(inputs, AlgorithmConfig())
    inputs = dataclasses.replace(inputs, gradient_norms_T=torch.tensor([1.0, 99.0, 1.0, 1.0, 3.0, 1.0]))
    found = find_estimator("optimal_token_baseline")(inputs, AlgorithmConfig()).advantages_T
    assert found.tolist() == pytest.approx([3 / 4, 0, 4 / 6, 1.0, -1 / 4, -2 / 6])


def test_kl_penalties_lower_the_score_of_their_trajectory() -> None:
    groups = [group(sample(1.0, row(1, 0), row(1)), sample(1.0, row(1)))]
    penalties = torch.tensor([-0.25, -100.0, -0.25, 0.0])
    assert advantages("dr_grpo", *groups, token_rewards_T=penalties) == [-0.25, 0.0, -0.25, 0.25]


def test_rewards_stand_on_the_last_sampled_token_and_observations_are_not_discounted() -> None:
    inputs = AdvantageInputs.of([group(sample(1.0, row(1, 0, 0, 1, 0)))], values_T=torch.zeros(5))
    returns = find_estimator("gae")(inputs, AlgorithmConfig(gamma=0.5, lam=1.0)).returns_T
    assert returns is not None
    assert returns.tolist() == [0.5, 0.0, 0.0, 1.0, 0.0]


def test_remax_learns_nothing_from_a_group_whose_greedy_answer_failed() -> None:
    inputs = AdvantageInputs.of(
        [group(sample(1.0)), group(sample(1.0))], baselines_G=torch.tensor([0.25, float("nan")])
    )
    found = find_estimator("remax")(inputs, AlgorithmConfig()).advantages_T
    assert set(found[inputs.group_N[inputs.trajectory_T] == 0].tolist()) == {0.75}
    assert set(found[inputs.group_N[inputs.trajectory_T] == 1].tolist()) == {0.0}


def test_remax_and_gae_say_what_they_need() -> None:
    with pytest.raises(MisuseError, match="greedy"):
        advantages("remax", group(sample(1.0)))
    with pytest.raises(MisuseError, match="values_T"):
        advantages("gae", group(sample(1.0)))


def test_a_survivor_without_reward_is_refused() -> None:
    with pytest.raises(MisuseError, match="t/0 has no reward"):
        AdvantageInputs.of([group(sample(None))])


def test_rows_stand_in_the_order_of_the_flat_tensors() -> None:
    groups = [
        group(sample(None, row(1), outcome=FAILED), sample(1.0, row(1, 0), row(1))),
        group(sample(0.0, row(0, 1, 1))),
    ]
    inputs = AdvantageInputs.of(groups)
    assert [list(r.mask) for r in rows_of(groups)] == [[1, 0], [1], [0, 1, 1]]
    assert inputs.mask_T.tolist() == [True, False, True, False, True, True]
    assert inputs.sequence_T.tolist() == [0, 0, 1, 2, 2, 2]
    assert inputs.trajectory_S.tolist() == [0, 0, 1]
    assert inputs.group_N.tolist() == [0, 1]


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "reinforce_plus_plus_baseline"])
def test_the_order_of_groups_does_not_matter(name: str) -> None:
    rng = random.Random(0)
    groups = [group(*(sample(rng.random(), row(*[1] * rng.randint(1, 4))) for _ in range(3))) for _ in range(4)]
    forward, backward = advantages(name, *groups), advantages(name, *reversed(groups))
    lengths = [sum(len(r.ids) for r in rows_of([one])) for one in groups]
    pieces = torch.tensor(forward).split(lengths)
    assert torch.cat(pieces[::-1]).tolist() == pytest.approx(backward)


def test_tokens_of_a_sequence_must_stand_together() -> None:
    inputs = AdvantageInputs.of([group(sample(1.0), sample(0.0))])
    with pytest.raises(AssertionError, match="stand together"):
        dataclasses.replace(inputs, sequence_T=torch.tensor([0, 1, 0, 1]))


def test_no_survivors_at_all_is_an_empty_batch() -> None:
    assert advantages("grpo", group(sample(None, outcome=FAILED))) == []


def scores(*values: float) -> list[Score]:
    return [Score(value, {"exact": round(value), "format": 1.0}) for value in values]


def test_rewards_that_differ_are_a_signal() -> None:
    assert has_signal(scores(0.0, 0.0, 1.0), "reward")


def test_rewards_that_are_equal_are_none() -> None:
    assert not has_signal(scores(1.0, 1.0, 1.0), "reward")


def test_one_survivor_or_none_has_no_signal() -> None:
    assert not has_signal(scores(1.0), "reward")
    assert not has_signal([], "reward")


def test_a_reward_function_can_be_what_must_differ() -> None:
    assert has_signal(scores(0.1, 0.9), "exact")
    assert not has_signal(scores(0.1, 0.9), "format")
    assert not has_signal(scores(0.1, 0.2), "exact")


def test_an_unknown_function_names_the_key_and_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.filter_groups\.metric.*\n.*did you mean 'format'"):
        has_signal(scores(0.1, 0.9), "fromat")
