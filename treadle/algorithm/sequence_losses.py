"""Policy losses with one ratio per sequence: gspo and geo_mean. T tokens, S sequences, as in `packed`.

A sequence's loss stands on each of its tokens, so that seq-mean-token-mean is the mean over sequences. Both ask for
that aggregation themselves, whatever `actor.loss_agg_mode` says of other terms: any other would let the length of a
sequence weigh a ratio that does not depend on it. A rejected token has no part in its sequence's ratio.
"""

import torch

from treadle.algorithm.measures import Mean
from treadle.algorithm.packed import LossInputs, TokenLosses, mean_by_sequence
from treadle.algorithm.token_losses import clip_range, ratio_measures
from treadle.config.actor import ActorConfig


def gspo(inputs: LossInputs, actor: ActorConfig) -> TokenLosses:
    """PPO's clip on the sequence's ratio: the geometric mean of its tokens'. Each token passes on its own gradient."""
    low, high = clip_range(actor)
    mean_S = mean_by_sequence(inputs.log_ratio().detach(), inputs.mask_T, inputs.sequence_T, inputs.num_sequences)
    own_T = torch.where(inputs.mask_T, inputs.logprobs_T - inputs.logprobs_T.detach(), 0)
    ratio_T = (mean_S[inputs.sequence_T] + own_T).exp()
    plain_T = -inputs.advantages_T * ratio_T
    clipped_T = -inputs.advantages_T * ratio_T.clamp(1 - low, 1 + high)
    return TokenLosses(
        torch.maximum(plain_T, clipped_T),
        {
            "actor/pg_clipfrac": Mean.of((clipped_T > plain_T).double(), inputs.mask_T),
            **ratio_measures(inputs, ratio_T),
        },
        aggregation="seq-mean-token-mean",
    )


def geo_mean(inputs: LossInputs, actor: ActorConfig) -> TokenLosses:
    """GMPO: the geometric mean of ratios that are clipped token by token, in log space, on their bad side only.

    The clip range is one of log ratios: 0.4 allows ratios from exp(-0.4) to exp(0.4).
    """
    low, high = clip_range(actor)
    log_T = inputs.log_ratio()
    kept_T = torch.where(inputs.advantages_T < 0, log_T.clamp(min=-low), log_T.clamp(max=high))
    mean_S = mean_by_sequence(kept_T, inputs.mask_T, inputs.sequence_T, inputs.num_sequences)
    ratio_T = mean_S.exp()[inputs.sequence_T]
    return TokenLosses(
        -inputs.advantages_T * ratio_T,
        {
            "actor/pg_clipfrac": Mean.of((kept_T != log_T).double(), inputs.mask_T),
            **ratio_measures(inputs, ratio_T),
        },
        aggregation="seq-mean-token-mean",
    )
