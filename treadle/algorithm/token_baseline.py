"""Optimal token baseline (OTB): for each sampled token, a mean of the group that weighs samples by their gradients.

    A_t = G_t - B_t      B_t = Σ_i G_t W_t / Σ_i W_t      W_t = Σ_{j ≤ t} (1 - 2π_j + Σ_v π_j(v)²)

G_t is what sample i still gets from its t-th sampled token on, and W_t estimates the squared norm of its gradient so
far: B_t is the baseline of least variance. Where a single sample of the group is that long, it has no baseline: its
advantage is G_t. A group of one has advantage 0. Tokens of forks are compared with the first rows of the group, at the
same count of sampled tokens in their own row.

S sequences, L sampled tokens of the longest, G groups, as in `advantage`.
"""

import torch
from torch import Tensor

from treadle.algorithm.advantage import AdvantageInputs, Advantages, add_up, is_fork
from treadle.algorithm.discounting import rewards_matrix, sum_to_come, to_matrix, to_tokens
from treadle.config.algorithm import AlgorithmConfig
from treadle.errors import MisuseError

TINY = 1e-12
"""Added to every weight: where no token of any sample could have been another, the mean is a plain one."""


def optimal_token_baseline(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """Rewards to come, less the weighted mean of those of the group at the same token."""
    if inputs.gradient_norms_T is None:
        raise MisuseError(
            "optimal_token_baseline needs gradient_norms_T: what Policy.gradient_norms says of each token"
        )
    group_S = inputs.group_N[inputs.trajectory_S]
    returns_SL = sum_to_come(rewards_matrix(inputs), 1.0)
    baselines_GL = _baselines(inputs, group_S, returns_SL)
    compared_S = torch.bincount(inputs.group_N, minlength=inputs.num_groups)[group_S] > 1
    advantages_SL = torch.where(compared_S.unsqueeze(1), returns_SL - baselines_GL[group_S], 0)
    return Advantages(to_tokens(inputs, advantages_SL).to(inputs.rewards_N.dtype))


def _baselines(inputs: AdvantageInputs, group_S: Tensor, returns_SL: Tensor) -> Tensor:
    """The weighted mean of each group at each token, G × L; 0 where fewer than two samples have one."""
    assert inputs.gradient_norms_T is not None
    first_S = ~is_fork(inputs)
    present_SL = to_matrix(inputs, torch.ones(len(inputs.mask_T))) * first_S.unsqueeze(1)
    weights_SL = (to_matrix(inputs, inputs.gradient_norms_T).cumsum(1) + TINY) * present_SL
    # Relative to the lowest, so that the mean of equal returns is exactly that return.
    lowest_GL = torch.full((inputs.num_groups, returns_SL.shape[1]), torch.inf, dtype=torch.float64)
    lowest_GL.scatter_reduce_(
        0, group_S.unsqueeze(1).expand_as(returns_SL), returns_SL.where(present_SL > 0, torch.inf), "amin"
    )
    lowest_GL = lowest_GL.nan_to_num(posinf=0.0)
    above_SL = (returns_SL - lowest_GL[group_S]) * weights_SL
    total_GL, weight_GL, count_GL = (
        add_up(values_SL, group_S, inputs.num_groups) for values_SL in (above_SL, weights_SL, present_SL)
    )
    return torch.where(count_GL > 1, lowest_GL + total_GL / weight_GL.clamp(min=TINY), 0)
