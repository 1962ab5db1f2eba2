"""`algorithm`: the same section here, with some values spelled otherwise."""

from typing import Any

from treadle.config.legacy.conversion import kl_in_reward, words
from treadle.config.legacy.rule import (
    Answer,
    Look,
    Nothing,
    Refused,
    Rules,
    Said,
    classes,
    fixed,
    kept,
    none,
    same,
    under,
)

CORRECTION = "algorithm.rollout_correction"
ESTIMATORS = "gae grpo dr_grpo rloo reinforce_plus_plus reinforce_plus_plus_baseline remax opo optimal_token_baseline"
PREFERENCE = "There is no preference feedback PPO."

_estimators = words(
    {name: name for name in ESTIMATORS.split()}
    | {
        "grpo_vectorized": Said("grpo", "grpo_vectorized computes what grpo does"),
        "rloo_vectorized": Said("rloo", "rloo_vectorized computes what rloo does"),
        "optimal_token_baseline": Said(
            "optimal_token_baseline",
            "samples are compared at the same number of sampled tokens; importance weights do not enter the baseline",
        ),
        "tir_optimal_token_baseline": Said(
            "optimal_token_baseline",
            "the same, but for what only the longest sample has: it keeps its reward there, and verl's has advantage 0",
        ),
    },
    f"There is {ESTIMATORS.replace(' ', ', ')}; any other is named by import path, as package.module:function.",
)
_levels = words(
    {None: Said("none", "null is written none"), "none": "none", "token": "token", "sequence": "sequence"},
    "Importance weights are per token or per sequence, or none.",
)
_rejections = words(
    {
        None: Said("none", "null is written none"),
        "none": "none",
        "token": "token",
        "sequence": "sequence",
        "geometric": "geometric",
        "token_k1": Said("token", "token_k1 is written token"),
        "seq_sum_k1": Said("sequence", "seq_sum_k1 is written sequence"),
        "seq_mean_k1": Said("geometric", "seq_mean_k1 is written geometric"),
    },
    "Rejection looks at one ratio, per token, sequence or geometric mean: token_k1, seq_sum_k1 or seq_mean_k1.",
)


def _upper_bound(value: Any, look: Look) -> Answer:
    number = _number(value)
    if number is None:
        return Refused("Importance weights have an upper bound only; a lower one is rejection: use rollout_rs.")
    return Said(number)


def _both_bounds(value: Any, look: Look) -> Answer:
    if value is None:
        return Nothing("not given")
    lower, _, upper = str(value).rpartition("_")
    bounds = [_number(text) for text in (lower, upper) if text]
    if any(item is None for item in bounds):
        return Refused("One bound or two are needed, as 2.0 or 0.5_2.0.")
    also = {f"{CORRECTION}.rollout_rs_threshold_lower": bounds[0]} if lower else {}
    return Said(bounds[-1], "both bounds have a key of their own" if lower else "", also)


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _filter_metric(value: Any, look: Look) -> Answer:
    if value in (None, "reward"):
        return Said("reward") if value else Nothing("the reward, as by default")
    if value in ("score", "seq_reward", "seq_final_reward"):
        return Said("reward", f"{value} is written reward")
    if look("algorithm.filter_groups.enable", False) is not True:
        return Nothing("verl does not read it while filter_groups.enable is false")
    return Refused("Groups are filtered by reward or by one reward function: name that function.")


def _bounded(value: Any, look: Look) -> Answer:
    if isinstance(value, int) and value >= 1:
        return Said(value)
    if look("algorithm.filter_groups.enable", False) is not True:
        return Nothing("verl does not read it while filter_groups.enable is false")
    return Refused("Sampling again always has a bound: give the number of batches, or leave it out for 10.")


RULES: Rules = (
    kept("algorithm", "gamma lam norm_adv_by_std_in_grpo use_kl_in_reward filter_groups.enable")
    | kept("algorithm.kl_ctrl", "type kl_coef horizon target_kl")
    | kept(CORRECTION, "bypass_mode")
    | classes("algorithm", ". filter_groups kl_ctrl")
    | under(
        "algorithm",
        {
            "adv_estimator": same(_estimators),
            "kl_penalty": same(kl_in_reward),
            "filter_groups.metric": same(_filter_metric),
            "filter_groups.max_num_gen_batches": same(_bounded),
            "filter_groups.max_inflight_gen_batches": fixed(1, note="groups are replaced as they are found wanting"),
            "use_pf_ppo": fixed(False, note="no preference feedback", otherwise=PREFERENCE),
            "pf_ppo.**": none(PREFERENCE),
        },
    )
    | under(
        CORRECTION,
        {
            "rollout_is": same(_levels),
            "rollout_is_threshold": same(_upper_bound),
            "rollout_rs": same(_rejections),
            "rollout_rs_threshold": same(_both_bounds),
            "loss_type": fixed("ppo_clip", note="the loss is actor.policy_loss", otherwise="Use actor.policy_loss."),
            "rollout_is_batch_normalize": fixed(
                False, note="weights are used as they are", otherwise="Importance weights are never normalised."
            ),
        },
    )
)
