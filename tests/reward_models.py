"""Small reward models with seeded random weights, and trajectories for them to read."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedModel

from tests.rollouts import save_model
from tests.tiny import _SIZES
from treadle.config import ModelConfig
from treadle.model.tokenizer import load_tokenizer
from treadle.types import Outcome, StopReason, Task, Trajectory


def save_classifier(directory: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A model directory with a head of one label, unless `num_labels` says otherwise."""
    return _save(directory, LlamaForSequenceClassification, seed, {"num_labels": 1, **changes})


def save_causal(directory: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A model directory for an engine."""
    return _save(directory, LlamaForCausalLM, seed, changes)


def _save(directory: Path, cls: type[PreTrainedModel], seed: int, changes: dict[str, Any]) -> Path:
    tokenizer = load_tokenizer(save_model(directory))
    torch.manual_seed(seed)
    sizes = _SIZES | {"vocab_size": tokenizer.backend_tokenizer.get_vocab_size(), "max_position_embeddings": 2048}
    cls(LlamaConfig(**sizes | changes)).save_pretrained(directory)
    save_model(directory)  # transformers wrote its own idea of the tokenizer's files
    return directory


def tokens_of(directory: Path, text: str) -> list[int]:
    return load_tokenizer(ModelConfig(path=str(directory))).encode(text, add_special_tokens=False)


def make_task(question: str = "6 * 7?", **fields: Any) -> Task:
    return Task("t", ({"role": "user", "content": question},), **{"ground_truth": "42", **fields})


def make_trajectory(answer: Any = "42", question: str = "6 * 7?", sample: int = 0) -> Trajectory:
    messages = ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    return Trajectory("t", sample, (), Outcome.ended(StopReason.STOP), messages=messages)
