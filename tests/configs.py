"""Small configs for tests, and the mistakes found in one."""

import pytest

from treadle.config import Config, TrainConfig, loads
from treadle.errors import ConfigError, Mistake

ROLLOUT = "model: {path: somewhere}\n"
TRAINING = """
model: {path: somewhere}
data: {train_files: [tasks.jsonl], val_files: [held_out.jsonl], train_batch_size: 64}
rollout: {n: 8}
reward: {functions: {answer: {path: exact_match}}}
trainer: {}
"""


def rollout_config(*words: str, text: str = ROLLOUT) -> Config:
    """A rollout that stands alone, with values laid over it."""
    return loads(text, "base.yaml", words)


def training_config(*words: str, text: str = TRAINING) -> TrainConfig:
    """A training run, with values laid over it."""
    config = loads(text, "base.yaml", words)
    assert isinstance(config, TrainConfig)
    return config


def mistakes(*words: str, text: str = ROLLOUT) -> list[Mistake]:
    """What is wrong with a config; at least one thing must be."""
    with pytest.raises(ConfigError) as caught:
        loads(text, "base.yaml", words)
    return list(caught.value.mistakes)


def mistake(*words: str, text: str = ROLLOUT) -> Mistake:
    """The one thing that is wrong with a config."""
    (only,) = mistakes(*words, text=text)
    return only
