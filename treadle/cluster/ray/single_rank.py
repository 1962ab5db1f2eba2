"""Single rank: policy, reference and critic on one device, called as the ranks of a sharded run are.

Owns the networks of a group of one: what calls ranks finds them under the names they have in `policy.rank`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treadle.config.rollout import ModelConfig
from treadle.config.training import ActorConfig, CriticConfig, RefConfig, RolloutCorrectionConfig
from treadle.policy.critic import SingleCritic
from treadle.policy.policy import Sampling, SinglePolicy
from treadle.policy.rank import RankSpec
from treadle.policy.reference import FrozenReference, SingleReference


@dataclass(frozen=True, slots=True)
class SingleRankSpec:
    """The networks of a run, as sections."""

    model: ModelConfig
    actor: ActorConfig
    rollout_correction: RolloutCorrectionConfig
    sampling: Sampling
    total_steps: int
    ref: RefConfig | None = None
    """None: no reference policy."""
    critic: CriticConfig | None = None
    """None: no critic."""


class SingleRankPolicy(SinglePolicy):
    """A policy on one device that hands out its weights as a rank of many does."""

    def full_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.tensors().items():
            yield name, tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


class SingleRank:
    """The networks, loaded."""

    policy: SingleRankPolicy
    reference: SingleReference | FrozenReference | None
    critic: SingleCritic | None

    def __init__(self, rank_spec: RankSpec, spec: SingleRankSpec) -> None:
        self.rank_spec = rank_spec
        if rank_spec.num_threads is not None:
            torch.set_num_threads(rank_spec.num_threads)
        self.load(spec)

    def load(self, spec: SingleRankSpec) -> None:
        """Load networks, in the place of those there are."""
        model, actor, sampling, device = spec.model, spec.actor, spec.sampling, torch.device(self.rank_spec.device)
        self.policy = SingleRankPolicy.create(
            model=model,
            actor=actor,
            rollout_correction=spec.rollout_correction,
            sampling=sampling,
            total_steps=spec.total_steps,
            device=device,
        )
        self.reference = self.critic = None
        if spec.ref is not None:
            self.reference = self.policy.frozen_reference(spec.ref) or SingleReference.create(
                model=spec.ref.model_of(model),
                ref=spec.ref,
                temperature=sampling.temperature,
                device=device,
                longest=sampling.longest,
            )
        if spec.critic is not None:
            self.critic = SingleCritic.create(
                model=model,
                critic=spec.critic,
                actor=actor,
                response_length=sampling.response_length,
                total_steps=spec.total_steps,
                device=device,
                longest=sampling.longest,
            )

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """What `function(self, *args)` returns."""
        return function(self, *args)
