"""Tiny random models and rollouts for tests of training: a few thousand parameters, fp32, on the CPU."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from treadle.config.rollout import ModelConfig
from treadle.config.training import ActorConfig, OptimConfig, RolloutCorrectionConfig
from treadle.policy.policy import Sampling, SinglePolicy
from treadle.types import Group, Outcome, Row, Score, StopReason, Task, Trajectory

torch.set_num_threads(1)  # such small models leave threads nothing to do but to wait for each other

VOCABULARY = 61
CPU = torch.device("cpu")


def save_tiny_model(directory: Path, **changes: Any) -> Path:
    """A random Llama in a directory, with a tokenizer's files beside it; the same each time."""
    torch.manual_seed(7)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    LlamaForCausalLM(LlamaConfig(**(sizes | changes))).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "tokenizer_config.json").write_text("{}")
    return directory


def make_actor(**keys: Any) -> ActorConfig:
    keys = {"dtype": "fp32", "ppo_mini_batch_size": 64, "optim": OptimConfig(lr=1e-3)} | keys
    return ActorConfig(**keys)


def make_policy(
    directory: Path,
    *,
    temperature: float = 1.0,
    recompute: bool = False,
    total_steps: int = 10,
    correction: RolloutCorrectionConfig | None = None,
    **keys: Any,
) -> SinglePolicy:
    """A policy that starts from a directory; `keys` are the actor's."""
    return SinglePolicy.create(
        model=ModelConfig(path=str(directory), enable_gradient_checkpointing=recompute),
        actor=make_actor(**keys),
        rollout_correction=correction or RolloutCorrectionConfig(),
        sampling=Sampling(temperature, response_length=16),
        total_steps=total_steps,
        device=CPU,
    )


def make_row(rng: random.Random, *, turns: int = 1, version: int = 0) -> Row:
    """A row with sampled spans, and observations between them."""
    prompt = tuple(rng.randrange(3, VOCABULARY) for _ in range(rng.randint(2, 7)))
    mask: list[int] = []
    for turn in range(turns):
        mask += [0] * (rng.randint(1, 4) if turn else 0) + [1] * rng.randint(1, 6)
    ids = tuple(rng.randrange(3, VOCABULARY) for _ in mask)
    logprobs = tuple(-rng.random() - 3.0 if flag else 0.0 for flag in mask)
    return Row(prompt, ids, tuple(mask), logprobs, tuple(version if flag else -1 for flag in mask))


def make_group(rng: random.Random, uid: str, n: int = 4, turns: int = 2, forks: int = 1) -> Group:
    """n trajectories with random rewards; the first has `forks` rows."""
    trajectories = tuple(
        Trajectory(
            uid,
            sample,
            tuple(make_row(rng, turns=rng.randint(1, turns)) for _ in range(1 if sample else forks)),
            Outcome.ended(StopReason.STOP),
            Score(rng.choice([0.0, 0.25, 1.0]) if sample else 2.0),
        )
        for sample in range(n)
    )
    return Group(Task(uid, ({"role": "user", "content": "?"},)), trajectories)


def make_groups(seed: int = 0, num_groups: int = 4, **shape: int) -> tuple[Group, ...]:
    rng = random.Random(seed)
    return tuple(make_group(rng, f"task-{at}", **shape) for at in range(num_groups))


def weights(policy: SinglePolicy) -> Mapping[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.tensors().items()}
