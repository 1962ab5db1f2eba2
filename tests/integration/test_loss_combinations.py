"""Every estimator, loss, aggregation and correction that a config accepts trains: finite figures, weights that move.

All triples of estimator, loss and aggregation are tried, each with one of the corrections in turn, and all pairs of
loss and correction. The whole product has 17,280 members; losses see nothing of the estimator but advantages.
"""

import random
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, product
from math import isfinite
from pathlib import Path
from typing import get_args

import pytest
import torch

from tests.configs import TRAINING
from tests.policies import CPU, make_groups, save_tiny_model
from treadle.algorithm.advantage_inputs import rows_of
from treadle.config import ConfigWarning, TrainConfig, loads
from treadle.config.rollout import ModelConfig
from treadle.config.training import GROUP_ESTIMATORS, OTHER_ESTIMATORS, POLICY_LOSSES, Aggregation, RefConfig
from treadle.errors import ConfigError
from treadle.model.load import load_causal_model
from treadle.policy.critic import SingleCritic
from treadle.policy.network import DecoderNetwork
from treadle.policy.optimizer import MasterWeights, Optimizer
from treadle.policy.policy import Sampling, SinglePolicy
from treadle.policy.reference import SingleReference
from treadle.trainer.step import StepParts, train_step
from treadle.types import Group

ESTIMATORS = (*GROUP_ESTIMATORS, *OTHER_ESTIMATORS)
LEVELS = ("none", "token", "sequence")
BASE = (
    "actor={dtype: fp32, ppo_epochs: 2, optim: {lr: 1.0e-3, weight_decay: 0}}",
    "critic={dtype: fp32}",
    "data.train_batch_size=64",
)
NOISE = 3e-4
"""How far the sampler's logprobs are off: within every bound there is, so that a step is left to take."""

Words = tuple[str, ...]


def corrections() -> Iterator[Words]:
    key = "algorithm.rollout_correction"
    for weights, rejects, mask, bypass in product(LEVELS, (*LEVELS, "geometric"), ("null", "0.1"), ("false", "true")):
        yield (
            f"{key}.rollout_is={weights}",
            f"{key}.rollout_rs={rejects}",
            f"{key}.off_policy_mask_threshold={mask}",
            f"{key}.bypass_mode={bypass}",
        )


def combinations(loss: str) -> Iterator[Words]:
    word, turns = f"actor.policy_loss.loss_mode={loss}", cycle(corrections())
    for estimator, mode in product(ESTIMATORS, get_args(Aggregation)):
        choices = [f"algorithm.adv_estimator={estimator}", f"actor.loss_agg_mode={mode}", *next(turns)]
        if estimator == "on_policy_distill":
            choices += ["algorithm.distill_coef=1", "ref.path=teacher"]
        yield word, *choices
    for correction in corrections():
        yield word, "algorithm.adv_estimator=grpo", "actor.loss_agg_mode=token-mean", *correction


class Bench:
    """One small model for all runs: each starts from the weights that were loaded."""

    def __init__(self, directory: Path, teacher: Path) -> None:
        config = loads(TRAINING, overrides=[f"model.path={directory}", *BASE])
        assert isinstance(config, TrainConfig)
        self._module = load_causal_model(config.model, dtype=torch.float32, device=CPU)
        self._start = {name: weight.detach().clone() for name, weight in self._module.named_parameters()}
        self._critic = SingleCritic.create(
            model=config.model,
            critic=config.critic,
            actor=config.actor,
            response_length=16,
            total_steps=10,
            device=CPU,
        )
        other = ModelConfig(path=str(teacher))
        self._reference = SingleReference.create(model=other, ref=RefConfig(), temperature=1.0, device=CPU)
        self._groups = self._near(self.policy(config), make_groups(1, num_groups=2, forks=2))

    @torch.no_grad()
    def policy(self, config: TrainConfig) -> SinglePolicy:
        for name, weight in self._module.named_parameters():
            weight.copy_(self._start[name])
            weight.grad = None
        weights = MasterWeights(dict(self._module.named_parameters()), torch.float32)
        actor, correction = config.actor, config.algorithm.rollout_correction
        return SinglePolicy(
            DecoderNetwork(self._module),
            Optimizer("actor", weights, actor.optim, actor.grad_clip, 10),
            model=config.model,
            actor=actor,
            rollout_correction=correction,
            sampling=Sampling(1.0, 16),
        )

    def _near(self, policy: SinglePolicy, groups: tuple[Group, ...]) -> tuple[Group, ...]:
        """The same trajectories, as an engine with slightly other arithmetic would have sampled them."""
        rng, found = random.Random(0), iter(policy.logprobs(rows_of(groups)).tolist())

        def sampled(group: Group) -> Group:
            trajectories = []
            for trajectory in group.trajectories:
                rows = tuple(
                    replace(row, logprobs=tuple((next(found) + rng.gauss(0, NOISE)) * flag for flag in row.mask))
                    for row in trajectory.rows
                )
                trajectories.append(replace(trajectory, rows=rows))
            return replace(group, trajectories=tuple(trajectories))

        return tuple(sampled(group) for group in groups)

    def problem(self, config: TrainConfig) -> str | None:
        """What is wrong with one step of this config."""
        critic = self._critic if config.algorithm.needs_critic() else None
        reference = self._reference if config.algorithm.needs_reference() else None
        parts = StepParts(self.policy(config), config.actor, config.algorithm, config.trainer, reference, critic)
        metrics = train_step(parts, self._groups, step=1, baselines=[0.5, 0.1]).metrics
        strange = [name for name, value in metrics.items() if not isfinite(value)]
        moved = any(not torch.equal(weight, self._start[name]) for name, weight in self._module.named_parameters())
        return f"not finite: {strange}" if strange else None if moved else "nothing moved"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    teacher = save_tiny_model(tmp_path_factory.mktemp("teacher"), num_hidden_layers=1)
    return Bench(save_tiny_model(tmp_path_factory.mktemp("model")), teacher)


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_every_combination_trains(bench: Bench, loss: str) -> None:
    wrong = {}
    for words in combinations(loss):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConfigWarning)
            config = loads(TRAINING, overrides=[*BASE, *words])
        assert isinstance(config, TrainConfig)
        if problem := bench.problem(config):
            wrong[words] = problem
    assert wrong == {}


def test_what_would_not_train_is_refused() -> None:
    """With one update a step, which the runs above do not have."""
    words = ("actor.ppo_epochs=1", "actor.policy_loss.loss_mode=kl_cov")
    with pytest.raises(ConfigError, match="its penalty is zero"):
        loads(TRAINING, overrides=[*BASE, *words])
