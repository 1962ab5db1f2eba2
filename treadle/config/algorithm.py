"""The `algorithm` section: advantages, KL, group filtering and off-policy correction."""

from typing import Literal

from treadle.config.section import Section, key

GROUP_ESTIMATORS = (
    "grpo",
    "gdpo",
    "dr_grpo",
    "grpo_passk",
    "rloo",
    "opo",
    "optimal_token_baseline",
    "reinforce_plus_plus_baseline",
)
"""Advantages that compare the samples of one task, so that one sample alone has none."""

TURN_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")
"""Those of them that can compare turn by turn."""

OTHER_ESTIMATORS = ("reinforce_plus_plus", "remax", "gae")
"""The other advantages that come with treadle."""


class KLControlConfig(Section):
    """The weight of KL in the reward, fixed or steered towards a target."""

    type: Literal["fixed", "adaptive"] = key("fixed", "keep the weight, or steer it")
    kl_coef: float = key(0.001, "weight, or where it starts", ge=0)
    horizon: int = key(10000, "trajectories over which adaptive control reacts", ge=1)
    target_kl: float = key(0.1, "divergence that adaptive control aims at", gt=0)


class FilterGroupsConfig(Section):
    """Dynamic sampling: groups whose samples all score the same teach nothing and are replaced."""

    enable: bool = key(False, "replace groups with no signal")
    metric: str = key("reward", "what must differ within a group: reward, or a reward function's name")
    max_num_gen_batches: int = key(10, "batches generated for one step before the run gives up", ge=1)


class RolloutCorrectionConfig(Section):
    """How training accounts for samples that came from other weights, or from another engine's arithmetic."""

    rollout_is: Literal["none", "token", "sequence"] | None = key(
        None, "truncated importance weights; asynchronous modes require a choice, and none is one"
    )
    rollout_is_threshold: float = key(2.0, "upper bound of those weights", gt=0)
    rollout_rs: Literal["none", "token", "sequence", "geometric"] = key(
        "none", "reject tokens or sequences whose ratio leaves the bounds"
    )
    rollout_rs_threshold: float | None = key(
        None, "upper bound of an accepted ratio; null for 2, and for 1.001 with geometric", gt=1
    )
    rollout_rs_threshold_lower: float | None = key(None, "lower bound; null for one over the upper", gt=0, lt=1)
    off_policy_mask_threshold: float | None = key(
        None,
        "leave sequences of negative advantage out of the policy term where the mean log(sampler / policy) is larger",
        gt=0,
    )
    bypass_mode: bool = key(False, "use the sampler's logprobs as the old policy instead of computing them again")

    def rejection_bounds(self) -> tuple[float, float]:
        """Between which ratios nothing is rejected."""
        upper = self.rollout_rs_threshold or (1.001 if self.rollout_rs == "geometric" else 2.0)
        return self.rollout_rs_threshold_lower or 1 / upper, upper


class AlgorithmConfig(Section):
    """From rewards to advantages."""

    adv_estimator: str = key("grpo", "advantage estimator", names=(*GROUP_ESTIMATORS, *OTHER_ESTIMATORS))
    gamma: float = key(1.0, "discount", ge=0, le=1)
    lam: float = key(1.0, "bias and variance of gae", ge=0, le=1)
    norm_adv_by_std_in_grpo: bool = key(True, "divide by the group's standard deviation")
    norm_adv_scope: Literal["group", "batch"] = key(
        "group", "whose deviation that is, for grpo: the group's or the batch's"
    )
    advantage_level: Literal["trajectory", "turn"] = key(
        "trajectory",
        "what group estimators compare: whole trajectories, or what each still got from a turn on; gae and "
        "reinforce_plus_plus follow the rewards of turns in any case",
    )
    mask_truncated: bool = key(
        False, "keep answers that were cut off at the token limit out of the loss; they still count in baselines"
    )
    use_kl_in_reward: bool = key(False, "subtract the KL divergence from the reference policy from the reward")
    kl_penalty: Literal["k1", "k2", "k3"] = key("k1", "its estimator")
    kl_ctrl: KLControlConfig = key(KLControlConfig(), "its weight")
    filter_groups: FilterGroupsConfig = key(FilterGroupsConfig(), "dynamic sampling")
    rollout_correction: RolloutCorrectionConfig = key(RolloutCorrectionConfig(), "off-policy correction")

    def needs_gradient_norms(self) -> bool:
        """Whether the estimator reads how far each token's gradient goes."""
        return self.adv_estimator == "optimal_token_baseline"

    def needs_critic(self) -> bool:
        """Whether the estimator reads a value model."""
        return self.adv_estimator == "gae"
