"""Training step: groups of trajectories in, new weights out. The same for every schedule.

Owns the order: reference, old logprobs, values, advantages, critic, policy, reference sync. Touches no file:
the networks are called through their protocols, and block; a schedule calls `train_step` through a `Learner`.
Invariant: only survivors train, and the rows of one trajectory share its advantage.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan

import torch
from torch import Tensor

from treadle.algorithm.advantage_inputs import AdvantageInputs, Advantages, has_seats, has_signal, rows_of, split_seats
from treadle.algorithm.estimators import add_distillation, compute_advantages, find_pairs
from treadle.algorithm.kl import KLControl, KLPenalty, penalise_kl
from treadle.config.reward import RewardConfig
from treadle.config.root import TrainConfig
from treadle.config.training import (
    PREFERENCE_ESTIMATORS,
    ActorConfig,
    AlgorithmConfig,
    FilterGroupsConfig,
    TrainerConfig,
)
from treadle.errors import MisuseError, RunError
from treadle.journal import RowAnnotation
from treadle.observe.step_metrics import Spans, add_up
from treadle.policy.protocol import Critic, Policy, Reference, TrainBatch, group_and_trajectory_ids
from treadle.trainer.annotations import annotate_rows
from treadle.trainer.teacher_prompt import TeacherPrompt
from treadle.types import Group, Row, Score, StopReason
from treadle.weights.sync import WeightLock


@dataclass(frozen=True, slots=True)
class StepParts:
    """What a step works with. Built once; the step itself keeps no state."""

    policy: Policy
    actor: ActorConfig
    algorithm: AlgorithmConfig
    trainer: TrainerConfig
    reference: Reference | None = None
    """Needed by `actor.use_kl_loss`, and where `algorithm.needs_reference()`."""
    critic: Critic | None = None
    """Needed by gae."""
    reward: RewardConfig = RewardConfig()  # noqa: RUF009  frozen
    """The weights of the parts of rewards."""
    annotations: float = 0.0
    """As `logging.annotations`."""
    teacher_prompt: TeacherPrompt | None = None
    """What the reference reads in the place of the prompts; None for the same."""

    @classmethod
    def of(cls, config: TrainConfig, policy: Policy, reference: Reference | None, critic: Critic | None) -> "StepParts":
        """The networks of a run, with the sections of its config."""
        return cls(
            policy=policy,
            actor=config.actor,
            algorithm=config.algorithm,
            trainer=config.trainer,
            reference=reference,
            critic=critic,
            reward=config.reward,
            annotations=config.logging.annotations,
            teacher_prompt=TeacherPrompt.of(config),
        )

    def __post_init__(self) -> None:
        if self.reference is None and (self.actor.use_kl_loss or self.algorithm.needs_reference()):
            raise MisuseError("actor.use_kl_loss, use_kl_in_reward, distill_coef, dpo and ipo need a reference policy")
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
    annotations: tuple[RowAnnotation, ...] = ()
    """What was computed for each token of some rows (`logging.annotations`)."""


class Learner:
    """Learner: the networks of a run, which one training step after another changes, each in a thread."""

    def __init__(self, parts: StepParts, lock: WeightLock) -> None:
        """`lock`: what reads the weights and a step wait for each other."""
        self.parts = parts
        self._lock = lock

    @property
    def version(self) -> int:
        """The policy's version."""
        return self.parts.policy.version

    async def train(
        self,
        groups: Sequence[Group],
        *,
        step: int,
        control: KLControl | None,
        baselines: Sequence[float | None] | None,
    ) -> StepReport:
        """One step (see `train_step`), which leaves the event loop free."""
        async with self._lock.training():
            return await asyncio.to_thread(
                train_step, self.parts, groups, step=step, control=control, baselines=baselines
            )


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
    groups = _by_seat(groups, parts.reward, baselines)
    rows = rows_of(groups)
    if not any(row.num_sampled for row in rows):
        raise RunError(f"training step {step} has nothing to train on: none of its {len(groups)} groups has a survivor")
    spans = Spans()
    batch = _batch(parts, groups, rows, spans)
    inputs = AdvantageInputs.of(
        groups,
        values_T=batch.values_T,
        baselines_G=None if baselines is None else _tensor(baselines),
        reward=parts.reward,
    )
    penalty = None
    if parts.algorithm.needs_reference():
        with spans("old_logprobs"):
            batch = replace(batch, old_logprobs_T=parts.policy.logprobs(rows))
            inputs = replace(inputs, log_ratios_T=_compare_with_reference(batch))
    if parts.algorithm.use_kl_in_reward:
        penalty = _penalise(batch, inputs, parts.algorithm, control)
        inputs = replace(inputs, token_rewards_T=penalty.token_rewards_T)
    advantages = _estimate_advantages(parts, batch, rows, inputs, spans)
    batch = replace(
        batch,
        rows=mask_truncated(groups, step) if parts.algorithm.mask_truncated else rows,
        advantages_T=advantages.advantages_T,
        returns_T=advantages.returns_T,
        annotate=parts.annotations > 0 and step > parts.trainer.critic_warmup,
    )
    metrics = _learn(parts, batch, step, spans)
    notes = parts.policy.annotations() if batch.annotate else None
    return StepReport(
        parts.policy.version,
        {
            **_describe(groups, inputs, advantages),
            **_describe_kl(penalty, control),
            **_describe_reference(inputs, parts.algorithm),
            **metrics,
            **_timings(spans),
        },
        control if penalty is None else control.after(penalty.kl, inputs.num_trajectories),
        () if notes is None else annotate_rows(groups, batch, notes, step=step, share=parts.annotations),
    )


def _by_seat(
    groups: Sequence[Group], reward: RewardConfig, baselines: Sequence[float | None] | None
) -> tuple[Group, ...]:
    """Episodes of several agents as a group for each seat."""
    if baselines is not None and has_seats(groups):
        raise MisuseError("remax has one greedy answer for a task: episodes of several agents need another estimator")
    return split_seats(groups, reward.session_weights())


def is_informative(group: Group, filter_groups: FilterGroupsConfig) -> bool:
    """Whether a group has signal: with `algorithm.filter_groups`, survivors that differ in its metric, in some seat."""
    if not filter_groups.enable:
        return True
    return any(has_signal(_scores(seat), filter_groups.metric) for seat in split_seats([group]))


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


def _batch(parts: StepParts, groups: Sequence[Group], rows: tuple[Row, ...], spans: Spans) -> TrainBatch:
    """The batch of these rows, with what reference and critic say of their tokens."""
    group_S, trajectory_S = group_and_trajectory_ids(groups)
    batch = TrainBatch(rows, group_S, trajectory_S, advantages_T=torch.zeros(sum(len(row.ids) for row in rows)))
    with spans("reference"):
        read = rows if parts.teacher_prompt is None else parts.teacher_prompt.rows(groups)
        batch = replace(batch, ref_logprobs_T=parts.reference.logprobs(read) if parts.reference else None)
    with spans("values"):
        return replace(batch, values_T=parts.critic.values(rows) if parts.critic else None)


def _penalise(batch: TrainBatch, inputs: AdvantageInputs, algorithm: AlgorithmConfig, control: KLControl) -> KLPenalty:
    old_T, ref_T = batch.old_logprobs_T, batch.ref_logprobs_T
    assert old_T is not None and ref_T is not None, "computed just before"
    return penalise_kl(
        old_T, ref_T, inputs.mask_T, inputs.sequence_T, inputs.num_sequences, algorithm, control.coefficient
    )


def _estimate_advantages(
    parts: StepParts, batch: TrainBatch, rows: Sequence[Row], inputs: AdvantageInputs, spans: Spans
) -> Advantages:
    """By the configured estimator, with what distillation adds."""
    if parts.algorithm.needs_gradient_norms():
        with spans("gradient_norms"):
            inputs = replace(inputs, gradient_norms_T=parts.policy.gradient_norms(rows))
    found = compute_advantages(inputs, parts.algorithm)
    if not (coef := parts.algorithm.distill_coef):
        return found
    policy_T, teacher_T = batch.old_logprobs_T, batch.ref_logprobs_T
    assert policy_T is not None and teacher_T is not None, "computed just before"
    return replace(found, advantages_T=add_distillation(found.advantages_T, policy_T, teacher_T, inputs.mask_T, coef))


def _compare_with_reference(batch: TrainBatch) -> Tensor:
    assert batch.old_logprobs_T is not None and batch.ref_logprobs_T is not None, "computed just before"
    return batch.old_logprobs_T - batch.ref_logprobs_T


def _describe_reference(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> dict[str, float]:
    """How far the policy is from its teacher on its own samples; whether it prefers what its rewards prefer."""
    found: dict[str, float] = {}
    if algorithm.distill_coef and inputs.log_ratios_T is not None:
        found["distill/kl"] = inputs.log_ratios_T[inputs.mask_T].mean().item()
    if algorithm.adv_estimator in PREFERENCE_ESTIMATORS:
        margins_P = find_pairs(inputs).margins_P
        found["preference/pairs"] = len(margins_P)
        if len(margins_P):
            found["preference/margin"] = margins_P.mean().item()
            found["preference/accuracy"] = (margins_P > 0).double().mean().item()
    return found


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
