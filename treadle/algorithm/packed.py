"""What a loss sees: the response tokens of a micro batch, packed flat, with no padding.

    T  tokens: every response token of a micro batch, sequence after sequence, in order
    S  sequences: the rows of a micro batch; forks of one trajectory are several; none is split over micro batches
    N  trajectories, G  groups, D  hidden size, V  vocabulary

Owns the records that cross between policy and losses, and the sums over sequences. Knows no model and no device.
Invariant: what stands on a token outside the mask never matters, NaN included.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.algorithm.measures import Measures
from treadle.config.actor import ActorConfig, Aggregation

LOG_BOUND = 20.0
"""Where log ratios are cut, so that no exponential overflows: far beyond any that could teach something."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What the policy loss is computed from. Only `logprobs_T` and `entropy_T` carry gradients."""

    logprobs_T: Tensor
    advantages_T: Tensor
    mask_T: Tensor
    """True exactly on sampled tokens."""
    sequence_T: Tensor
    """Index of the sequence that each token belongs to, never falling."""
    num_sequences: int
    old_logprobs_T: Tensor | None = None
    """The policy at the start of the step. None where this is the step's only optimizer step: it is the current one."""
    rollout_logprobs_T: Tensor | None = None
    """Of the whole softmax, as the engine computed them."""
    processed_logprobs_T: Tensor | None = None
    """Of the distribution that the engine sampled from: after penalties, min-p, top-k and top-p. None: the same."""
    ref_logprobs_T: Tensor | None = None
    entropy_T: Tensor | None = None
    selected_T: Tensor | None = None
    """From `select_tokens`, for the losses that treat some tokens of the mini batch apart."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a policy loss reads; `old_logprobs_T` is whatever the ratio is taken against."""

    logprobs_T: Tensor
    old_logprobs_T: Tensor
    advantages_T: Tensor
    mask_T: Tensor
    """True on sampled tokens that are not rejected; other tokens must not change the loss of any token."""
    sequence_T: Tensor
    num_sequences: int
    selected_T: Tensor | None = None

    def log_ratio(self) -> Tensor:
        """log(new / old) per token: 0 outside the mask, bounded."""
        return torch.where(self.mask_T, self.logprobs_T - self.old_logprobs_T, 0).clamp(-LOG_BOUND, LOG_BOUND)


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """What a policy loss returns: one loss per token, still to be weighed and summed."""

    losses_T: Tensor
    measures: Measures
    aggregation: Aggregation | None = None
    """Set by a loss that is defined for one aggregation only; None for `actor.loss_agg_mode`."""


PolicyLoss = Callable[[LossInputs, ActorConfig], TokenLosses]


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A micro batch's share of the mini batch's loss: shares add up, and so do their gradients."""

    loss: Tensor
    measures: Measures


def sum_by_sequence(values_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    """One sum per sequence, added up in float64: sequences are long, and ratios are exponentials of their sums."""
    sums_S = torch.zeros(num_sequences, dtype=torch.float64, device=values_T.device)
    return sums_S.index_add(0, sequence_T, values_T.double()).to(values_T.dtype)


def count_by_sequence(mask_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    """How many tokens of each sequence are in the mask."""
    counts_S = torch.zeros(num_sequences, dtype=torch.int64, device=mask_T.device)
    return counts_S.index_add(0, sequence_T, mask_T.long())


def mean_by_sequence(values_T: Tensor, mask_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    """The mean of each sequence over its tokens in the mask; 0 where it has none."""
    counts_S = count_by_sequence(mask_T, sequence_T, num_sequences).clamp(min=1)
    return sum_by_sequence(torch.where(mask_T, values_T, 0), sequence_T, num_sequences) / counts_S
