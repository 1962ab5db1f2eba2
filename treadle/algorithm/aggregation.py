"""How token losses become one number: weights per token, so that the loss is a plain weighted sum.

Invariant: a weight depends on its own sequence and on the denominator of the whole mini batch, which is given. So the
shares of micro batches and ranks add up to the loss, and to the gradient, of the mini batch, however it was split.
A backend that averages gradients over ranks multiplies its loss by their number.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from treadle.algorithm.packed import count_by_sequence
from treadle.config.actor import Aggregation


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


def weigh(losses_T: Tensor, weights_T: Tensor) -> Tensor:
    """The weighted sum, in float64, so that a split changes nothing but the last bits."""
    return (losses_T.double() * weights_T).sum()
