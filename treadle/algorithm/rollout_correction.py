"""Rollout correction: importance sampling weights (TIS) and rejection for off-policy tokens.

Off-policy are tokens sampled with other weights, or with another engine's arithmetic. The ratio is trained policy over
rollout policy. Decoupled (the default): the trained policy is the one at the start of the step, its ratio to the
rollout policy is a fixed weight, and PPO's own ratio starts from it. Bypass (`bypass_mode`): PPO's ratio is taken
against the rollout policy itself and carries the weight, so none is applied.

The off-policy sequence mask (DeepSeek-V3.2) compares the current policy instead, and removes the policy term alone:
from sequences of negative advantage that the policy would hardly sample any more.

Engines report two logprobs where penalties, min-p, top-k or top-p are in use. Importance weights divide by the
distribution that tokens were sampled from: those that the policy could have sampled then count as often as the policy
samples them. Rejection, the mismatch between engine and trainer, and bypass's ratio compare the whole softmax of both
sides: truncation is no mismatch.

Invariant: a rejected token contributes to no term of the loss, and still counts in the denominator: rejecting makes a
step smaller, and the rest no larger. T tokens, S sequences, as in `micro_batch`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.algorithm.metrics import ImportanceWeightMetric, LossMetrics, MaxMetric, MeanMetric
from treadle.algorithm.micro_batch import LOG_BOUND, count_by_sequence, mean_by_sequence, sum_by_sequence
from treadle.config.training import RolloutCorrectionConfig


@dataclass(frozen=True, slots=True)
class RolloutCorrection:
    """What becomes of each token's loss: its factor, and whether it is kept at all."""

    weights_T: Tensor
    """Truncated importance weights; 1 where the config has none."""
    keep_T: Tensor
    metrics: LossMetrics


@dataclass(frozen=True, slots=True)
class _Ratios:
    """log(trained / rollout), per token and per sequence."""

    mask_T: Tensor
    sequence_T: Tensor
    num_sequences: int
    log_T: Tensor
    sum_S: Tensor
    mean_S: Tensor
    sampled_S: Tensor
    drawn_T: Tensor
    """log(trained / distribution sampled from), which is `log_T` where nothing is left out of the draw."""
    is_processed: bool

    @property
    def drawn_S(self) -> Tensor:
        return sum_by_sequence(self.drawn_T, self.sequence_T, self.num_sequences)


@torch.no_grad()
def correct_rollout(
    logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    mask_T: Tensor,
    sequence_T: Tensor,
    num_sequences: int,
    rollout_correction: RolloutCorrectionConfig,
    *,
    processed_logprobs_T: Tensor | None = None,
) -> RolloutCorrection:
    """Weights, rejection and their metrics. `logprobs_T`: the start of the step's, or the current ones in bypass."""
    drawn_from_T = rollout_logprobs_T if processed_logprobs_T is None else processed_logprobs_T
    log_T = torch.where(mask_T, logprobs_T - rollout_logprobs_T, 0)
    ratios = _Ratios(
        mask_T,
        sequence_T,
        num_sequences,
        log_T,
        sum_by_sequence(log_T, sequence_T, num_sequences),
        mean_by_sequence(log_T, mask_T, sequence_T, num_sequences),
        count_by_sequence(mask_T, sequence_T, num_sequences) > 0,
        torch.where(mask_T, logprobs_T - drawn_from_T, 0),
        processed_logprobs_T is not None,
    )
    keep_T = _keep(ratios, rollout_correction)
    weights_T = torch.ones_like(log_T)
    if rollout_correction.rollout_is == "token":
        weights_T = _truncate(ratios.drawn_T, rollout_correction)
    elif rollout_correction.rollout_is == "sequence":
        weights_T = _truncate(ratios.drawn_S, rollout_correction)[sequence_T]
    return RolloutCorrection(weights_T, keep_T, _measure(ratios, keep_T, rollout_correction))


@torch.no_grad()
def off_policy_mask(
    logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    sequence_T: Tensor,
    num_sequences: int,
    threshold: float,
) -> Tensor:
    """True on the tokens to leave out: advantage below 0, in a sequence whose mean log(rollout / current) is larger."""
    gap_S = mean_by_sequence(rollout_logprobs_T - logprobs_T, mask_T, sequence_T, num_sequences)
    return mask_T & (advantages_T < 0) & (gap_S > threshold)[sequence_T]


def _truncate(log_ratio: Tensor, rollout_correction: RolloutCorrectionConfig) -> Tensor:
    return log_ratio.clamp(-LOG_BOUND, LOG_BOUND).exp().clamp(max=rollout_correction.rollout_is_threshold)


def _keep(ratios: _Ratios, rollout_correction: RolloutCorrectionConfig) -> Tensor:
    """True on every sampled token that is not rejected."""
    level = rollout_correction.rollout_rs
    if level == "none":
        return ratios.mask_T
    lower, upper = rollout_correction.rejection_bounds()
    sequence_S = ratios.mean_S if level == "geometric" else ratios.sum_S
    log_T = ratios.log_T if level == "token" else sequence_S[ratios.sequence_T]
    return ratios.mask_T & (log_T >= math.log(lower)) & (log_T <= math.log(upper))


def _measure(ratios: _Ratios, keep_T: Tensor, rollout_correction: RolloutCorrectionConfig) -> LossMetrics:
    mask_T, log_T = ratios.mask_T, ratios.log_T
    rejected_T = mask_T & ~keep_T
    rejected_S = count_by_sequence(rejected_T, ratios.sequence_T, ratios.num_sequences) > 0
    return {
        "rollout_corr/kl": MeanMetric.of(-log_T, mask_T),
        "rollout_corr/k3_kl": MeanMetric.of(torch.expm1(log_T.clamp(max=LOG_BOUND)) - log_T, mask_T),
        "rollout_corr/logprob_abs_diff": MeanMetric.of(log_T.abs(), mask_T),
        "rollout_corr/logprob_abs_diff_max": MaxMetric.of(log_T.abs(), mask_T),
        "rollout_corr/rollout_rs_masked_fraction": MeanMetric.of(rejected_T.double(), mask_T),
        "rollout_corr/rollout_rs_seq_masked_fraction": MeanMetric.of(rejected_S.double(), ratios.sampled_S),
        **_measure_processed(ratios),
        **_measure_weights(ratios, keep_T, rejected_S, rollout_correction),
    }


def _measure_processed(ratios: _Ratios) -> LossMetrics:
    """How far the distribution sampled from is from the trained policy, where it is another than the whole softmax."""
    if not ratios.is_processed:
        return {}
    drawn_T = ratios.drawn_T
    return {
        "rollout_corr/processed_kl": MeanMetric.of(-drawn_T, ratios.mask_T),
        "rollout_corr/processed_k3_kl": MeanMetric.of(
            torch.expm1(drawn_T.clamp(max=LOG_BOUND)) - drawn_T, ratios.mask_T
        ),
    }


def _measure_weights(
    ratios: _Ratios, keep_T: Tensor, rejected_S: Tensor, rollout_correction: RolloutCorrectionConfig
) -> LossMetrics:
    """Metrics of the weights as applied, 0 where rejected: per sequence where they are, else per token."""
    if rollout_correction.rollout_is == "sequence":
        log, kept, among = ratios.drawn_S, ~rejected_S, ratios.sampled_S
    else:
        log, kept, among = ratios.drawn_T, keep_T, ratios.mask_T
    bound = math.log(rollout_correction.rollout_is_threshold)
    return {
        "rollout_corr/rollout_is": ImportanceWeightMetric.of(_truncate(log, rollout_correction) * kept, among),
        "rollout_corr/rollout_is_max": MaxMetric.of(log.clamp(max=LOG_BOUND).exp(), among),
        "rollout_corr/rollout_is_ratio_fraction_high": MeanMetric.of((log > bound).double(), among),
        "rollout_corr/rollout_is_ratio_fraction_low": MeanMetric.of((log < -bound).double(), among),
    }
