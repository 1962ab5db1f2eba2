"""Advantages of whole trajectories against a baseline: grpo, gdpo, dr_grpo, grpo_passk, rloo, opo, remax.

N trajectories, G groups, K turns, as in `advantage`. grpo, dr_grpo and rloo can compare turn by turn: a sample that had
ended before a turn counts there, with nothing to come. Comparing only those that are still going would give the choice
to go on a share of the others' rewards. Under all but remax a group of one has advantage 0, and so has a group
whose scores are all the same: nothing to compare with, nothing to learn.
"""

import torch
from torch import Tensor

from treadle.algorithm.advantage import AdvantageInputs, Advantages, add_up, score, scores_to_go, spread
from treadle.algorithm.discounting import rewards_to_go
from treadle.config.algorithm import AlgorithmConfig
from treadle.errors import MisuseError

EPSILON = 1e-6


def group_sizes(inputs: AdvantageInputs) -> Tensor:
    """The number of trajectories in the group of each trajectory, N."""
    return torch.bincount(inputs.group_N, minlength=inputs.num_groups)[inputs.group_N]


def centre(inputs: AdvantageInputs, scores: Tensor, weights_N: Tensor | None = None) -> Tensor:
    """Scores, N or N × K, less the (weighted) mean of their group."""
    weights_N = torch.ones(len(scores), dtype=torch.float64) if weights_N is None else weights_N.double()
    weights = weights_N.view(-1, *[1] * (scores.dim() - 1))
    total_G = add_up(scores * weights, inputs.group_N, inputs.num_groups)
    weight_G = add_up(weights, inputs.group_N, inputs.num_groups).clamp(min=EPSILON)
    return scores - (total_G / weight_G)[inputs.group_N]


def deviation(inputs: AdvantageInputs, centred: Tensor) -> Tensor:
    """The standard deviation of the group of each trajectory, N or N × 1, with Bessel's correction.

    Of all turns together, where there is a column for each: turns of a group then keep their proportions.
    """
    squares, columns_N = centred.square(), torch.ones(len(centred), dtype=torch.float64)
    if centred.dim() == 2:
        squares, columns_N = squares.sum(1), _count_turns(inputs, centred.shape[1])
    squares_G = add_up(squares, inputs.group_N, inputs.num_groups)
    deviation_N = (squares_G[inputs.group_N] / ((group_sizes(inputs) - 1).clamp(min=1) * columns_N)).sqrt()
    return deviation_N.unsqueeze(1) if centred.dim() == 2 else deviation_N


def _count_turns(inputs: AdvantageInputs, columns: int) -> Tensor:
    """The turns of the longest trajectory in the group of each trajectory, N."""
    if columns == 1 or inputs.num_turns_N is None:
        return torch.ones(inputs.num_trajectories, dtype=torch.float64)
    longest_G = torch.zeros(inputs.num_groups, dtype=torch.int64)
    return longest_G.scatter_reduce(0, inputs.group_N, inputs.num_turns_N, "amax")[inputs.group_N].double()


def spread_of_batch(scores: Tensor) -> Tensor:
    """The standard deviation of all whole trajectories of the batch, whatever their group; 0 for one alone."""
    whole_N = scores if scores.dim() == 1 else scores[:, 0]
    return whole_N.std() if len(whole_N) > 1 else torch.zeros((), dtype=torch.float64)


def grpo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """Score less the group's mean, over the standard deviation of the group, or of the batch (`norm_adv_scope`).

    Not divided where `norm_adv_by_std_in_grpo` is false.
    """
    scores = scores_to_go(inputs, algorithm)
    centred = centre(inputs, scores)
    if algorithm.norm_adv_by_std_in_grpo:
        by_batch = algorithm.norm_adv_scope == "batch"
        centred = centred / ((spread_of_batch(scores) if by_batch else deviation(inputs, centred)) + EPSILON)
    return spread(inputs, centred)


def gdpo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """Each part of the reward over its own deviation in the group, then their weighted sum over that of the batch.

    A part that is rare or small is not drowned by one that varies more, as it is when scores are added up first.
    """
    if inputs.parts_NF is None or inputs.part_weights_F is None:
        raise MisuseError("gdpo needs parts_NF and part_weights_F: the parts of each reward and their weights")
    whole_N = torch.zeros(inputs.num_trajectories, dtype=torch.float64)
    for part, weight in enumerate(inputs.part_weights_F.tolist()):
        centred_N = centre(inputs, inputs.parts_NF[:, part].double())
        whole_N += weight * centred_N / (deviation(inputs, centred_N) + EPSILON)
    return spread(inputs, whole_N / (spread_of_batch(whole_N) + EPSILON))


def dr_grpo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """Score less the group's mean. Its authors sum tokens too: `actor.loss_agg_mode: seq-mean-token-sum-norm`."""
    return spread(inputs, centre(inputs, scores_to_go(inputs, algorithm)))


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
    factor_N = group_sizes(inputs) / (group_sizes(inputs) - 1).clamp(min=1)
    return spread(inputs, centre(inputs, scores_to_go(inputs, algorithm)) * factor_N.unsqueeze(1))


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
    advantages_T = torch.where(compared_T, rewards_to_go(inputs, 1.0, by_turn=False) - baselines_T, 0)
    return Advantages(advantages_T.to(inputs.rewards_N.dtype))
