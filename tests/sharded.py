"""Networks over ranks, and the same on one device, for tests that compare the two."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.policies import CPU, make_groups
from treadle.algorithm.advantage_inputs import rows_of
from treadle.config.rollout import ModelConfig
from treadle.config.training import (
    FSDPActorConfig,
    FSDPConfig,
    FSDPCriticConfig,
    FSDPRefConfig,
    OptimConfig,
    RolloutCorrectionConfig,
)
from treadle.policy.critic import SingleCritic
from treadle.policy.local_ranks import LocalRanks
from treadle.policy.policy import Sampling, SinglePolicy
from treadle.policy.protocol import Metrics, TrainBatch, group_and_trajectory_ids
from treadle.policy.rank import FSDPRank, NetworksSpec
from treadle.policy.rank_calls import ShardedPolicy
from treadle.policy.rank_group import RankGroup
from treadle.policy.reference import SingleReference
from treadle.types import NOTHING, Group

EPOCHS = {"ppo_epochs": 2, "ppo_mini_batch_size": 2}
"""Four optimizer steps a training step, for `ragged` groups."""


def make_spec(
    directory: Path, *, recompute: bool = False, sharding: Mapping[str, Any] = NOTHING, **keys: Any
) -> NetworksSpec:
    """`keys` are the actor's; `sharding` is every network's."""
    actor = {"dtype": "fp32", "optim": OptimConfig(lr=1e-3), "ppo_max_token_len_per_gpu": 60} | keys
    fsdp = FSDPConfig(**sharding)
    return NetworksSpec(
        ModelConfig(path=str(directory), enable_gradient_checkpointing=recompute),
        FSDPActorConfig(fsdp_config=fsdp, **actor),
        RolloutCorrectionConfig(),
        Sampling(1.0, response_length=16),
        total_steps=12,
        ref=FSDPRefConfig(fsdp_config=fsdp, dtype="fp32", log_prob_max_token_len_per_gpu=80),
        critic=FSDPCriticConfig(fsdp_config=fsdp, dtype="fp32", optim=OptimConfig(lr=1e-2)),
    )


def start(spec: NetworksSpec, num_ranks: int, timeout_s: float = 60, device: str = "cpu") -> RankGroup:
    return RankGroup(LocalRanks.start(spec, [device] * num_ranks, launch_timeout_s=180, timeout_s=60), timeout_s)


def load(ranks: RankGroup, spec: NetworksSpec) -> ShardedPolicy:
    ranks.run("loading", FSDPRank.load, spec)
    return ShardedPolicy(ranks)


def alone(spec: NetworksSpec, device: torch.device = CPU) -> SinglePolicy:
    return SinglePolicy.create(
        model=spec.model,
        actor=spec.actor,
        rollout_correction=spec.rollout_correction,
        sampling=spec.sampling,
        total_steps=spec.total_steps,
        device=device,
    )


def reference_alone(spec: NetworksSpec) -> SingleReference:
    assert spec.ref is not None
    return SingleReference.create(model=spec.model, ref=spec.ref, temperature=1.0, device=CPU)


def critic_alone(spec: NetworksSpec) -> SingleCritic:
    assert spec.critic is not None
    return SingleCritic.create(
        model=spec.model, critic=spec.critic, actor=spec.actor, response_length=16, total_steps=12, device=CPU
    )


def ragged(seed: int) -> tuple[Group, ...]:
    """Groups of two to five trajectories, of several turns, with forks."""
    rng = random.Random(seed)
    groups = [
        make_groups(seed * 10 + at, num_groups=1, n=rng.randint(2, 5), turns=3, forks=1 + at % 2) for at in range(4)
    ]
    return tuple(group for single in groups for group in single)


def make_batch(groups: Sequence[Group], **changes: Any) -> TrainBatch:
    rows, rng = rows_of(groups), random.Random(1)
    advantages = [value for row in rows for value in [rng.gauss(0, 1)] * len(row.ids)]
    return replace(TrainBatch(rows, *group_and_trajectory_ids(groups), torch.tensor(advantages)), **changes)


def largest_gap(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    assert mine.keys() == theirs.keys()
    return max((mine[name] - theirs[name]).abs().max().item() for name in mine)


SAME = ("actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm", "actor/ppo_kl", "actor/pg_clipfrac")


def gaps(mine: Metrics, theirs: Metrics) -> dict[str, float]:
    """Relative to values above 1: norms of such small batches are large."""
    return {name: abs(mine[name] - theirs[name]) / max(1.0, abs(theirs[name])) for name in SAME if name in theirs}
