"""Training step: groups of trajectories in, new weights out. The same for every schedule.

Owns the order: reference, old logprobs, values, advantages, critic, policy, reference sync. Touches no file:
the networks are called through their protocols, and block; a schedule calls `train_step` through `asyncio.to_thread`.
Invariant: only survivors train, and the rows of one trajectory share its advantage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan

import torch
from torch import Tensor

from treadle.algorithm.advantage import AdvantageInputs, Advantages, has_signal, rows_of
from treadle.algorithm.estimators import compute_advantages
from treadle.algorithm.kl import KLControl, KLPenalty, penalise_kl
from treadle.config.reward import RewardConfig
from treadle.config.training import ActorConfig, AlgorithmConfig, FilterGroupsConfig, TrainerConfig
from treadle.errors import MisuseError, RunError
from treadle.observe.step_metrics import Spans, add_up
from treadle.policy.protocol import Critic, Policy, Reference, TrainBatch, group_and_trajectory_ids
from treadle.types import Group, Row, Score, StopReason


@dataclass(frozen=True, slots=True)
class StepParts:
    """What a step works with. Built once; the step itself keeps no state."""

    policy: Policy
    actor: ActorConfig
    algorithm: AlgorithmConfig
    trainer: TrainerConfig
    reference: Reference | None = None
    """Needed by `actor.use_kl_loss` and `algorithm.use_kl_in_reward`."""
    critic: Critic | None = None
    """Needed by gae."""
    reward: RewardConfig = RewardConfig()  # noqa: RUF009  frozen
    """The weights of the parts of rewards."""

    def __post_init__(self) -> None:
        if self.reference is None and (self.actor.use_kl_loss or self.algorithm.use_kl_in_reward):
            raise MisuseError("actor.use_kl_loss and algorithm.use_kl_in_reward need a reference policy")
        if self.critic is None and self.algorithm.needs_critic():
            raise MisuseError(f"algorithm.adv_estimator {self.algorithm.adv_estimator} needs a critic")


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did."""

    version: int
    """Of the policy after it."""
    metrics: Mapping[str, float]
    control: KLControl
    """The weight of KL in the reward, for the next step."""


def train_step(
    parts: StepParts,
    groups: Sequence[Group],
    *,
    step: int,
    control: KLControl | None = None,
    baselines: Sequence[float | None] | None = None,
) -> StepReport:
    """Train on the survivors of `groups`. `step` counts from 1.

    `control` comes from the last report, None at the start; `baselines` are remax's greedy rewards, one per group, None
    for a group whose greedy sample failed: it has nothing to be compared with, and advantage 0.
    """
    control = control or KLControl.start(parts.algorithm.kl_ctrl)
    rows = rows_of(groups)
    if not any(row.num_sampled for row in rows):
        raise RunError(f"training step {step} has nothing to train on: none of its {len(groups)} groups has a survivor")
    spans = Spans()
    batch = _batch(groups, rows)
    with spans("reference"):
        batch = replace(batch, ref_logprobs_T=parts.reference.logprobs(rows) if parts.reference else None)
    with spans("values"):
        batch = replace(batch, values_T=parts.critic.values(rows) if parts.critic else None)
    inputs = AdvantageInputs.of(
        groups,
        values_T=batch.values_T,
        baselines_G=None if baselines is None else _tensor(baselines),
        reward=parts.reward,
    )
    penalty = None
    if parts.algorithm.use_kl_in_reward:
        with spans("old_logprobs"):
            batch = replace(batch, old_logprobs_T=parts.policy.logprobs(rows))
        penalty = _penalise(batch, inputs, parts.algorithm, control)
        inputs = replace(inputs, token_rewards_T=penalty.token_rewards_T)
    if parts.algorithm.needs_gradient_norms():
        with spans("gradient_norms"):
            inputs = replace(inputs, gradient_norms_T=parts.policy.gradient_norms(rows))
    advantages = compute_advantages(inputs, parts.algorithm)
    batch = replace(batch, advantages_T=advantages.advantages_T, returns_T=advantages.returns_T)
    if parts.algorithm.mask_truncated:
        batch = replace(batch, rows=mask_truncated(groups, step))
    metrics = _learn(parts, batch, step, spans)
    return StepReport(
        parts.policy.version,
        {**_describe(groups, inputs, advantages), **_describe_kl(penalty, control), **metrics, **_timings(spans)},
        control if penalty is None else control.after(penalty.kl, inputs.num_trajectories),
    )


def is_informative(group: Group, filter_groups: FilterGroupsConfig) -> bool:
    """Whether a group has signal: with `algorithm.filter_groups`, survivors that differ in its metric."""
    return not filter_groups.enable or has_signal(_scores(group), filter_groups.metric)


def mask_truncated(groups: Sequence[Group], step: int) -> tuple[Row, ...]:
    """The rows of a batch in which answers cut off at the token limit have no token that trains."""
    rows = tuple(
        replace(row, mask=(0,) * len(row.mask)) if trajectory.outcome.reason is StopReason.LENGTH else row
        for group in groups
        for trajectory in group.survivors
        for row in trajectory.rows
    )
    if not any(row.num_sampled for row in rows):
        raise RunError(
            f"training step {step} has nothing to train on: every answer was cut off at rollout.response_length, and "
            "algorithm.mask_truncated leaves them out"
        )
    return rows


def _tensor(baselines: Sequence[float | None]) -> Tensor:
    return torch.tensor([nan if value is None else value for value in baselines], dtype=torch.float32)


def _scores(group: Group) -> list[Score]:
    return [trajectory.reward for trajectory in group.survivors if trajectory.reward is not None]


def _batch(groups: Sequence[Group], rows: tuple[Row, ...]) -> TrainBatch:
    """The batch of these rows, before anything is known of their tokens."""
    group_S, trajectory_S = group_and_trajectory_ids(groups)
    return TrainBatch(rows, group_S, trajectory_S, advantages_T=torch.zeros(sum(len(row.ids) for row in rows)))


def _penalise(batch: TrainBatch, inputs: AdvantageInputs, algorithm: AlgorithmConfig, control: KLControl) -> KLPenalty:
    old_T, ref_T = batch.old_logprobs_T, batch.ref_logprobs_T
    assert old_T is not None and ref_T is not None, "computed just before"
    return penalise_kl(
        old_T, ref_T, inputs.mask_T, inputs.sequence_T, inputs.num_sequences, algorithm, control.coefficient
    )


def _learn(parts: StepParts, batch: TrainBatch, step: int, spans: Spans) -> dict[str, float]:
    """Critic first, as its loss is against the values behind the advantages; then policy, then reference sync."""
    metrics: dict[str, float] = {}
    if parts.critic is not None:
        with spans("critic"):
            metrics |= parts.critic.train(batch)
    if step > parts.trainer.critic_warmup:
        with spans("policy"):
            metrics |= parts.policy.train(batch)
    if parts.reference is not None:
        with spans("reference_sync"):
            metrics["ref/synced"] = float(parts.reference.follow(parts.policy, step))
    return metrics


def _describe(groups: Sequence[Group], inputs: AdvantageInputs, advantages: Advantages) -> dict[str, float]:
    rewards_N, lengths_N = inputs.rewards_N, _lengths(inputs)
    sampled = advantages.advantages_T[inputs.mask_T]
    return {
        "reward/mean": rewards_N.mean().item(),
        "reward/std": rewards_N.std(correction=0).item(),
        "reward/min": rewards_N.min().item(),
        "reward/max": rewards_N.max().item(),
        "advantage/mean": sampled.mean().item(),
        "advantage/abs_mean": sampled.abs().mean().item(),
        "response_length/mean": lengths_N.mean().item(),
        "response_length/max": lengths_N.max().item(),
        "batch/groups": len(groups),
        "batch/trajectories": inputs.num_trajectories,
        "batch/rows": inputs.num_sequences,
        "batch/failed": sum(len(group.trajectories) - len(group.survivors) for group in groups),
        "batch/preemptions": sum(
            item.extra.get("engine_preemptions", 0) for group in groups for item in group.trajectories
        ),
        "batch/no_signal": sum(not has_signal(_scores(group), "reward") for group in groups),
    }


def _lengths(inputs: AdvantageInputs) -> Tensor:
    """Sampled tokens of each trajectory."""
    return torch.zeros(inputs.num_trajectories).index_add(0, inputs.trajectory_T, inputs.mask_T.float())


def _describe_kl(penalty: KLPenalty | None, control: KLControl) -> dict[str, float]:
    if penalty is None:
        return {}
    return {"reward/kl": penalty.kl, "reward/kl_coefficient": control.coefficient}


def _timings(spans: Spans) -> dict[str, float]:
    return {f"timing/{name}_s": seconds for name, seconds in add_up(spans.take()).items()}
