"""Rewards and values along a sequence: sums to come, discounted over sampled tokens.

T tokens, S sequences, as in `advantage`; L sampled tokens of the longest sequence. Tokens that were not sampled
(observations) take no part: the token after a sampled one is the next sampled one. The reward of a trajectory stands on
the last sampled token of each of its rows, and nothing follows it, also where a limit cut the trajectory short. With
`by_turn`, what was given for a turn of the row stands on that turn's last sampled token instead.
"""

import torch
from torch import Tensor

from treadle.algorithm.advantage import AdvantageInputs
from treadle.algorithm.packed import count_by_sequence


def to_matrix(inputs: AdvantageInputs, values_T: Tensor) -> Tensor:
    """The sampled tokens of each sequence as a float64 row of S × L, zeros after its end."""
    counts_S = count_by_sequence(inputs.mask_T, inputs.sequence_T, inputs.num_sequences)
    matrix_SL = torch.zeros(len(counts_S), int(counts_S.max()) if len(counts_S) else 0, dtype=torch.float64)
    matrix_SL[_cells(inputs)] = values_T[inputs.mask_T].double()
    return matrix_SL


def to_tokens(inputs: AdvantageInputs, matrix_SL: Tensor) -> Tensor:
    """Back to T, zeros on tokens that were not sampled."""
    values_T = torch.zeros(len(inputs.mask_T), dtype=torch.float64)
    values_T[inputs.mask_T] = matrix_SL[_cells(inputs)]
    return values_T


def _cells(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    counts_S = count_by_sequence(inputs.mask_T, inputs.sequence_T, inputs.num_sequences)
    starts_S = counts_S.cumsum(0) - counts_S
    sequence = inputs.sequence_T[inputs.mask_T]
    return sequence, torch.arange(len(sequence)) - starts_S[sequence]


def rewards_matrix(inputs: AdvantageInputs, *, by_turn: bool = True) -> Tensor:
    """What each sampled token got, S × L: token rewards, and the trajectory's reward on the last one."""
    token_rewards_T = torch.zeros(len(inputs.mask_T)) if inputs.token_rewards_T is None else inputs.token_rewards_T
    rewards_SL = to_matrix(inputs, token_rewards_T)
    counts_S = count_by_sequence(inputs.mask_T, inputs.sequence_T, inputs.num_sequences)
    sampled = (counts_S > 0).nonzero().squeeze(1)
    rewards_SL[sampled, counts_S[sampled] - 1] += inputs.rewards_N.double()[inputs.trajectory_S[sampled]]
    if by_turn and inputs.turn_rewards_T is not None:
        turns_SL = to_matrix(inputs, inputs.turn_rewards_T)
        rewards_SL += turns_SL
        rewards_SL[sampled, counts_S[sampled] - 1] -= turns_SL.sum(1)[sampled]
    return rewards_SL


def sum_to_come(values_SL: Tensor, factor: float) -> Tensor:
    """Each value plus `factor` times the sum that starts after it."""
    sums_SL = values_SL.clone()
    for at in range(values_SL.shape[1] - 2, -1, -1):
        sums_SL[:, at] += factor * sums_SL[:, at + 1]
    return sums_SL


def rewards_to_go(inputs: AdvantageInputs, gamma: float, *, by_turn: bool = True) -> Tensor:
    """The discounted rewards from each sampled token on, T."""
    return to_tokens(inputs, sum_to_come(rewards_matrix(inputs, by_turn=by_turn), gamma))
