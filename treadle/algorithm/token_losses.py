"""Policy losses with one ratio per token: vanilla (PPO), cispo and gpg. T tokens, as in `packed`.

Each maps the inputs to a loss per token; weighing and summing happen elsewhere.
"""

import torch
from torch import Tensor

from treadle.algorithm.measures import Mean, Measures, Peak
from treadle.algorithm.packed import LossInputs, TokenLosses
from treadle.config.actor import ActorConfig


def clip_range(actor: ActorConfig) -> tuple[float, float]:
    """How far a ratio may move below and above 1."""
    low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
    high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
    return low, high


def ratio_measures(inputs: LossInputs, ratio_T: Tensor) -> Measures:
    """How far the policy has moved from the old one."""
    return {
        "actor/ppo_kl": Mean.of(-inputs.log_ratio().detach(), inputs.mask_T),
        "actor/ratio_mean": Mean.of(ratio_T.detach(), inputs.mask_T),
        "actor/ratio_max": Peak.of(ratio_T.detach(), inputs.mask_T),
    }


def vanilla(inputs: LossInputs, actor: ActorConfig) -> TokenLosses:
    """PPO's clipped loss, asymmetric, with dual clipping: a negative advantage costs at most `clip_ratio_c` times."""
    low, high = clip_range(actor)
    advantages_T, ratio_T = inputs.advantages_T, inputs.log_ratio().exp()
    plain_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * ratio_T.clamp(1 - low, 1 + high)
    worse_T = torch.maximum(plain_T, clipped_T)
    bound_T = -advantages_T * actor.clip_ratio_c
    negative_T = advantages_T < 0
    return TokenLosses(
        torch.where(negative_T, torch.minimum(worse_T, bound_T), worse_T),
        {
            "actor/pg_clipfrac": Mean.of((clipped_T > plain_T).double(), inputs.mask_T),
            "actor/pg_clipfrac_lower": Mean.of((negative_T & (worse_T > bound_T)).double(), inputs.mask_T),
            **ratio_measures(inputs, ratio_T),
        },
    )


def cispo(inputs: LossInputs, actor: ActorConfig) -> TokenLosses:
    """Clips the weight of a token and not its gradient: every token keeps teaching."""
    low, high = clip_range(actor)
    ratio_T = inputs.log_ratio().exp().detach()
    weight_T = ratio_T.clamp(1 - low, 1 + high)
    return TokenLosses(
        -weight_T * inputs.advantages_T * inputs.logprobs_T,
        {
            "actor/pg_clipfrac": Mean.of((weight_T != ratio_T).double(), inputs.mask_T),
            **ratio_measures(inputs, ratio_T),
        },
    )


def gpg(inputs: LossInputs, actor: ActorConfig) -> TokenLosses:
    """The plain policy gradient: no ratio, no clipping."""
    ratio_T = inputs.log_ratio().exp()
    return TokenLosses(-inputs.advantages_T * inputs.logprobs_T, ratio_measures(inputs, ratio_T))
