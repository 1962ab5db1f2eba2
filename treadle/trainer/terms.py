"""Length of a run in steps, and the digest of the settings that decide what is sampled.

Computed from config sections. Starts nothing.
"""

import time
from math import ceil

from treadle.config import TrainConfig
from treadle.data.tasks import TaskSource
from treadle.rollout.provenance import RunInputs, digest_of


def total_steps(config: TrainConfig, tasks: TaskSource) -> int:
    """How many steps a run takes: `trainer.total_training_steps`, or what its epochs need."""
    trainer = config.trainer
    needed = ceil(trainer.total_epochs * len(tasks) / config.data.train_batch_size)
    return trainer.total_training_steps or needed


def settings_digest(config: TrainConfig, inputs: RunInputs | None = None) -> str:
    """Stands for everything that decides what is sampled: what other settings left is not taken over."""
    inputs = inputs or RunInputs.of(config.rollout, config.model, config.reward)
    fresh = f"-{time.time()}" if config.checkpoint.resume_mode == "disable" else ""
    return digest_of(inputs.training) + fresh
