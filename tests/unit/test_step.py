import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.policies import CPU, make_actor, make_groups, make_policy, save_tiny_model
from treadle.algorithm.advantage_inputs import rows_of
from treadle.config.rollout import ModelConfig
from treadle.config.training import (
    AlgorithmConfig,
    CriticConfig,
    FilterGroupsConfig,
    KLControlConfig,
    OptimConfig,
    RefConfig,
    TrainerConfig,
)
from treadle.errors import EngineFailure, MisuseError, RunError
from treadle.model.checksum import checksum
from treadle.policy.critic import SingleCritic
from treadle.policy.reference import SingleReference
from treadle.trainer.step import StepParts, StepReport, is_informative, train_step
from treadle.types import Group, Outcome, Score, StopReason, Trajectory


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def make_parts(directory: Path, algorithm: AlgorithmConfig | None = None, warmup: int = 0, **keys: Any) -> StepParts:
    """Everything that the algorithm asks for."""
    algorithm, model = algorithm or AlgorithmConfig(), ModelConfig(path=str(directory))
    actor = make_actor(**keys)
    reference = critic = None
    if actor.use_kl_loss or algorithm.use_kl_in_reward:
        reference = SingleReference.create(model=model, ref=RefConfig(dtype="fp32"), temperature=1.0, device=CPU)
    if algorithm.needs_critic():
        critic = SingleCritic.create(
            model=model,
            critic=CriticConfig(dtype="fp32", optim=OptimConfig(lr=1e-3)),
            actor=actor,
            response_length=16,
            total_steps=10,
            device=CPU,
        )
    policy = make_policy(directory, **keys)
    return StepParts(policy, actor, algorithm, TrainerConfig(critic_warmup=warmup), reference, critic)


def run(parts: StepParts, groups: Sequence[Group], **others: Any) -> tuple[StepReport, str]:
    report = train_step(parts, groups, step=1, **others)
    return report, checksum(dict(parts.policy.tensors()))


def fail(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, outcome=Outcome.failed(EngineFailure("gone")), reward=None)


def score(group: Group, *rewards: float) -> Group:
    scored = zip(group.trajectories, rewards, strict=True)
    return replace(group, trajectories=tuple(replace(made, reward=Score(reward)) for made, reward in scored))


@pytest.mark.parametrize(
    "estimator",
    [
        *("grpo", "dr_grpo", "rloo", "opo", "optimal_token_baseline"),
        *("reinforce_plus_plus_baseline", "reinforce_plus_plus", "remax", "gae"),
    ],
)
def test_every_estimator_trains(directory: Path, estimator: str) -> None:
    parts = make_parts(directory, AlgorithmConfig(adv_estimator=estimator))
    before = checksum(dict(parts.policy.tensors()))
    report, after = run(parts, make_groups(1, num_groups=2), baselines=[0.5, 0.1])
    assert report.version == parts.policy.version == 1
    assert after != before
    assert report.metrics["actor/grad_norm"] > 0
    assert ("critic/vf_loss" in report.metrics) == (estimator == "gae")


def test_a_failed_trajectory_trains_nothing_and_moves_no_baseline(directory: Path) -> None:
    """The step is the same as if it had never existed."""
    whole = make_groups(1, num_groups=2)
    failed = tuple(
        replace(group, trajectories=(*group.trajectories[:-1], fail(group.trajectories[-1]))) for group in whole
    )
    absent = tuple(replace(group, trajectories=group.trajectories[:-1]) for group in whole)
    report, with_failures = run(make_parts(directory), failed)
    _, without = run(make_parts(directory), absent)
    _, all_there = run(make_parts(directory), whole)
    assert with_failures == without != all_there
    assert report.metrics["batch/failed"] == 2 and report.metrics["batch/trajectories"] == 6


def test_answers_that_were_cut_off_can_be_left_out_of_the_loss_and_still_count_in_the_baseline(directory: Path) -> None:
    (group,) = make_groups(1, num_groups=1)
    first, *others = group.trajectories
    cut = replace(group, trajectories=(replace(first, outcome=Outcome.ended(StopReason.LENGTH)), *others))
    report, masked = run(make_parts(directory, AlgorithmConfig(mask_truncated=True)), [cut])
    plain, whole = run(make_parts(directory), [cut])
    _, same = run(make_parts(directory, AlgorithmConfig(mask_truncated=True)), [group])
    assert masked != whole == same
    kept = sum(row.num_sampled for trajectory in others for row in trajectory.rows)
    assert report.metrics["actor/sampled_tokens"] == kept
    assert report.metrics["reward/mean"] == plain.metrics["reward/mean"]
    all_cut = replace(
        group, trajectories=tuple(replace(t, outcome=Outcome.ended(StopReason.LENGTH)) for t in group.trajectories)
    )
    with pytest.raises(RunError, match="every answer was cut off at rollout"):
        run(make_parts(directory, AlgorithmConfig(mask_truncated=True)), [all_cut])


def test_a_mini_batch_of_cut_off_answers_alone_trains_nothing(directory: Path) -> None:
    first, second = make_groups(1, num_groups=2)
    cut = replace(
        first, trajectories=tuple(replace(t, outcome=Outcome.ended(StopReason.LENGTH)) for t in first.trajectories)
    )
    parts = make_parts(directory, AlgorithmConfig(mask_truncated=True), ppo_mini_batch_size=1)
    report, _ = run(parts, [cut, second])
    assert math.isfinite(report.metrics["actor/grad_norm"])
    assert report.metrics["actor/sampled_tokens"] == sum(row.num_sampled for row in rows_of([second]))


def test_forks_train_with_the_advantage_of_their_trajectory(directory: Path) -> None:
    groups = make_groups(1, num_groups=1, forks=3)
    report, _ = run(make_parts(directory), groups)
    assert report.metrics["batch/rows"] == 6 and report.metrics["batch/trajectories"] == 4
    rewards = torch.tensor([made.reward.value for made in groups[0].trajectories])
    assert report.metrics["reward/mean"] == pytest.approx(rewards.mean().item())
    sampled = sum(row.num_sampled for row in rows_of(groups))
    assert report.metrics["actor/sampled_tokens"] == sampled


def test_a_step_without_survivors_is_an_error(directory: Path) -> None:
    (group,) = make_groups(1, num_groups=1)
    dead = replace(group, trajectories=tuple(fail(trajectory) for trajectory in group.trajectories))
    with pytest.raises(RunError, match="training step 1 has nothing to train on: none of its 1 groups"):
        run(make_parts(directory), [dead])


def test_kl_in_the_reward_is_subtracted_and_steered(directory: Path) -> None:
    adaptive = KLControlConfig(type="adaptive", kl_coef=0.5, horizon=8, target_kl=0.001)
    algorithm = AlgorithmConfig(use_kl_in_reward=True, kl_ctrl=adaptive)
    parts = make_parts(directory, algorithm)
    groups = make_groups(1, num_groups=2)
    first, _ = run(parts, groups)
    assert first.metrics["reward/kl"] == pytest.approx(0, abs=1e-6), "the policy is still its own reference"
    assert first.control.coefficient == pytest.approx(0.4)
    second = train_step(parts, groups, step=2, control=first.control)
    assert abs(second.metrics["reward/kl"]) > 1e-4
    assert second.metrics["reward/kl_coefficient"] == pytest.approx(0.4)
    assert second.control.coefficient != first.control.coefficient
    plain = make_parts(directory)
    train_step(plain, groups, step=1)
    train_step(plain, groups, step=2)
    assert checksum(dict(plain.policy.tensors())) != checksum(dict(parts.policy.tensors()))


def test_kl_in_the_loss_is_measured(directory: Path) -> None:
    parts = make_parts(directory, use_kl_loss=True)
    report, _ = run(parts, make_groups(1))
    assert report.metrics["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert train_step(parts, make_groups(1), step=2).metrics["actor/kl_loss"] > 0


def test_while_the_critic_warms_up_the_policy_rests(directory: Path) -> None:
    parts = make_parts(directory, AlgorithmConfig(adv_estimator="gae"), warmup=1)
    before = checksum(dict(parts.policy.tensors()))
    report, after = run(parts, make_groups(1))
    assert (report.version, after) == (0, before)
    assert train_step(parts, make_groups(2), step=2).version == 1


def test_parts_that_are_asked_for_must_be_there(directory: Path) -> None:
    policy = make_policy(directory)
    with pytest.raises(MisuseError, match="reference"):
        StepParts(policy, make_actor(use_kl_loss=True), AlgorithmConfig(), TrainerConfig())
    with pytest.raises(MisuseError, match="critic"):
        StepParts(policy, make_actor(), AlgorithmConfig(adv_estimator="gae"), TrainerConfig())


def test_groups_without_signal_are_filtered_where_asked() -> None:
    same, differ = make_groups(1, num_groups=2)
    same, differ = score(same, 1, 1, 1, 1), score(differ, 0, 1, 1, 1)
    alone = replace(differ, trajectories=(differ.trajectories[0], *(fail(made) for made in differ.trajectories[1:])))
    groups = (same, differ, alone)
    assert all(is_informative(group, FilterGroupsConfig()) for group in groups)
    assert [is_informative(group, FilterGroupsConfig(enable=True)) for group in groups] == [False, True, False]


def test_groups_without_signal_are_counted(directory: Path) -> None:
    same, differ = make_groups(1, num_groups=2)
    report, _ = run(make_parts(directory), [score(same, 1, 1, 1, 1), score(differ, 0, 1, 1, 1)])
    assert report.metrics["batch/no_signal"] == 1


def test_preemptions_in_the_engine_are_counted(directory: Path) -> None:
    first, second = make_groups(1, num_groups=2)
    waited = replace(first.trajectories[0], extra={"engine_preemptions": 3})
    report, _ = run(make_parts(directory), [replace(first, trajectories=(waited, *first.trajectories[1:])), second])
    assert report.metrics["batch/preemptions"] == 3
