"""The loss of the value model. T tokens, as in `packed`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.algorithm.aggregation import Denominator, token_weights, weigh
from treadle.algorithm.measures import Mean, Measures, Sum
from treadle.algorithm.packed import LossOutput
from treadle.config.actor import CriticConfig


@dataclass(frozen=True, slots=True)
class ValueBatch:
    """What the value loss is computed from. Only `values_T` carries gradients."""

    values_T: Tensor
    old_values_T: Tensor
    """As they were when the advantages were computed."""
    returns_T: Tensor
    mask_T: Tensor
    sequence_T: Tensor
    num_sequences: int


def compute_value_loss(batch: ValueBatch, denominator: Denominator, critic: CriticConfig) -> LossOutput:
    """Half the squared error, the worse of clipped and unclipped: a micro batch's share."""
    mask_T = batch.mask_T
    values_T = torch.where(mask_T, batch.values_T, 0)
    old_T, returns_T = torch.where(mask_T, batch.old_values_T, 0), torch.where(mask_T, batch.returns_T, 0)
    near_T = old_T + (values_T - old_T).clamp(-critic.cliprange_value, critic.cliprange_value)
    plain_T, clipped_T = (values_T - returns_T).square(), (near_T - returns_T).square()
    weights_T = token_weights(mask_T, batch.sequence_T, batch.num_sequences, critic.loss_agg_mode, denominator)
    loss = weigh(torch.maximum(plain_T, clipped_T) / 2, weights_T)
    measures: Measures = {
        "critic/vf_loss": Sum(loss.detach()),
        "critic/vf_clipfrac": Mean.of((clipped_T > plain_T).double(), mask_T),
        "critic/vpred_mean": Mean.of(values_T.detach(), mask_T),
    }
    return LossOutput(loss, measures)
