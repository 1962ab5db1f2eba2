"""Policy losses with one ratio per token: vanilla (PPO), cispo, sapo, dppo and gpg. T tokens, as in `packed`.

Each maps the inputs to a loss per token; weighing and summing happen elsewhere.
"""

from math import exp

import torch
from torch import Tensor

from treadle.algorithm.measures import Mean, Measures, Peak
from treadle.algorithm.packed import LOG_BOUND, LossInputs, TokenLosses
from treadle.config.actor import ActorConfig

SMALLEST = 1e-8
"""Added to the probability of all other tokens, which is 0 for a token that is certain."""


def clip_range(actor: ActorConfig) -> tuple[float, float]:
    """How far a ratio may move below and above 1."""
    low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
    high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
    return low, high


def largest_ratio(actor: ActorConfig) -> float:
    """The bound of dual clipping; where there is none, that of any log ratio."""
    return exp(LOG_BOUND) if actor.clip_ratio_c is None else actor.clip_ratio_c


def ratio_measures(inputs: LossInputs, ratio_T: Tensor) -> Measures:
    """How far the policy has moved from the old one."""
    return {
        "actor/ppo_kl": Mean.of(-inputs.log_ratio().detach(), inputs.mask_T),
        "actor/ratio_mean": Mean.of(ratio_T.detach(), inputs.mask_T),
        "actor/ratio_max": Peak.of(ratio_T.detach(), inputs.mask_T),
    }


def vanilla(inputs: LossInputs, actor: ActorConfig) -> TokenLosses:
    """PPO's clipped loss, asymmetric, with dual clipping: a negative advantage costs at most `clip_ratio_c` times.

    INTELLECT-2 calls the same bound two-sided clipping, TRL `delta`.
    """
    low, high = clip_range(actor)
    advantages_T, ratio_T = inputs.advantages_T, inputs.log_ratio().exp()
    plain_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * ratio_T.clamp(1 - low, 1 + high)
    worse_T = torch.maximum(plain_T, clipped_T)
    bound_T = -advantages_T * largest_ratio(actor)
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
    """Clips the weight of a token and not its gradient: every token keeps teaching.

    `cispo_max_ratio` is the bound of MiniMax-M1 and ScaleRL: from above only. Without it, weights are clipped on both
    sides, by the clip range.
    """
    low, high = clip_range(actor)
    largest = actor.policy_loss.cispo_max_ratio
    ratio_T = inputs.log_ratio().exp().detach()
    weight_T = ratio_T.clamp(1 - low, 1 + high) if largest is None else ratio_T.clamp(max=largest)
    return TokenLosses(
        -weight_T * inputs.advantages_T * inputs.logprobs_T,
        {
            "actor/pg_clipfrac": Mean.of((weight_T != ratio_T).double(), inputs.mask_T),
            **ratio_measures(inputs, ratio_T),
        },
    )


def sapo(inputs: LossInputs, actor: ActorConfig) -> TokenLosses:
    """A soft gate in the place of PPO's clip: its slope is 1 at ratio 1 and fades on both sides. By sequence mean."""
    policy_loss = actor.policy_loss
    ratio_T = inputs.log_ratio().exp()
    tau_pos, tau_neg = ratio_T.new_tensor(policy_loss.tau_pos), ratio_T.new_tensor(policy_loss.tau_neg)
    tau_T = torch.where(inputs.advantages_T > 0, tau_pos, tau_neg)
    gate_T = torch.sigmoid(tau_T * (ratio_T - 1))
    slope_T = (4 * gate_T * (1 - gate_T)).detach()
    return TokenLosses(
        -inputs.advantages_T * gate_T * 4 / tau_T,
        {"actor/gate_slope": Mean.of(slope_T, inputs.mask_T), **ratio_measures(inputs, ratio_T)},
        aggregation="seq-mean-token-mean",
    )


def dppo_tv(inputs: LossInputs, actor: ActorConfig) -> TokenLosses:
    """DPPO, binary total variation: a token is silent once its probability has moved by more than the clip range."""
    moved_T = (inputs.logprobs_T.exp() - inputs.old_logprobs_T.exp()).detach()
    return _dppo(inputs, actor, moved_T, moved_T.abs())


def dppo_kl(inputs: LossInputs, actor: ActorConfig) -> TokenLosses:
    """DPPO, binary KL: likewise, by the divergence between this token and all others, before and now."""
    new_T, old_T = inputs.logprobs_T.detach().double(), inputs.old_logprobs_T.double()
    stays_T, stayed_T = 1 - new_T.exp(), 1 - old_T.exp()
    others_T = stayed_T * ((stayed_T + SMALLEST).log() - (stays_T + SMALLEST).log())
    return _dppo(inputs, actor, new_T.exp() - old_T.exp(), old_T.exp() * (old_T - new_T) + others_T)


def _dppo(inputs: LossInputs, actor: ActorConfig, moved_T: Tensor, divergence_T: Tensor) -> TokenLosses:
    """The truncated policy gradient, without tokens that have moved too far the way their advantage pushes them."""
    low, high = clip_range(actor)
    ratio_T = inputs.log_ratio().exp().detach()
    rising_T = inputs.advantages_T > 0
    too_far_T = torch.where(rising_T, (moved_T > 0) & (divergence_T > high), (moved_T < 0) & (divergence_T > low))
    weight_T = torch.where(too_far_T, 0, ratio_T.clamp(max=largest_ratio(actor)))
    return TokenLosses(
        -weight_T * inputs.advantages_T * inputs.logprobs_T,
        {
            "actor/pg_clipfrac": Mean.of(too_far_T.double(), inputs.mask_T),
            "actor/pg_clipfrac_lower": Mean.of((~too_far_T & (weight_T != ratio_T)).double(), inputs.mask_T),
            **ratio_measures(inputs, ratio_T),
        },
    )


def gpg(inputs: LossInputs, actor: ActorConfig) -> TokenLosses:
    """The plain policy gradient: no ratio, no clipping."""
    ratio_T = inputs.log_ratio().exp()
    return TokenLosses(-inputs.advantages_T * inputs.logprobs_T, ratio_measures(inputs, ratio_T))
