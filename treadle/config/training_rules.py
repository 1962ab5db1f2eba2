"""Config rules of training: schedules, batches, ranks, rewards and losses.

A rule refuses: what was asked for would have no effect, or cannot run. A caution warns: the run works, and is not what
its name says. Both yield the key to blame, what is wrong, and how to mend it, as every rule does (see `rules`).
"""

from collections.abc import Iterator

from treadle.config.root import TrainConfig
from treadle.config.section import Source
from treadle.config.training import SEQUENCE_MEAN_LOSSES

Clash = Iterator[tuple[str, str, str | None]]

WIDEST_GEOMETRIC = 1.2
"""A mean ratio per token this far from 1 is a product of 10^16 over 200 tokens: no sequence that trains gets there."""


def kl_cov_has_old_logprobs(config: TrainConfig) -> Clash:
    """kl_cov penalises the distance from the old policy, which is 0 in the first update of a step."""
    actor, bypass = config.actor, config.algorithm.rollout_correction.bypass_mode
    single = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size == config.data.train_batch_size
    if actor.policy_loss.loss_mode == "kl_cov" and single and not bypass:
        problem = "kl_cov, but a step has one update, in which the old policy is the current one: its penalty is zero"
        fix = "raise actor.ppo_epochs, lower actor.ppo_mini_batch_size, or set bypass_mode; clip_cov needs none of that"
        yield "actor.policy_loss.loss_mode", problem, fix


def geometric_bounds_bind(config: TrainConfig) -> Clash:
    correction = config.algorithm.rollout_correction
    if correction.rollout_rs != "geometric":
        return
    lower, upper = correction.rejection_bounds()
    name, value = ("", upper) if upper > WIDEST_GEOMETRIC else ("_lower", lower)
    if upper > WIDEST_GEOMETRIC or lower < 1 / WIDEST_GEOMETRIC:
        problem = (
            f"{value:g} bounds the mean ratio per token of a sequence, which never gets there: nothing is rejected"
        )
        fix = f"between {1 / WIDEST_GEOMETRIC:.3g} and {WIDEST_GEOMETRIC:g}; null for 1.001 and one over it"
        yield f"algorithm.rollout_correction.rollout_rs_threshold{name}", problem, fix


def dual_clip_is_above_the_clip(config: TrainConfig) -> Clash:
    actor = config.actor
    high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
    bound = actor.clip_ratio_c
    if actor.policy_loss.loss_mode == "vanilla" and bound is not None and bound < 1 + high:
        problem = f"{bound:g} is below 1 + clip_ratio_high = {1 + high:g}: it would cut ratios inside the clip range"
        yield "actor.clip_ratio_c", problem, f"{1 + high:g} or more, or null for no such bound"


def reference_exists_to_follow(config: TrainConfig) -> Clash:
    freq = config.ref.sync_freq
    if freq > 0 and not (config.actor.use_kl_loss or config.algorithm.use_kl_in_reward):
        problem = f"{freq}, but nothing reads a reference policy"
        yield "ref.sync_freq", problem, "set actor.use_kl_loss or algorithm.use_kl_in_reward, or leave it -1"


def aggregation_is_the_losses_own(config: TrainConfig) -> Clash:
    name, mode = config.actor.policy_loss.loss_mode, config.actor.loss_agg_mode
    given = config.origin("actor.loss_agg_mode").source is not Source.DEFAULT
    if name in SEQUENCE_MEAN_LOSSES and given and mode != "seq-mean-token-mean":
        problem = f"{mode} weighs the KL term and the entropy bonus only: {name} is a mean over sequences"
        yield "actor.loss_agg_mode", problem, "seq-mean-token-mean weighs all terms alike"


def dr_grpo_has_its_aggregation(config: TrainConfig) -> Clash:
    mode, estimator = config.actor.loss_agg_mode, config.algorithm.adv_estimator
    if estimator == "dr_grpo" and mode != "seq-mean-token-sum-norm":
        problem = f"{mode}, but dr_grpo sums tokens and divides by a constant: lengths weigh in again"
        yield "actor.loss_agg_mode", problem, "seq-mean-token-sum-norm"


def kl_in_the_loss_has_a_gradient(config: TrainConfig) -> Clash:
    actor = config.actor
    if actor.use_kl_loss and actor.kl_loss_type == "k1":
        problem = "k1's gradient is zero on average: it holds nothing near the reference"
        yield "actor.kl_loss_type", problem, "k1+ has the same value and the gradient of the divergence"


def reference_can_take_small_steps(config: TrainConfig) -> Clash:
    ref = config.ref
    if ref.sync_freq > 0 and ref.dtype == "bf16" and ref.sync_mix < 0.05:
        problem = f"{ref.sync_mix:g} of a difference is mostly less than bf16 can add to a weight"
        yield "ref.sync_mix", problem, "set ref.dtype=fp32, or mix more in at a time"


LOSS_RULES = (
    kl_cov_has_old_logprobs,
    geometric_bounds_bind,
    dual_clip_is_above_the_clip,
    reference_exists_to_follow,
)
LOSS_CAUTIONS = (
    aggregation_is_the_losses_own,
    dr_grpo_has_its_aggregation,
    kl_in_the_loss_has_a_gradient,
    reference_can_take_small_steps,
)
