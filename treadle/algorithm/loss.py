"""Losses of policy and critic on a micro batch: policy loss, KL, entropy bonus, correction; clipped value loss.

Owns the table of policy losses by name and the order of the terms. Knows no model: takes logprobs or values, returns a
share of the mini batch's loss. T tokens, as in `micro_batch`.
Invariant: the shares of any split of a mini batch add up to its loss, given one denominator.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from treadle.algorithm.kl import kl_loss
from treadle.algorithm.metrics import LossMetrics, MeanMetric, SumMetric
from treadle.algorithm.micro_batch import (
    Denominator,
    LossInputs,
    LossOutput,
    MicroBatch,
    PolicyLoss,
    TokenTerms,
    token_weights,
    weighted_sum,
)
from treadle.algorithm.policy_losses import (
    cispo,
    clip_cov,
    dppo_kl,
    dppo_tv,
    geo_mean,
    gpg,
    gspo,
    kl_cov,
    sapo,
    vanilla,
)
from treadle.algorithm.rollout_correction import RolloutCorrection, correct_rollout, off_policy_mask
from treadle.config.plugin import find_by_name
from treadle.config.training import ActorConfig, CriticConfig, RolloutCorrectionConfig
from treadle.errors import MisuseError


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
    loss = weighted_sum(torch.maximum(plain_T, clipped_T) / 2, weights_T)
    metrics: LossMetrics = {
        "critic/vf_loss": SumMetric(loss.detach()),
        "critic/vf_clipfrac": MeanMetric.of((clipped_T > plain_T).double(), mask_T),
        "critic/vpred_mean": MeanMetric.of(values_T.detach(), mask_T),
    }
    return LossOutput(loss, metrics)


LOSSES: Mapping[str, PolicyLoss] = {
    "vanilla": vanilla,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "gpg": gpg,
    "geo_mean": geo_mean,
    "kl_cov": kl_cov,
    "clip_cov": clip_cov,
}

RATIO_FREE = frozenset({"gpg"})
"""Losses without a ratio of their own, which need importance weights even where the old policy is the sampler's."""


def find_loss(loss_mode: str) -> PolicyLoss:
    """The policy loss of that name, or at that import path."""
    return find_by_name(loss_mode, LOSSES, "actor.policy_loss.loss_mode")


def compute_policy_loss(
    batch: MicroBatch, denominator: Denominator, actor: ActorConfig, rollout_correction: RolloutCorrectionConfig
) -> LossOutput:
    """A micro batch's share of the loss, ready for backward, and its metrics."""
    batch = _cleaned(batch)
    old_T = _old_logprobs(batch, rollout_correction)
    correction = _correction(batch, old_T, rollout_correction)
    kept_T = correction.keep_T if correction else batch.mask_T
    loss_mask_T, masked = _without_off_policy(batch, kept_T, rollout_correction)
    policy = find_loss(actor.policy_loss.loss_mode)(_loss_inputs(batch, old_T, loss_mask_T), actor)
    losses_T = policy.losses_T
    if correction:
        carried = rollout_correction.bypass_mode and actor.policy_loss.loss_mode not in RATIO_FREE
        losses_T = losses_T if carried else losses_T * correction.weights_T
    mode = policy.aggregation or actor.loss_agg_mode
    weights_T = token_weights(batch.mask_T, batch.sequence_T, batch.num_sequences, mode, denominator)
    policy_term = weighted_sum(torch.where(loss_mask_T, losses_T, 0), weights_T)
    others, metrics = _other_terms(batch, kept_T, denominator, actor)
    measured: LossMetrics = {**policy.metrics, **(correction.metrics if correction else {}), **masked, **metrics}
    terms = TokenTerms(correction.weights_T if correction else None, loss_mask_T, policy.clipped_T)
    return LossOutput(policy_term + others, {"actor/pg_loss": SumMetric(policy_term.detach()), **measured}, terms)


def _cleaned(batch: MicroBatch) -> MicroBatch:
    """The batch with zeros on unsampled tokens, where anything may stand, NaN included."""
    mask_T = batch.mask_T
    return replace(
        batch,
        logprobs_T=torch.where(mask_T, batch.logprobs_T, 0),
        advantages_T=torch.where(mask_T, batch.advantages_T, 0),
        old_logprobs_T=_masked(batch.old_logprobs_T, mask_T),
        rollout_logprobs_T=_masked(batch.rollout_logprobs_T, mask_T),
        processed_logprobs_T=_masked(batch.processed_logprobs_T, mask_T),
        ref_logprobs_T=_masked(batch.ref_logprobs_T, mask_T),
        entropy_T=_masked(batch.entropy_T, mask_T),
    )


def _masked(values_T: Tensor | None, mask_T: Tensor) -> Tensor | None:
    return None if values_T is None else torch.where(mask_T, values_T, 0)


def _old_logprobs(batch: MicroBatch, rollout_correction: RolloutCorrectionConfig) -> Tensor:
    """What ratios are taken against."""
    old_T = _rollout_logprobs(batch) if rollout_correction.bypass_mode else batch.old_logprobs_T
    return batch.logprobs_T.detach() if old_T is None else old_T


def _loss_inputs(batch: MicroBatch, old_T: Tensor, loss_mask_T: Tensor) -> LossInputs:
    return LossInputs(
        batch.logprobs_T,
        old_T,
        batch.advantages_T,
        loss_mask_T,
        batch.sequence_T,
        batch.num_sequences,
        batch.selected_T,
    )


def _without_off_policy(
    batch: MicroBatch, kept_T: Tensor, rollout_correction: RolloutCorrectionConfig
) -> tuple[Tensor, LossMetrics]:
    """The tokens that the policy term learns from, where `off_policy_mask_threshold` leaves some out."""
    threshold = rollout_correction.off_policy_mask_threshold
    if threshold is None:
        return kept_T, {}
    current_T, rollout_T = batch.logprobs_T.detach(), _rollout_logprobs(batch)
    masked_T = off_policy_mask(
        current_T, rollout_T, batch.advantages_T, batch.mask_T, batch.sequence_T, batch.num_sequences, threshold
    )
    metrics = {"rollout_corr/off_policy_masked_fraction": MeanMetric.of(masked_T.double(), batch.mask_T)}
    return kept_T & ~masked_T, metrics


def _correction(
    batch: MicroBatch, old_T: Tensor, rollout_correction: RolloutCorrectionConfig
) -> RolloutCorrection | None:
    """Measured wherever the sampler's logprobs are known, so that its difference from the trainer is always seen."""
    asked = rollout_correction.rollout_is not in (None, "none") or rollout_correction.rollout_rs != "none"
    if batch.rollout_logprobs_T is None and not asked:
        return None
    logprobs_T = batch.logprobs_T.detach() if rollout_correction.bypass_mode else old_T
    return correct_rollout(
        logprobs_T,
        _rollout_logprobs(batch),
        batch.mask_T,
        batch.sequence_T,
        batch.num_sequences,
        rollout_correction,
        processed_logprobs_T=batch.processed_logprobs_T,
    )


def _rollout_logprobs(batch: MicroBatch) -> Tensor:
    if batch.rollout_logprobs_T is None:
        raise MisuseError("algorithm.rollout_correction needs rollout_logprobs_T: the engine reported none")
    return batch.rollout_logprobs_T


def _other_terms(
    batch: MicroBatch, kept_T: Tensor, denominator: Denominator, actor: ActorConfig
) -> tuple[Tensor, LossMetrics]:
    """The KL term and the entropy bonus, as configured, over tokens that are not rejected."""
    weights_T = token_weights(batch.mask_T, batch.sequence_T, batch.num_sequences, actor.loss_agg_mode, denominator)
    total, metrics = weights_T.new_zeros(()), dict[str, MeanMetric | SumMetric]()
    if actor.use_kl_loss:
        if batch.ref_logprobs_T is None:
            raise MisuseError("actor.use_kl_loss needs ref_logprobs_T: compute the reference policy's logprobs first")
        kl = weighted_sum(kl_loss(batch.logprobs_T, batch.ref_logprobs_T, actor.kl_loss_type), weights_T * kept_T)
        total = total + actor.kl_loss_coef * kl
        metrics["actor/kl_loss"] = SumMetric(kl.detach())
    if batch.entropy_T is not None:
        if actor.entropy_coeff:
            total = total - actor.entropy_coeff * weighted_sum(batch.entropy_T, weights_T * kept_T)
        metrics["actor/entropy"] = MeanMetric.of(batch.entropy_T.detach(), batch.mask_T)
    elif actor.entropy_coeff:
        raise MisuseError("actor.entropy_coeff needs entropy_T: compute entropy with the logprobs")
    return total, metrics
