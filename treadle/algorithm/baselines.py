"""Advantages of whole trajectories against a baseline: grpo, dr_grpo, grpo_passk, rloo, opo, remax.

N trajectories, G groups, as in `advantage`. Under all but remax a group of one has advantage 0, and so has a group
whose scores are all the same: nothing to compare with, nothing to learn.
"""

import torch
from torch import Tensor

from treadle.algorithm.advantage import AdvantageInputs, Advantages, add_up, score, spread
from treadle.algorithm.discounting import rewards_to_go
from treadle.config.algorithm import AlgorithmConfig
from treadle.errors import MisuseError

EPSILON = 1e-6


def group_sizes(inputs: AdvantageInputs) -> Tensor:
    """The number of trajectories in the group of each trajectory, N."""
    return torch.bincount(inputs.group_N, minlength=inputs.num_groups)[inputs.group_N]


def centre(inputs: AdvantageInputs, scores_N: Tensor, weights_N: Tensor | None = None) -> Tensor:
    """Scores less the (weighted) mean of their group."""
    weights_N = torch.ones_like(scores_N) if weights_N is None else weights_N.double()
    total_G = add_up(scores_N * weights_N, inputs.group_N, inputs.num_groups)
    weight_G = add_up(weights_N, inputs.group_N, inputs.num_groups).clamp(min=EPSILON)
    return scores_N - (total_G / weight_G)[inputs.group_N]


def deviation(inputs: AdvantageInputs, centred_N: Tensor) -> Tensor:
    """The standard deviation of the group of each trajectory, N, with Bessel's correction."""
    squares_G = add_up(centred_N.square(), inputs.group_N, inputs.num_groups)
    return (squares_G[inputs.group_N] / (group_sizes(inputs) - 1).clamp(min=1)).sqrt()


def grpo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """Score less the group's mean, over the group's standard deviation unless `norm_adv_by_std_in_grpo` is false."""
    centred_N = centre(inputs, score(inputs))
    if algorithm.norm_adv_by_std_in_grpo:
        centred_N = centred_N / (deviation(inputs, centred_N) + EPSILON)
    return spread(inputs, centred_N)


def dr_grpo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """Score less the group's mean. Its authors sum tokens too: `actor.loss_agg_mode: seq-mean-token-sum-norm`."""
    return spread(inputs, centre(inputs, score(inputs)))


def grpo_passk(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """Only the best of a group has an advantage: its lead over the second. For the chance that one of k is right."""
    scores_N = score(inputs)
    advantages_N = torch.zeros_like(scores_N)
    for group in range(inputs.num_groups):
        members = (inputs.group_N == group).nonzero().squeeze(1)
        if len(members) > 1:
            best, second = scores_N[members].topk(2).indices.tolist()
            advantages_N[members[best]] = scores_N[members[best]] - scores_N[members[second]]
    if algorithm.norm_adv_by_std_in_grpo:
        advantages_N = advantages_N / (deviation(inputs, centre(inputs, scores_N)) + EPSILON)
    return spread(inputs, advantages_N)


def rloo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """Score less the mean of the others in the group."""
    sizes_N = group_sizes(inputs)
    return spread(inputs, centre(inputs, score(inputs)) * sizes_N / (sizes_N - 1).clamp(min=1))


def opo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """Score less the group's mean weighted by sampled tokens: the baseline of least variance, nearly."""
    lengths_N = add_up(inputs.mask_T, inputs.trajectory_T, inputs.num_trajectories)
    return spread(inputs, centre(inputs, score(inputs), lengths_N))


def remax(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """What is still to come at each token, less the reward of the group's greedy answer; 0 in a group that has none."""
    if inputs.baselines_G is None:
        raise MisuseError("remax needs baselines_G: the reward of one greedy answer for each group")
    baselines_T = inputs.baselines_G.double()[inputs.group_N][inputs.trajectory_T]
    compared_T = inputs.mask_T & ~baselines_T.isnan()
    advantages_T = torch.where(compared_T, rewards_to_go(inputs, 1.0) - baselines_T, 0)
    return Advantages(advantages_T.to(inputs.rewards_N.dtype))
