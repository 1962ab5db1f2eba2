"""What keys of `actor`, `critic`, `ref` and `algorithm` change: in losses, advantages, penalties and learning rates."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.effects.cases import Case, cases
from treadle.algorithm.advantage_inputs import AdvantageInputs
from treadle.algorithm.estimators import compute_advantages
from treadle.algorithm.kl import KLControl, penalise_kl
from treadle.algorithm.loss import ValueBatch, compute_policy_loss, compute_value_loss
from treadle.algorithm.micro_batch import Denominator, MicroBatch
from treadle.algorithm.policy_losses import select_tokens
from treadle.config.training import (
    ActorConfig,
    AlgorithmConfig,
    CriticConfig,
    KLControlConfig,
    OptimConfig,
    PolicyLossConfig,
    RolloutCorrectionConfig,
)
from treadle.policy.optimizer import learning_rate_at

SIZES = (6, 1, 9, 4, 5, 3)
NUM_TOKENS = sum(SIZES)
SEQUENCE_T = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
MASK_T = torch.ones(NUM_TOKENS, dtype=torch.bool)
DENOMINATOR = Denominator.of(SIZES, 12.0)


def draw(seed: int, spread: float = 1.0) -> torch.Tensor:
    return spread * torch.randn(NUM_TOKENS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def policy_loss(section: str, keys: dict[str, Any]) -> list[float]:
    """The loss and its gradient on a batch whose ratios lie well beyond every bound, on both sides."""
    given = {"actor": {}, "policy_loss": {}, "rollout_correction": {}, section: keys}
    actor = ActorConfig(
        **{"clip_ratio_c": 1.5, "policy_loss": PolicyLossConfig(**given["policy_loss"]), **given["actor"]}
    )
    old = -draw(0).abs() - 1
    batch = MicroBatch(
        logprobs_T=(old + draw(1, 0.9)).requires_grad_(),
        advantages_T=draw(2),
        mask_T=MASK_T,
        sequence_T=SEQUENCE_T,
        num_sequences=len(SIZES),
        old_logprobs_T=old,
        rollout_logprobs_T=old + draw(3, 0.8),
        ref_logprobs_T=old + draw(4, 0.5),
        entropy_T=draw(5).abs().requires_grad_(),
    )
    selected = select_tokens(old, batch.advantages_T, MASK_T, actor.policy_loss, seed=0)
    found = compute_policy_loss(
        replace(batch, selected_T=selected), DENOMINATOR, actor, RolloutCorrectionConfig(**given["rollout_correction"])
    )
    found.loss.backward()
    assert batch.logprobs_T.grad is not None
    return [float(found.loss.detach()), *batch.logprobs_T.grad.tolist()]


def advantages(directory: Path, **keys: Any) -> list[float]:
    """Two groups of three: two turns each, rewards of turns, values and KL penalties."""
    inputs = AdvantageInputs(
        rewards_N=torch.tensor([1.0, 0.0, 0.5, 2.0, 2.5, 0.0]),
        group_N=torch.tensor([0, 0, 0, 1, 1, 1]),
        num_groups=2,
        trajectory_S=torch.arange(6),
        sequence_T=SEQUENCE_T,
        mask_T=MASK_T,
        values_T=draw(6).float(),
        turn_rewards_T=draw(7, 0.1).float(),
        turn_T=torch.cat([torch.arange(size) * 2 // size for size in SIZES]),
        num_turns_N=torch.full((6,), 2),
    )
    return compute_advantages(inputs, AlgorithmConfig(**keys)).advantages_T.tolist()  # type: ignore[no-any-return]


def kl_weight(directory: Path, **keys: Any) -> float:
    return KLControl.start(KLControlConfig(**keys)).after(0.11, 5).coefficient


def kl_penalty(directory: Path, **keys: Any) -> list[float]:
    found = penalise_kl(draw(0), draw(1), MASK_T, SEQUENCE_T, len(SIZES), AlgorithmConfig(**keys), 0.1)
    return found.token_rewards_T.tolist()  # type: ignore[no-any-return]


def value_loss(directory: Path, **keys: Any) -> float:
    batch = ValueBatch(draw(0), draw(1), draw(2), MASK_T, SEQUENCE_T, len(SIZES))
    return float(compute_value_loss(batch, DENOMINATOR, CriticConfig(**keys)).loss)


def rates(directory: Path, **keys: Any) -> list[float]:
    return [learning_rate_at(OptimConfig(**keys), step, 20) for step in range(1, 21)]


def loss_of(section: str) -> Callable[..., list[float]]:
    return lambda directory, **keys: policy_loss(section, keys)


SCHEDULED = (
    *(("lr", 1e-3, 2e-3), ("lr_scheduler_type", "constant", "linear"), ("lr_warmup_steps", 0, 5)),
    ("lr_warmup_steps_ratio", 0.0, 0.5),
    ("min_lr_ratio", 0.0, 0.5, {"lr_scheduler_type": "cosine"}),
    ("num_cycles", 0.5, 1.5, {"lr_scheduler_type": "cosine"}),
    ("wsd_decay_ratio", 0.1, 0.5, {"lr_scheduler_type": "wsd"}),
)
EFFECTS: dict[str, Case] = {
    **cases(
        "actor",
        loss_of("actor"),
        *(("clip_ratio", 0.2, 0.5), ("clip_ratio_low", 0.1, 0.5), ("clip_ratio_high", 0.1, 0.5)),
        *(("clip_ratio_c", 1.3, 3.0), ("loss_agg_mode", "token-mean", "seq-mean-token-mean")),
        *(("entropy_coeff", 0.0, 0.1), ("use_kl_loss", False, True)),
        ("kl_loss_coef", 0.1, 0.2, {"use_kl_loss": True}),
        ("kl_loss_type", "k1", "k3", {"use_kl_loss": True}),
    ),
    **cases(
        "actor.policy_loss",
        loss_of("policy_loss"),
        ("loss_mode", "vanilla", "gspo"),
        ("clip_cov_ratio", 0.1, 0.5, {"loss_mode": "clip_cov", "clip_cov_lb": -9.0, "clip_cov_ub": 9.0}),
        ("clip_cov_lb", -9.0, 0.5, {"loss_mode": "clip_cov", "clip_cov_ratio": 0.3, "clip_cov_ub": 9.0}),
        ("clip_cov_ub", -0.2, 9.0, {"loss_mode": "clip_cov", "clip_cov_ratio": 0.3, "clip_cov_lb": -9.0}),
        ("kl_cov_ratio", 0.1, 0.5, {"loss_mode": "kl_cov"}),
        ("ppo_kl_coef", 0.1, 0.5, {"loss_mode": "kl_cov", "kl_cov_ratio": 0.3}),
        ("cispo_max_ratio", 1.2, 2.0, {"loss_mode": "cispo"}),
        ("tau_pos", 1.0, 2.0, {"loss_mode": "sapo"}),
        ("tau_neg", 1.0, 2.0, {"loss_mode": "sapo"}),
    ),
    **cases(
        "algorithm.rollout_correction",
        loss_of("rollout_correction"),
        ("rollout_is", "none", "token"),
        ("rollout_is_threshold", 1.1, 2.0, {"rollout_is": "token"}),
        ("rollout_rs", "none", "token"),
        ("rollout_rs_threshold", 1.2, 2.0, {"rollout_rs": "token"}),
        ("rollout_rs_threshold_lower", 0.5, 0.9, {"rollout_rs": "token", "rollout_rs_threshold": 2.0}),
        *(("off_policy_mask_threshold", None, 0.01), ("bypass_mode", False, True)),
    ),
    **cases(
        "algorithm",
        advantages,
        *(("adv_estimator", "grpo", "rloo"), ("norm_adv_by_std_in_grpo", True, False)),
        *(("norm_adv_scope", "group", "batch"), ("advantage_level", "trajectory", "turn")),
        ("gamma", 1.0, 0.9, {"adv_estimator": "gae"}),
        ("lam", 1.0, 0.9, {"adv_estimator": "gae"}),
    ),
    **cases("algorithm", kl_penalty, ("kl_penalty", "k1", "k2")),
    **cases(
        "algorithm.kl_ctrl",
        kl_weight,
        ("kl_coef", 0.1, 0.2),
        ("type", "fixed", "adaptive"),
        ("horizon", 10, 100, {"type": "adaptive"}),
        ("target_kl", 0.1, 0.105, {"type": "adaptive"}),
    ),
    **cases(
        "critic", value_loss, ("cliprange_value", 0.1, 0.5), ("loss_agg_mode", "token-mean", "seq-mean-token-mean")
    ),
    **cases("actor.optim", rates, *SCHEDULED),
    **cases("critic.optim", rates, *SCHEDULED),
}
