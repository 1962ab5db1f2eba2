"""The terms of a run, as its config comes to: how long it is, how far tokens may lag, what bounds its flow.

Owns the arithmetic between config sections that the trainer needs and `config/plan.py` does not print. Starts nothing.
"""

import time
from dataclasses import dataclass
from math import ceil

from treadle.config import TrainConfig
from treadle.data.tasks import TaskSource
from treadle.rollout.provenance import RunInputs, digest_of


def total_steps(config: TrainConfig, tasks: TaskSource) -> int:
    """How many steps a run takes: as told, or as many as its epochs need."""
    trainer = config.trainer
    needed = ceil(trainer.total_epochs * len(tasks) / config.data.train_batch_size)
    return trainer.total_training_steps or needed


def max_lag(config: TrainConfig) -> int:
    """How many policy versions a token may be behind the weights it trains."""
    return {"sync": 0, "one_step_off": 1, "fully_async": config.trainer.max_staleness}[config.trainer.mode]


def settings_digest(config: TrainConfig, inputs: RunInputs | None = None) -> str:
    """Stands for everything that decides what is sampled: what other settings left is not taken over."""
    inputs = inputs or RunInputs.of(config.rollout, config.model, config.reward)
    fresh = f"-{time.time()}" if config.checkpoint.resume_mode == "disable" else ""
    return digest_of(inputs.training) + fresh


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """The bounds of a flow."""

    batch_size: int
    """Groups of one training step."""
    lag: int
    """Policy versions a token may be behind the weights it trains."""
    drop_stale: bool
    """Whether groups that would become too old are begun again instead of waited for."""
    patience_s: float
    """How long a step waits for any group to end."""

    @classmethod
    def of(cls, config: TrainConfig) -> "BufferLimits":
        limits, failures, trainer = config.rollout.limits, config.rollout.failures, config.trainer
        return cls(
            batch_size=config.data.train_batch_size,
            lag=max_lag(config),
            drop_stale=trainer.mode == "fully_async" and trainer.stale_samples == "drop",
            patience_s=2 * (failures.session_retries + 1) * limits.session_timeout_s + limits.request_timeout_s,
        )
