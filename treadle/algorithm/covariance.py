"""Policy losses that treat a few tokens apart, chosen by the covariance of logprob and advantage: clip_cov and kl_cov.

Those tokens (likely and rewarded, mostly) are what makes entropy collapse. T tokens, as in `packed`.

The choice is made once, over the whole mini batch, before it is split: from advantages and the old policy's logprobs,
which are known by then. So it does not depend on micro batches, ranks or the order of steps. (Choosing by the current
logprobs would need a second forward pass, or would make every micro batch choose for itself.)
"""

import torch
from torch import Tensor

from treadle.algorithm.measures import Mean
from treadle.algorithm.packed import LossInputs, TokenLosses
from treadle.algorithm.token_losses import clip_range, ratio_measures
from treadle.config.actor import ActorConfig, PolicyLossConfig
from treadle.errors import MisuseError


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
            "actor/pg_clipfrac": Mean.of(silent_T.double(), inputs.mask_T),
            "actor/selected_fraction": Mean.of(selected_T.double(), inputs.mask_T),
            **ratio_measures(inputs, ratio_T),
        },
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
            "actor/selected_fraction": Mean.of(selected_T.double(), inputs.mask_T),
            **ratio_measures(inputs, ratio_T),
        },
    )


def _selected(inputs: LossInputs, name: str) -> Tensor:
    if inputs.selected_T is None:
        raise MisuseError(f"{name} needs selected_T: call select_tokens on the whole mini batch first")
    return inputs.selected_T
