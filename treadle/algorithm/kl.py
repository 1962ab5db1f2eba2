"""KL divergence from the reference policy: estimators, the penalty in the reward, the term in the loss, KL controller.

Estimators, for a token sampled from the policy, with d = log policy - log reference:
    k1 = d    k2 = d² / 2    k3 = exp(-d) + d - 1
k1 and k3 have the divergence as their mean, k2 nearly so. Gradients are another matter: the mean gradient of k1 is
zero, that of k3 belongs to the divergence the other way round, and that of k2 is the divergence's own. So in the loss
`k1+` and `k3+` have the value they are named for and the gradient of k2; `k1`, `k2` and `k3` have their own.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from treadle.algorithm.micro_batch import LOG_BOUND, count_by_sequence, mean_by_sequence
from treadle.config.training import AlgorithmConfig, KLControlConfig, KLLossType

Estimator = Literal["k1", "k2", "k3"]

LARGEST_K3 = 10.0
"""k3 grows as an exponential: one token that the reference finds absurd must not drown all others."""

LARGEST_ERROR = 0.2
"""Adaptive control never takes a divergence to be further off its target than this fraction."""


def estimate_kl(logprobs_T: Tensor, ref_logprobs_T: Tensor, estimator: Estimator) -> Tensor:
    """The divergence at each token. Gradients are those of the formula: see `kl_loss` for a loss."""
    difference_T = (logprobs_T - ref_logprobs_T).clamp(-LOG_BOUND, LOG_BOUND)
    if estimator == "k1":
        return difference_T
    if estimator == "k2":
        return difference_T.square() / 2
    return (torch.expm1(-difference_T) + difference_T).clamp(max=LARGEST_K3)


def kl_loss(logprobs_T: Tensor, ref_logprobs_T: Tensor, kind: KLLossType) -> Tensor:
    """The divergence at each token: with the estimator's own gradient, or with k2's where the name ends in a plus.

    Samples are taken as the policy's own.
    """
    if kind in ("k1", "k2", "k3"):
        return estimate_kl(logprobs_T, ref_logprobs_T, kind)
    value_T = estimate_kl(logprobs_T, ref_logprobs_T, "k1" if kind == "k1+" else "k3").detach()
    slope_T = estimate_kl(logprobs_T, ref_logprobs_T, "k2")
    return value_T + (slope_T - slope_T.detach())


@dataclass(frozen=True, slots=True)
class KLPenalty:
    """KL in the reward: what each token gets, and the divergence that control steers."""

    token_rewards_T: Tensor
    kl: float
    """Mean over sequences of their mean per sampled token."""


def penalise_kl(
    old_logprobs_T: Tensor,
    ref_logprobs_T: Tensor,
    mask_T: Tensor,
    sequence_T: Tensor,
    num_sequences: int,
    algorithm: AlgorithmConfig,
    coefficient: float,
) -> KLPenalty:
    """The token rewards of a batch under `algorithm.use_kl_in_reward`, weighted by the control's coefficient."""
    kl_T = torch.where(mask_T, estimate_kl(old_logprobs_T, ref_logprobs_T, algorithm.kl_penalty), 0)
    means_S = mean_by_sequence(kl_T, mask_T, sequence_T, num_sequences)
    sampled = int((count_by_sequence(mask_T, sequence_T, num_sequences) > 0).sum())
    return KLPenalty(-coefficient * kl_T, float(means_S.sum()) / max(1, sampled))


@dataclass(frozen=True, slots=True)
class KLControl:
    """The weight of KL in the reward, fixed or steered towards a target. The coefficient is its whole state."""

    kl_ctrl: KLControlConfig
    coefficient: float

    @classmethod
    def start(cls, kl_ctrl: KLControlConfig) -> "KLControl":
        return cls(kl_ctrl, kl_ctrl.kl_coef)

    def after(self, kl: float, num_trajectories: int) -> "KLControl":
        """The control after a batch: more than the target raises the weight, less lowers it, by 20 % at most."""
        kl_ctrl = self.kl_ctrl
        if kl_ctrl.type == "fixed":
            return self
        error = min(max(kl / kl_ctrl.target_kl - 1, -LARGEST_ERROR), LARGEST_ERROR)
        return replace(self, coefficient=self.coefficient * (1 + error * min(1, num_trajectories / kl_ctrl.horizon)))
