from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.policies import CPU, make_actor, make_groups, save_tiny_model
from treadle.algorithm.advantage_inputs import rows_of
from treadle.config.rollout import ModelConfig
from treadle.config.training import CriticConfig, OptimConfig
from treadle.errors import MisuseError
from treadle.policy.critic import SingleCritic
from treadle.policy.protocol import TrainBatch, group_and_trajectory_ids


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def make_critic(directory: Path, path: Path | None = None, **keys: object) -> SingleCritic:
    keys = {"dtype": "fp32", "optim": OptimConfig(lr=1e-2), **keys}
    return SingleCritic.create(
        model=ModelConfig(path=str(directory), enable_gradient_checkpointing=True),
        critic=CriticConfig(path=None if path is None else str(path), **keys),
        actor=make_actor(),
        response_length=16,
        total_steps=10,
        device=CPU,
    )


def make_batch(critic: SingleCritic) -> TrainBatch:
    groups = make_groups(1)
    rows = rows_of(groups)
    values_T = critic.values(rows)
    batch = TrainBatch(rows, *group_and_trajectory_ids(groups), torch.zeros_like(values_T), values_T=values_T)
    return replace(batch, returns_T=torch.full_like(values_T, 0.3))


def test_an_untrained_critic_expects_nothing(directory: Path) -> None:
    assert not make_critic(directory).values(rows_of(make_groups(1))).any()


def test_a_critic_learns_what_to_expect(directory: Path) -> None:
    critic = make_critic(directory)
    losses = [critic.train(make_batch(critic))["critic/vf_loss"] for _ in range(6)]
    assert losses[0] == pytest.approx(0.045) and losses[-1] < losses[0] / 3


def test_epochs_and_mini_batches_are_the_actors_unless_given(directory: Path) -> None:
    critic = make_critic(directory)
    assert critic.train(make_batch(critic))["critic/optimizer_steps"] == 1
    critic = make_critic(directory, ppo_epochs=2, ppo_mini_batch_size=2)
    assert critic.train(make_batch(critic))["critic/optimizer_steps"] == 4


def test_a_restored_critic_goes_on_as_if_it_had_not_stopped(directory: Path, tmp_path: Path) -> None:
    straight, first = make_critic(directory), make_critic(directory)
    for critic in (straight, first):
        critic.train(make_batch(critic))
    first.save(tmp_path)
    second = make_critic(directory)
    second.restore(tmp_path)
    rows = rows_of(make_groups(2))
    for critic in (straight, second):
        critic.train(make_batch(critic))
    assert torch.equal(straight.values(rows), second.values(rows))


def test_a_critic_may_start_from_its_own_model(directory: Path, tmp_path: Path) -> None:
    own = save_tiny_model(tmp_path, hidden_size=32)
    assert make_critic(directory, own).values(rows_of(make_groups(1))).shape


def test_a_critic_needs_returns(directory: Path) -> None:
    critic = make_critic(directory)
    with pytest.raises(MisuseError, match="returns"):
        critic.train(replace(make_batch(critic), returns_T=None))
