"""Advantages that are brought to mean 0 and deviation 1 over the batch: gae, reinforce_plus_plus and its baseline.

T tokens, N trajectories, as in `advantage`. The mean and deviation are over sampled tokens, so a long sequence weighs
more; where all tokens have the same value, every advantage is 0.
"""

import torch
from torch import Tensor

from treadle.algorithm.advantage import AdvantageInputs, Advantages, at_tokens, scores_to_go
from treadle.algorithm.baselines import centre, group_sizes
from treadle.algorithm.discounting import rewards_matrix, rewards_to_go, sum_to_come, to_matrix, to_tokens
from treadle.config.algorithm import AlgorithmConfig
from treadle.errors import MisuseError

EPSILON = 1e-8


def whiten(values_T: Tensor, among_T: Tensor) -> Tensor:
    """Mean 0 and deviation 1 over `among_T`, 0 elsewhere; one value alone has nothing to differ from, and is 0."""
    values = values_T[among_T].double()
    if len(values) < 2:
        return torch.zeros_like(values_T)
    whitened_T = (values_T - values.mean()) / (values.var() + EPSILON).sqrt()
    return torch.where(among_T, whitened_T, 0)


def gae(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """Generalised advantage estimation against the value model, whitened; returns as they are."""
    if inputs.values_T is None:
        raise MisuseError("gae needs values_T: compute the value model's values first")
    values_SL = to_matrix(inputs, inputs.values_T)
    next_SL = torch.nn.functional.pad(values_SL[:, 1:], (0, 1))
    surprise_SL = rewards_matrix(inputs) + algorithm.gamma * next_SL - values_SL
    raw_SL = sum_to_come(surprise_SL, algorithm.gamma * algorithm.lam)
    raw_T, returns_T = to_tokens(inputs, raw_SL), to_tokens(inputs, raw_SL + values_SL)
    dtype = inputs.rewards_N.dtype
    return Advantages(whiten(raw_T, inputs.mask_T).to(dtype), returns_T.to(dtype))


def reinforce_plus_plus(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """Discounted rewards to come, whitened. No groups: a batch compares all its tokens."""
    advantages_T = whiten(rewards_to_go(inputs, algorithm.gamma), inputs.mask_T)
    return Advantages(advantages_T.to(inputs.rewards_N.dtype))


def reinforce_plus_plus_baseline(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """Score less the group's mean, whitened. A group of one has advantage 0 and no part in the whitening."""
    centred_T = at_tokens(inputs, centre(inputs, scores_to_go(inputs, algorithm)))
    compared_T = inputs.mask_T & (group_sizes(inputs) > 1)[inputs.trajectory_T]
    return Advantages(whiten(centred_T, compared_T).to(inputs.rewards_N.dtype))
