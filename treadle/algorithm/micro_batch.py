"""Micro batch: the response tokens that a loss reads, packed flat without padding; and loss aggregation.

    T  tokens: every response token of a micro batch, sequence after sequence, in order
    S  sequences: the rows of a micro batch; forks of one trajectory are several; none is split over micro batches
    N  trajectories, G  groups, D  hidden size, V  vocabulary

Owns the records that cross between policy and losses, sums over sequences, and the token weights of
`actor.loss_agg_mode`. Knows no model and no device.
Invariant: what stands on a token outside the mask never matters, NaN included. A token's weight depends on its own
sequence and on the denominator of the whole mini batch, which is given: so shares of micro batches and ranks add up to
the loss, and to the gradient, of the mini batch, however it was split. A backend that averages gradients over ranks
multiplies its loss by their number.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.algorithm.metrics import LossMetrics
from treadle.config.training import ActorConfig, Aggregation

LOG_BOUND = 20.0
"""Where log ratios are clamped, so that no exponential overflows: far beyond any that could teach something."""


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
    metrics: LossMetrics
    aggregation: Aggregation | None = None
    """Set by a loss that is defined for one aggregation only; None for `actor.loss_agg_mode`."""
    clipped_T: Tensor | None = None
    """Tokens whose ratio was clipped or that were silenced, for annotations; None where a loss clips none."""


PolicyLoss = Callable[[LossInputs, ActorConfig], TokenLosses]


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A micro batch's share of the mini batch's loss: shares add up, and so do their gradients."""

    loss: Tensor
    metrics: LossMetrics
    tokens: "TokenTerms | None" = None
    """What became of each token in the policy's loss."""


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """What became of each token in the policy's loss: for records, read by no computation."""

    weights_T: Tensor | None
    """Importance weights; None where all are 1."""
    loss_mask_T: Tensor
    """Whether it is in the policy's term at all."""
    clipped_T: Tensor | None


def take_rows(values_T: Tensor, index_E: Tensor) -> Tensor:
    """`values_T[index_E]`, whose gradient is the same every time where an index comes several times.

    In backward the gradients of copies are added up: on a CPU indexing does so from several threads, in any order, and
    `index_select` one after another; on a GPU it is the other way round.
    """
    return values_T[index_E] if values_T.is_cuda else values_T.index_select(0, index_E)


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


@dataclass(frozen=True, slots=True)
class Denominator:
    """What a whole mini batch, over all micro batches and ranks, is divided by. Rejected tokens count."""

    num_tokens: int
    num_sequences: int
    """Those with at least one sampled token."""
    scale: float = 1.0
    """Divisor of seq-mean-token-sum-norm: `actor.loss_scale_factor`, or else `rollout.response_length`."""

    @classmethod
    def of(cls, lengths: Iterable[int], scale: float = 1.0) -> "Denominator":
        """From the number of sampled tokens in each sequence of the mini batch."""
        sampled = [length for length in lengths if length]
        return cls(sum(sampled), len(sampled), scale)


def token_weights(
    mask_T: Tensor, sequence_T: Tensor, num_sequences: int, mode: Aggregation, denominator: Denominator
) -> Tensor:
    """The weight of each token's loss in the sum, in float64; 0 outside the mask."""
    weights_T = mask_T.double()
    if mode == "token-mean":
        return weights_T / max(1, denominator.num_tokens)
    weights_T = weights_T / max(1, denominator.num_sequences)
    if mode == "seq-mean-token-sum":
        return weights_T
    if mode == "seq-mean-token-sum-norm":
        return weights_T / denominator.scale
    lengths_S = count_by_sequence(mask_T, sequence_T, num_sequences).clamp(min=1)
    return weights_T / lengths_S[sequence_T]


def weighted_sum(losses_T: Tensor, weights_T: Tensor) -> Tensor:
    """The weighted sum, in float64, so that a split changes nothing but the last bits."""
    return (losses_T.double() * weights_T).sum()
