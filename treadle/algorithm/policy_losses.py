"""Policy losses: vanilla (PPO), cispo, sapo, dppo, gpg, gspo, geo_mean (GMPO), clip_cov and kl_cov.

T tokens, S sequences, as in `micro_batch`. Each maps `LossInputs` to a loss per token; aggregation happens in `loss`.

`clipped_T` marks the tokens that a loss clips or silences; sapo, gpg and kl_cov clip none.

One ratio per token: vanilla, cispo, sapo, dppo_tv, dppo_kl, gpg.
One ratio per sequence: gspo, geo_mean. The sequence's loss is on each of its tokens, so that seq-mean-token-mean is
the mean over sequences. Both ask for that aggregation, whatever `actor.loss_agg_mode` says of other terms: any other
would let the length of a sequence weigh a ratio that does not depend on it. A rejected token has no part in the ratio.
Selected tokens: clip_cov and kl_cov treat the few tokens with the largest covariance of logprob and advantage apart,
since these make entropy collapse. Tokens are selected once, over the whole mini batch before it is split, from
advantages and old logprobs: so the selection does not depend on micro batches, ranks or the order of steps.
"""

from math import exp

import torch
from torch import Tensor

from treadle.algorithm.metrics import LossMetrics, MaxMetric, MeanMetric
from treadle.algorithm.micro_batch import LOG_BOUND, LossInputs, TokenLosses, mean_by_sequence, take_rows
from treadle.config.training import ActorConfig, PolicyLossConfig
from treadle.errors import MisuseError

DPPO_EPSILON = 1e-8
"""Added to the probability of all other tokens, which is 0 for a token that is certain."""


def clip_range(actor: ActorConfig) -> tuple[float, float]:
    """How far a ratio may move below and above 1."""
    low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
    high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
    return low, high


def largest_ratio(actor: ActorConfig) -> float:
    """The bound of dual clipping; where there is none, that of any log ratio."""
    return exp(LOG_BOUND) if actor.clip_ratio_c is None else actor.clip_ratio_c


def ratio_metrics(inputs: LossInputs, ratio_T: Tensor) -> LossMetrics:
    """How far the policy has moved from the old one."""
    return {
        "actor/ppo_kl": MeanMetric.of(-inputs.log_ratio().detach(), inputs.mask_T),
        "actor/ratio_mean": MeanMetric.of(ratio_T.detach(), inputs.mask_T),
        "actor/ratio_max": MaxMetric.of(ratio_T.detach(), inputs.mask_T),
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
    bounded_T = negative_T & (worse_T > bound_T)
    return TokenLosses(
        torch.where(negative_T, torch.minimum(worse_T, bound_T), worse_T),
        {
            "actor/pg_clipfrac": MeanMetric.of((clipped_T > plain_T).double(), inputs.mask_T),
            "actor/pg_clipfrac_lower": MeanMetric.of(bounded_T.double(), inputs.mask_T),
            **ratio_metrics(inputs, ratio_T),
        },
        clipped_T=(clipped_T > plain_T) | bounded_T,
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
            "actor/pg_clipfrac": MeanMetric.of((weight_T != ratio_T).double(), inputs.mask_T),
            **ratio_metrics(inputs, ratio_T),
        },
        clipped_T=weight_T != ratio_T,
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
        {"actor/gate_slope": MeanMetric.of(slope_T, inputs.mask_T), **ratio_metrics(inputs, ratio_T)},
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
    others_T = stayed_T * ((stayed_T + DPPO_EPSILON).log() - (stays_T + DPPO_EPSILON).log())
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
            "actor/pg_clipfrac": MeanMetric.of(too_far_T.double(), inputs.mask_T),
            "actor/pg_clipfrac_lower": MeanMetric.of((~too_far_T & (weight_T != ratio_T)).double(), inputs.mask_T),
            **ratio_metrics(inputs, ratio_T),
        },
        clipped_T=too_far_T | (weight_T != ratio_T),
    )


def gpg(inputs: LossInputs, actor: ActorConfig) -> TokenLosses:
    """The plain policy gradient: no ratio, no clipping."""
    ratio_T = inputs.log_ratio().exp()
    return TokenLosses(-inputs.advantages_T * inputs.logprobs_T, ratio_metrics(inputs, ratio_T))


def cross_entropy(inputs: LossInputs, actor: ActorConfig) -> TokenLosses:
    """Supervised fine-tuning: the negative logprob of every token that is learned; nothing was sampled."""
    return TokenLosses(-inputs.logprobs_T, {})


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
            "actor/pg_clipfrac": MeanMetric.of((clipped_T > plain_T).double(), inputs.mask_T),
            **ratio_metrics(inputs, ratio_T),
        },
        aggregation="seq-mean-token-mean",
        clipped_T=clipped_T > plain_T,
    )


def geo_mean(inputs: LossInputs, actor: ActorConfig) -> TokenLosses:
    """GMPO: the geometric mean of ratios that are clipped token by token, in log space, on their bad side only.

    The clip range is one of log ratios: 0.4 allows ratios from exp(-0.4) to exp(0.4).
    """
    low, high = clip_range(actor)
    log_T = inputs.log_ratio()
    kept_T = torch.where(inputs.advantages_T < 0, log_T.clamp(min=-low), log_T.clamp(max=high))
    mean_S = mean_by_sequence(kept_T, inputs.mask_T, inputs.sequence_T, inputs.num_sequences)
    ratio_T = take_rows(mean_S.exp(), inputs.sequence_T)
    return TokenLosses(
        -inputs.advantages_T * ratio_T,
        {
            "actor/pg_clipfrac": MeanMetric.of((kept_T != log_T).double(), inputs.mask_T),
            **ratio_metrics(inputs, ratio_T),
        },
        aggregation="seq-mean-token-mean",
        clipped_T=kept_T != log_T,
    )


def select_tokens(
    old_logprobs_T: Tensor, advantages_T: Tensor, mask_T: Tensor, policy_loss: PolicyLossConfig, seed: int
) -> Tensor | None:
    """The tokens of a mini batch that the loss treats apart, as a mask; None for losses that treat all alike.

    Where old logprobs are not computed, the sampler's take their place. `seed` draws clip_cov's tokens; kl_cov takes
    the largest covariances and draws nothing.
    """
    if policy_loss.loss_mode == "kl_cov":
        chosen = _largest(_covariance(old_logprobs_T, advantages_T, mask_T), policy_loss.kl_cov_ratio)
    elif policy_loss.loss_mode == "clip_cov":
        chosen = _drawn(_covariance(old_logprobs_T, advantages_T, mask_T), policy_loss, seed)
    else:
        return None
    selected_T = torch.zeros_like(mask_T)
    selected_T[mask_T.nonzero().squeeze(1)[chosen]] = True
    return selected_T


def _covariance(old_logprobs_T: Tensor, advantages_T: Tensor, mask_T: Tensor) -> Tensor:
    """Each sampled token's term in the covariance of logprob and advantage."""
    logprobs, advantages = old_logprobs_T[mask_T].double(), advantages_T[mask_T].double()
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def _largest(covariance: Tensor, ratio: float) -> Tensor:
    return covariance.topk(_how_many(len(covariance), ratio)).indices


def _drawn(covariance: Tensor, policy_loss: PolicyLossConfig, seed: int) -> Tensor:
    """A random few of those within the bounds. Noise from the CPU, so that devices agree."""
    within = (covariance > policy_loss.clip_cov_lb) & (covariance < policy_loss.clip_cov_ub)
    candidates = within.nonzero().squeeze(1)
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
    return candidates[order[: _how_many(len(covariance), policy_loss.clip_cov_ratio)].to(candidates.device)]


def _how_many(num_tokens: int, ratio: float) -> int:
    return min(num_tokens, max(1, int(ratio * num_tokens))) if ratio > 0 else 0


def clip_cov(inputs: LossInputs, actor: ActorConfig) -> TokenLosses:
    """PPO's clipped loss without the selected tokens; they still count in the denominator."""
    selected_T = _selected(inputs, "clip_cov")
    low, high = clip_range(actor)
    ratio_T = inputs.log_ratio().exp()
    plain_T = -inputs.advantages_T * ratio_T
    clipped_T = -inputs.advantages_T * ratio_T.clamp(1 - low, 1 + high)
    silent_T = selected_T | (clipped_T > plain_T)
    return TokenLosses(
        torch.where(selected_T, 0, torch.maximum(plain_T, clipped_T)),
        {
            "actor/pg_clipfrac": MeanMetric.of(silent_T.double(), inputs.mask_T),
            "actor/selected_fraction": MeanMetric.of(selected_T.double(), inputs.mask_T),
            **ratio_metrics(inputs, ratio_T),
        },
        clipped_T=silent_T,
    )


def kl_cov(inputs: LossInputs, actor: ActorConfig) -> TokenLosses:
    """The unclipped loss, where the selected tokens also pay for moving away from the old policy."""
    selected_T = _selected(inputs, "kl_cov")
    log_T = inputs.log_ratio()
    ratio_T = log_T.exp()
    policy_loss = actor.policy_loss
    penalty_T = torch.where(selected_T, policy_loss.ppo_kl_coef * log_T.abs(), 0)
    return TokenLosses(
        -inputs.advantages_T * ratio_T + penalty_T,
        {
            "actor/selected_fraction": MeanMetric.of(selected_T.double(), inputs.mask_T),
            **ratio_metrics(inputs, ratio_T),
        },
    )


def _selected(inputs: LossInputs, name: str) -> Tensor:
    if inputs.selected_T is None:
        raise MisuseError(f"{name} needs selected_T: call select_tokens on the whole mini batch first")
    return inputs.selected_T
